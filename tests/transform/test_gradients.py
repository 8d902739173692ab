"""What gradient transforms say of themselves, alone and joined, and one made of a user's own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from jaxslowmo.transform import spec_of

PARAMS = {"w": jnp.ones((4, 2)), "b": jnp.ones(3)}
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


def over_time(tx, updates):
    """By update, the axes of the reductions that are due, from the states of one replica."""
    due, state = [], None

    def run(params):
        nonlocal state
        state = tx.init(params)
        for _ in range(updates):
            found = spec_of(tx).reductions(state)
            due.append([each.axes for each in found])
            yield [jnp.asarray(each.due) for each in found]
            _, state = tx.update(PARAMS, state, params)

    one = lambda params: list(run(params))  # noqa: E731
    for axis in TWO:
        one = jax.vmap(one, axis_name=axis, axis_size=2, in_axes=None)
    values = jax.jit(one)(PARAMS)
    return [
        [axes for axes, is_due in zip(each, now, strict=True) if np.all(is_due)]
        for each, now in zip(due, values, strict=True)
    ]


counting = optax.scale_by_schedule(lambda count: 1.0)
JOINED = js.chain(inside, js.gradients.skip_unused(js.chain(mean), "replica"))
DUE = {
    "accumulate": (js.gradients.accumulate(both, 2), [[], [TWO], [], [TWO]]),
    "joined": (JOINED, [[("device",), ONE]]),
    "one's own": (
        js.gradient_transform(counting, "replica", due=lambda state: state.count % 2 == 1),
        [[], [ONE], [], [ONE]],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DUE)
def test_when_each_reduces(name):
    tx, wanted = DUE[name]
    assert over_time(tx, len(wanted)) == wanted
