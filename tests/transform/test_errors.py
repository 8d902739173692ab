"""What schedules, exchanges, specs and chains are not made of."""

from typing import Any, NamedTuple

import optax

import jaxslowmo as js
from jaxslowmo.transform import checked_group
from support.refusals import Refusal, each

LOCAL = js.local_sgd("replica")
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
    "axis twice": exchange("`axis_name`", "('a', 'a')", axis_name=("a", "a")),
    "bytes": exchange("`bucket_bytes`", -1, bucket_bytes=-1),
    "event of a period": of(lambda: js.spec.Event("x", 3, len), "`due`", 3),
    "algorithm without axes": of(
        lambda: js.ParameterTransform(js.Algorithm((js.spec.Event("x", js.every(3), len),))),
        "`axis_name`",
    ),
    "gradients of parameters": of(lambda: js.gradient_transform(LOCAL), "`tx`"),
    "chain that goes on": of(lambda: js.chain(js.sgp("replica"), IDENTITY), "chain", "sgp"),
    "copies of no field": of(
        lambda: js.spec.remembers_parameters(Own, moves=("x",)), "Own", "('x',)"
    ),
}  # fmt: skip


@each(ROWS)
def test_refused(refusal):
    refusal.check()
