"""What the parent of a process tells of the others."""

import pytest

from jaxslowmo.cli.processes._supervise import describe_loss

# As jaxlib 0.10 and 0.12 print it.
FATAL = (
    "F1121 15:10:32.612967    8864 client.h:80] Terminating process because the JAX distributed "
    "service detected fatal errors. This most likely indicates that another task died"
)
SILENT = f"{FATAL} absl::Status: UNAVAILABLE: The following tasks are unhealthy (stopped sending"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], None),
        (["Traceback (most recent call last):", "ValueError: no"], None),
        ([SILENT, "2", "The tasks have crashed."], "process 2 died or cannot be reached"),
        ([SILENT, "3, 1", ""], "processes 1 and 3 died or cannot be reached"),
        (
            [f"{FATAL} ABORTED: 1 unexpectedly tried to connect with a different incarnation."],
            "process 1 died or cannot be reached",
        ),
        ([SILENT, "0"], "process 0 (the coordinator) died or cannot be reached"),
        (
            [f"{FATAL} DEADLINE_EXCEEDED", "", "RPC: /xla.coordination.CoordinationService/Heartb"],
            "process 0 (the coordinator) died or cannot be reached",
        ),
        (
            [FATAL, "", "RPC: /xla.coordination.CoordinationService/RegisterTask"],
            "not all processes came together within --startup-timeout",
        ),
    ],
)
def test_what_the_runtime_says_of_a_lost_process(lines, words):
    assert describe_loss(lines) == words
