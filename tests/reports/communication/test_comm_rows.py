"""Questions asked of a report, and its two written forms."""

import json

from jaxslowmo.reports._comm_report import CommReport, CommRow


def row(kind, axis, collective, level, count, nbytes, **more):
    wire = more.pop("wire", nbytes)
    return CommRow(kind, axis, collective, level, count, nbytes, wire, 4, ("float32",), **more)


GRADIENTS = {"content": "gradients"}
REPORT = CommReport(
    rows=(
        row("local", "device", "all-reduce", "emitted", 6, 4_000_000, wire=6_000_000, **GRADIENTS),
        row("local", "device", "all-reduce", "emitted", 0, 8, wire=12, content="padding"),
        row("local", "device", "all-reduce", "compiled", 1, 4_000_008, wire=6_000_012),
        row("slow", "device", "all-reduce", "emitted", 6, 4_000_000),
        row("slow", "replica", "reduce-scatter", "emitted", 1, 1000, conditional=True),
        row("slow", "replica,device", "all-gather", "emitted", 3, 10, in_loop=True, trip_count=3),
    ),
    kinds=("local", "slow", "idle"),
    axes=("replica", "device", "replica,device"),
)


def test_sums():
    assert REPORT.count(kind="local") == 6
    assert REPORT.count(kind="local", level="compiled") == 1
    for level in ("emitted", "compiled"):
        assert REPORT.bytes(kind="local", level=level) == 4_000_008
        assert REPORT.wire_bytes(kind="local", level=level) == 6_000_012
    assert REPORT.wire_bytes(kind="local", **GRADIENTS) == 6_000_000
    assert REPORT.wire_bytes(kind="local", content="padding") == 12
    assert REPORT.count(kind="slow") == 10
    assert REPORT.bytes(kind="slow", collective="reduce-scatter") == 1000
    assert REPORT.count(kind="idle") == 0


def test_an_axis_covers_collectives_that_cross_it_among_others():
    assert REPORT.count(kind="slow", axis="replica") == 4
    assert REPORT.count(kind="slow", axis="device") == 9
    for both in ("device,replica", ("replica", "device")):
        assert REPORT.count(kind="slow", axis=both) == 3
    assert REPORT.count(kind="local", axis="replica") == 0
    assert REPORT.count(kind="local", axis="?") == 0


def test_table():
    """Compiled amounts stand in the first line of their axis and collective."""
    assert [" ".join(line.split()) for line in str(REPORT).splitlines()] == [
        "kind axis collective content emitted bytes sent compiled bytes sent notes",
        "local device all-reduce gradients 6 4,000,000 6,000,000 1 4,000,008 6,000,012",
        "local device all-reduce padding 0 8 12",
        "slow device all-reduce 6 4,000,000 4,000,000 0 0 0",
        "slow replica reduce-scatter 1 1,000 1,000 0 0 0 conditional",
        "slow replica,device all-gather 3 10 10 0 0 0 loop",
        "idle - (no communication) 0 0 0 0 0 0",
    ]


def test_json():
    read = json.loads(REPORT.to_json())
    assert set(read) == {"rows", "kinds", "axes", "levels", "state"}
    assert read["rows"][0]["wire_bytes"] == 6_000_000
