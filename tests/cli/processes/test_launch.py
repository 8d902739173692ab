"""What `jaxslowmo launch` refuses; that it launches, tests/cluster shows."""

import pytest


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--processes", 2, "--", "compare"], "launch runs: jaxslowmo launch ... -- train ...;"),
        (["--processes", 2], "got nothing"),
        (["--processes", 2, "--", "train"], "train needs --out"),
        (["--processes", 2, "--", "train", "--out="], "train needs --out"),
        (["--processes", 0, "--", "train", "--out", "x"], "--processes must be >= 1, got 0"),
        (
            ["--processes", 2, "--", "train", "--out", "x", "--process-id=1", "--restarts", 2],
            "--process-id, --restarts of train: launch decides it",
        ),
    ],
)
def test_what_cannot_be_launched(call, argv, words):
    outcome = call("launch", *argv)
    assert outcome.code == 2
    assert words in outcome.err
