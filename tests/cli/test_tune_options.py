"""What the commands below `jaxslowmo tune` refuse."""

import pytest


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--limits 5MiB,lots", "--limits takes sizes such as 25MiB, 500kB or 4096, got lots"),
        ("--limits ,", "--limits must list one or more different sizes, got nothing"),
        ("--limits 1024,1KiB", "--limits must list one or more different sizes, got 1024,1024"),
        ("--first -1", "--first takes sizes"),
        ("--order backward", "--order must be one of ready, reverse, forward, got backward"),
        ("--rounds 0", "--rounds must be >= 1, got 0"),
        ("--steps 0", "--steps must be >= 1, got 0"),
        ("--replicas 1", "--replicas must be >= 2: one device has nothing to reduce"),
        ("--replicas 9", "need 9 devices, found 8"),
        ("--preset 3m", "--preset must be one of tiny, demo, 1m, 10m, 124m, 7b, got 3m"),
    ],
)
def test_wrong_usage_is_one_line(call, arguments, message):
    outcome = call("tune", "buckets", *arguments.split())
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("error: ")
    assert outcome.err.count("\n") == 1
    assert message in outcome.err
