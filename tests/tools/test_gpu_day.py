"""The measuring of a GPU: parts that fail or hang end alone; all of it with tiny sizes."""

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gpu_day(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu_day

    return gpu_day


def test_a_part_that_fails_or_hangs_ends_alone(gpu_day):
    parts = [
        gpu_day.Part("absent", ["/no/such/program"]),
        gpu_day.Part("fails", ["sh", "-c", "echo figure; echo reason >&2; exit 3"]),
        gpu_day.Part("hangs", ["sh", "-c", "sleep 600 & echo $!; wait"], weight=0.05),
        gpu_day.Part("ends", ["sh", "-c", 'echo "$NAME"'], environment={"NAME": "last figure"}),
    ]
    results = list(gpu_day.run_parts(parts, 1, dict(os.environ)))
    absent, fails, hangs, ends = results
    assert absent.outcome.startswith("did not start")
    assert (fails.outcome, fails.output, fails.errors) == ("ended with 3", "figure", "reason")
    assert re.fullmatch(r"ended after its limit of [23] seconds", hangs.outcome)
    assert (ends.outcome, ends.output) == ("ok", "last figure")
    # What the part has started is gone, too: it might hold memory of the GPU.
    status = Path(f"/proc/{hangs.output.strip()}/status")
    assert not status.exists() or "zombie" in status.read_text()

    device = gpu_day.Device(1, 0, {"devices": "1 x gpu"})
    page = gpu_day.page(device, results, 2, "the command")
    assert "- devices: 1 x gpu" in page
    assert "**Parts that have not ended: 2.**" in page
    assert "**ended with 3**\n\n```text\nreason\n```" in page
    assert "`NAME='last figure' python -c" in page
