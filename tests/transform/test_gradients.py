"""What gradient transforms say of themselves, alone and joined, and one made of a user's own."""

import optax
import pytest

import jaxslowmo as js
from jaxslowmo.transform import spec_of

SGD = optax.sgd(0.1)
mean, inside = js.all_reduce_gradients("replica"), js.all_reduce_gradients("device")
both = js.all_reduce_gradients(("replica", "device"))
clip = js.clip_by_global_norm(1.0, "tensor")
own = js.gradient_transform(optax.identity(), axes=("replica", "device"))
ONE, TWO = ("replica",), ("replica", "device")
REDUCES = {"weight", "ready_order", "param_specs"}
SCALE = {"weight", "finite", "unscaled"}
ROWS, CLIPS, SKIPS, HOLDS = "of_rows", "clips", "skips", "returns_updates"
TABLE = {
    "all_reduce_gradients": (both, TWO, REDUCES, {ROWS}),
    "all_reduce_rows": (js.sparse.all_reduce_rows("replica"), ONE, {"weight"}, set()),
    "clip": (clip, (), set(), {CLIPS, ROWS}),
    "accumulate": (js.gradients.accumulate(mean, 2), ONE, REDUCES, set()),
    "loss scale": (js.dynamic_loss_scale(SGD, "replica"), (), SCALE, {SKIPS, HOLDS}),
    "loss scale around": (
        js.dynamic_loss_scale(js.chain(mean, clip, SGD)),
        ONE, REDUCES | SCALE, {CLIPS, SKIPS, HOLDS},
    ),
    "gradient_transform": (own, TWO, {"weight"}, set()),
    "chain": (
        js.chain(mean, optax.clip(1.0), clip), ONE, REDUCES, {CLIPS, HOLDS}
    ),
    "optax.chain": (optax.chain(mean, clip), (), set(), {HOLDS}),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_what_each_says(name):
    tx, axes, takes, flags = TABLE[name]
    spec = spec_of(tx)
    assert (spec.axes, spec.takes) == (axes, takes)
    assert {flag for flag in (ROWS, CLIPS, SKIPS, HOLDS) if getattr(spec, flag)} == flags
