"""Questions and programs that a report cannot answer are refused, by what is wrong."""

import jax

import jaxslowmo as js
from jaxslowmo.reports._comm_report import CommReport, CommRow, comm_report_of
from support.refusals import Refusal, each

DOUBLE = jax.jit(lambda x: 2 * x)
ROW = CommRow("slow", "replica", "all-reduce", "emitted", 1, 8, 8, 2, ("float32",))


def asked(argument, value, levels=("emitted", "compiled"), **question):
    report = CommReport((ROW,), ("local", "slow"), ("replica",), levels)
    return Refusal(lambda: report.wire_bytes(**{"kind": "slow", **question}), argument, value)


def programs(lowered, value):
    return Refusal(lambda: comm_report_of(lowered()), "`lowered`", value, TypeError)


ROWS = {
    "an unknown kind": asked("`kind`", "'lokal'", kind="lokal"),
    "an unknown axis": asked("`axis`", "'replicas'", axis="replicas"),
    "no kind of several": asked("`kind`", "'local', 'slow'", kind=None),
    "what was not compiled": asked("`level`", "'compiled'", ("emitted",), level="compiled"),
    "a function as a program": programs(lambda: DOUBLE, "PjitFunction"),
    "a plain function to measure": Refusal(
        lambda: js.reports.measured(lambda x: x), "`step`", "<lambda>"
    ),
}


@each(ROWS)
def test_refused(refusal):
    refusal.check()
