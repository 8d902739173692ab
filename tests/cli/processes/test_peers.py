"""Errors that a lost process can have caused."""

import jax
import pytest

from jaxslowmo.cli.processes._peers import lost_a_peer


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
