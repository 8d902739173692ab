"""Questions and programs that a report cannot answer are refused, by what is wrong."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxslowmo as js
from jaxslowmo.reports.communication import CommReport, CommRow, comm_report_of
from support.refusals import Refusal, each

X = jax.ShapeDtypeStruct((8,), jnp.float32)
DOUBLE = jax.jit(lambda x: 2 * x)
ROW = CommRow("slow", "replica", "all-reduce", "emitted", 1, 8, 8, 2, ("float32",))


def asked(argument, value, levels=("emitted", "compiled"), **question):
    report = CommReport((ROW,), ("local", "slow"), ("replica",), levels)
    return Refusal(lambda: report.wire_bytes(**{"kind": "slow", **question}), argument, value)


def programs(lowered, value):
    return Refusal(lambda: comm_report_of(lowered()), "`lowered`", value, TypeError)


def pipe():
    model = js.LayeredModel([lambda w, x: x @ w] * 2, lambda y, batch: jnp.mean(y))
    mesh, schedule = js.make_mesh({"stage": 2}), js.schedules.gpipe(2, 4)
    return js.pipelined(model, [np.eye(2, dtype=np.float32)] * 2, schedule, mesh=mesh)


def scheduled(argument, value, rows=8, **options):
    batch = np.ones((rows, 2) if rows else ())
    return Refusal(lambda: js.schedule_report(pipe(), batch, **options), argument, value)


ROWS = {
    "an unknown kind": asked("`kind`", "'lokal'", kind="lokal"),
    "an unknown axis": asked("`axis`", "'replicas'", axis="replicas"),
    "an unknown collective": asked("`collective`", "'psum'", collective="psum"),
    "an unknown level": asked("`level`", "'hlo'", level="hlo"),
    "no kind of several": asked("`kind`", "'local', 'slow'", kind=None),
    "what was not compiled": asked("`level`", "'compiled'", ("emitted",), level="compiled"),
    "what was compiled alone": asked("`level`", "'emitted'", ("compiled",)),
    "a text as a program": programs(lambda: "step", "str"),
    "a function as a program": programs(lambda: DOUBLE, "PjitFunction"),
    "None under a kind": programs(lambda: {"slow": DOUBLE.lower(X), "local": None}, "'local'"),
    "a plain function to measure": Refusal(lambda: js.measured(lambda x: x), "`step`", "<lambda>"),
    "a rate of 0": Refusal(lambda: js.measured(DOUBLE, rate=0), "`rate`", 0),
    "half a rate": Refusal(lambda: js.measured(DOUBLE, rate=2.5), "`rate`", 2.5),
    "no pipeline": Refusal(lambda: js.schedule_report(DOUBLE, X), "`pipe`", "PjitFunction"),
    "a batch of 6": scheduled("`schedule`", "got 6", 6),
    "a batch without rows": scheduled("`batch`", "None", 0),
    "no speed": scheduled("`flops_per_second`", 0, flops_per_second=0),
    "a link below 0": scheduled(
        "`bytes_per_second`", -1, flops_per_second=1e9, bytes_per_second=-1
    ),
    "a link without a speed": scheduled(
        "`bytes_per_second`", "`flops_per_second`", bytes_per_second=1e9
    ),
}


@each(ROWS)
def test_refused(refusal):
    refusal.check()
