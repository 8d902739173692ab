"""One process that fails ends all with its code, and what a lost one can have caused."""

import jax
import pytest

from jaxslowmo.cli.processes._watch import lost_a_peer
from support.pairs import two_processes


def chained(outer: Exception, cause: Exception) -> Exception:
    outer.__cause__ = cause
    return outer


GONE = jax.errors.JaxRuntimeError("INTERNAL: Barrier failed because: task is set to ERROR")


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (GONE, True),
        (ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer"), True),
        (chained(RuntimeError("the checkpoint could not be written"), GONE), True),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), False),
        (chained(RuntimeError("the checkpoint could not be written"), OSError("full")), False),
        (ValueError("--replicas must be >= 1"), False),
    ],
)
def test_errors_that_a_lost_process_can_have_caused(error, lost):
    assert lost_a_peer(error) is lost


PROGRAM = """
import time
from jaxslowmo.cli._errors import CommandError
from jaxslowmo.cli.processes._watch import failing_together
from jaxslowmo.cli.processes._watch import Watch

with failing_together(Watch(rank, 2, 0, lambda: ""), 10):
    if rank == {rank}:
        raise {error}
    {{}}[0] if {both} else time.sleep(1000)
"""


@pytest.mark.parametrize(
    ("rank", "error", "code", "line"),
    [
        (1, "KeyError('missing')", 1, "KeyError: 'missing'"),
        pytest.param(
            *(0, "OSError(13, 'Permission denied', 'a')", 1, "[Errno 13] Permission denied: 'a'"),
            marks=pytest.mark.exhaustive,
        ),
        (0, "OSError(28, 'No space left', 'b')", 75, "No space left on device ([Errno 28] No"),
        (1, "CommandError('--seed must be 1')", 2, "--seed must be 1"),
    ],
)
def test_one_that_fails_ends_both_with_its_code(tmp_path, rank, error, code, line):
    """jax's own end would wait for the other, for 300 s."""
    program = PROGRAM.format(rank=rank, error=error, both=False)
    said = two_processes(program, tmp_path, seconds=200, code=code)
    assert said[1 - rank].startswith(f"error: process {rank} has ended: {line}")
    assert len(said[1 - rank].splitlines()) == 1
    if code == 1:
        assert said[rank].startswith("Traceback")
        assert "in <module>" in said[rank]
    else:
        assert said[rank].startswith(f"error: {line}")


def test_both_may_fail_at_once(tmp_path):
    program = PROGRAM.format(rank=0, error="KeyError(0)", both=True)
    said = two_processes(program, tmp_path, seconds=200, code=1)
    assert all("KeyError" in one for one in said)


def test_both_part_in_the_end(tmp_path):
    program = PROGRAM.format(rank=2, error="None", both=False).replace("sleep(1000)", "sleep(rank)")
    assert two_processes(program + "print('parted')", tmp_path) == ["parted\n"] * 2
