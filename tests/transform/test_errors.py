"""What schedules, exchanges, specs and chains are not made of."""

from typing import Any, NamedTuple

import optax
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.transform import checked_group
from support.refusals import Refusal, each

LOCAL = js.local_sgd("replica")
MEAN = js.all_reduce_gradients("replica")
IDENTITY = optax.identity()


class Own(NamedTuple):
    start: Any
    origin: Any


def schedule(**options):
    ((name, value),) = options.items()
    return Refusal(lambda: js.every(**{"k": 3, **options}), f"`{name}`", value)


def exchange(*said, **options):
    return Refusal(lambda: checked_group(**{"owner": "own", "axis_name": "a", **options}), *said)


def of(call, *said, error=ValueError):
    return Refusal(call, *said, error=error)


ROWS = {
    "period 0": schedule(k=0),
    "period that is no int": schedule(k=2.0),
    "period that is a truth value": schedule(k=True),
    "start -1": schedule(start=-1),
    "offset": schedule(offset=0.5),
    "before": schedule(before="some"),
    "class of a period": of(lambda: js.spec.Every(0), "`k`", 0),
    "axis": exchange("`axis_name`", "('',)", axis_name=("",)),
    "no axes": exchange("`axis_name`", "()", axis_name=()),
    "axis twice": exchange("`axis_name`", "('a', 'a')", axis_name=("a", "a")),
    "local axis": exchange("`local_axis_name`", 2, local_axis_name=("b", 2)),
    "bytes": exchange("`bucket_bytes`", -1, bucket_bytes=-1),
    "specs": exchange("`param_specs`", "str", param_specs={"w": P(), "b": "fsdp"}),
    "specs of stacked leaves": exchange("`param_specs`", "'r'", axis_name="r", param_specs=P("r")),
    "codec": exchange("`codec`", "float16", codec="float16"),
    "event of a period": of(lambda: js.spec.Event("x", 3, len), "`due`", 3),
    "event without a function": of(lambda: js.spec.Event("x", js.every(3), None), "`run`", None),
    "algorithm without axes": of(
        lambda: js.ParameterTransform(js.Algorithm((js.spec.Event("x", js.every(3), len),))),
        "`axis_name`",
    ),
    "axes of an algorithm": of(
        lambda: js.ParameterTransform(js.Algorithm(), ("a", "a")), "`axis_name`", ("a", "a")
    ),
    "no algorithm": of(lambda: js.ParameterTransform(js.every(3)), "`algorithm`", "Every"),
    "one layer fragment": of(lambda: js.layers(1, where=bool), "`count`", 1),
    "layers along no axis": of(lambda: js.layers(2, where=bool, axis=-1), "`axis`", -1),
    "layers of names": of(lambda: js.layers(2, where="layers"), "`where`", "layers"),
    "gradients without a spec": of(lambda: js.GradientTransform(*MEAN, None), "`spec`", None),
    "gradients of parameters": of(lambda: js.gradient_transform(LOCAL), "`tx`"),
    "gradients of a number": of(lambda: js.gradient_transform(3), "`tx`", 3),
    "gradients over no axis": of(lambda: js.gradient_transform(IDENTITY, axes=3), "`axes`", 3),
    "gradients due": of(lambda: js.gradient_transform(IDENTITY, due=True), "`due`", True),
    "gradients' arguments": of(lambda: js.spec.Reduction(takes={"x"}), "`takes`", "['x']"),
    "chain": of(lambda: js.chain(IDENTITY, 3), "`transforms`", 3),
    "chain that goes on": of(lambda: js.chain(js.sgp("replica"), IDENTITY), "chain", "sgp"),
    "copies in a dict": of(lambda: js.spec.remembers_parameters(dict), "`kind`", "dict"),
    "copies of no field": of(
        lambda: js.spec.remembers_parameters(Own, moves=("x",)), "Own", "('x',)"
    ),
    "copies that do both": of(
        lambda: js.spec.remembers_parameters(Own, moves=("start",), stays=("start",)),
        "moves=", "stays=",
    ),
}  # fmt: skip


@each(ROWS)
def test_refused(refusal):
    refusal.check()
