"""Two processes of two devices save; they, and one process of any devices, restore."""

import ast
import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from checkpoint.runs import MODEL_STATE, PARAMS, checksum_by_replica, make_step
from jaxslowmo.checkpoint import Checkpoints, load_consensus
from support.waiting import PATIENCE_SECONDS

SECONDS = PATIENCE_SECONDS


def two_processes(folder: Path) -> list[dict[str, str]]:
    """What both print, by the first word; both must finish within `SECONDS`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = Path(__file__).with_name("process.py")
    env = os.environ | {"PYTHONPATH": str(script.parents[1])}
    outputs = [folder / f"out{rank}" for rank in range(2)]
    errors = [folder / f"err{rank}" for rank in range(2)]
    with contextlib.ExitStack() as files:
        processes = [
            subprocess.Popen(
                [sys.executable, str(script), str(port), str(rank), str(folder / "run")],
                stdin=subprocess.PIPE,
                stdout=files.enter_context(outputs[rank].open("w")),
                stderr=files.enter_context(errors[rank].open("w")),
                env=env,
            )
            for rank in range(2)
        ]
    try:
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline and not all(
            process.poll() is not None or "DONE" in out.read_text()
            for process, out in zip(processes, outputs, strict=True)
        ):
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    for out, err in zip(outputs, errors, strict=True):
        assert "DONE" in out.read_text(), f"{out.read_text()}\n{err.read_text()[-2000:]}"
    lines = [[x.partition(" ") for x in out.read_text().splitlines()] for out in outputs]
    return [{first: rest for first, _, rest in own} for own in lines]


@pytest.mark.usefixtures("quick_processes")
def test_saved_by_two_processes(mesh_of, tmp_path):
    written: dict[int, int] = {}
    for rank, said in enumerate(two_processes(tmp_path)):
        assert said["EXACT"] == "True {'t': 3}"
        assert said["RESUMED"] == said["UNDISTURBED"]
        assert (
            "has no checkpoint of step 99: it has those of steps 1, 2, 3, 4, 5" in said["MISSING"]
        )
        assert said["FALLBACK"].startswith("5 ")
        assert ["not be read on another process", "a broken cable"][rank] in said["FALLBACK"]
        own = ast.literal_eval(said["UNDISTURBED"])
        assert list(own) == [2 * rank, 2 * rank + 1]
        written |= own
    checkpoints = Checkpoints(tmp_path / "run")
    step = make_step("slowmo over local_sgd", mesh_of({"replica": 4}))
    found = checkpoints.restore(step, PARAMS, model_state=MODEL_STATE, step=5)
    assert found.is_exact
    assert checksum_by_replica(found.state) == written
    model = load_consensus(tmp_path / "run" / "model")
    mean = np.asarray(found.state.params["w"]).mean(0)
    np.testing.assert_allclose(model["w"], mean, rtol=1e-6, atol=1e-7)
