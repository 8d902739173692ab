"""The measuring of a GPU: parts that fail or hang end alone; all of it with tiny sizes."""

import os
import re
import sys
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


@pytest.mark.parametrize(("count", "gigabytes"), [(1, 12), (1, 64), (8, 64)])
def test_benchmarks_know_all_options_of_the_parts(gpu_day, tmp_path, count, gigabytes):
    device = gpu_day.Device(count, 10**9 * gigabytes, {})
    for part in (*gpu_day.parts_of(device, tmp_path), *gpu_day.tiny_parts(tmp_path)):
        if "benchmarks/" in part.command[1]:
            text = (ROOT / part.command[1]).read_text("utf-8")
            for option in (word for word in part.command if word.startswith("--")):
                assert f'"{option}"' in text, (part.name, option)


def test_without_a_gpu_there_is_one_line(gpu_day, monkeypatch):
    def probe(platform):
        raise gpu_day.NoDevice("jax sees only CPUs")

    monkeypatch.setattr(gpu_day, "probe", probe)
    monkeypatch.setattr(sys, "argv", ["gpu_day.py"])
    with pytest.raises(SystemExit) as refused:
        gpu_day.main()
    assert str(refused.value).startswith("gpu_day.py: no GPU that jax can use: jax sees only CPUs.")
    assert "\n" not in str(refused.value)


def test_the_machine_is_described_by_another_process(gpu_day):
    device = gpu_day.probe("cpu")
    assert device.count >= 1
    assert {"devices", "jax", "jaxlib", "python", "runtime"} <= set(device.facts)


@pytest.mark.exhaustive  # six processes that import jax and compile
def test_tiny_parts_all_succeed(gpu_day, monkeypatch, tmp_path):
    out = tmp_path / "day.md"
    monkeypatch.setattr(sys, "argv", ["gpu_day.py", "--tiny", "--out", str(out)])
    gpu_day.main()
    page = out.read_text("utf-8")
    assert page.count("| ok |") == 6
    for figure in ("of the copy's: ", "1 passed", "slowmo: local step, host", "host, 1F1B"):
        assert figure in page, figure
    assert "measured: " in page
