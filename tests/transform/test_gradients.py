"""What gradient transforms say of themselves, alone and joined."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from jaxslowmo.transform import is_identity, spec_of

PARAMS = {"w": jnp.ones((4, 2)), "b": jnp.ones(3)}
LATE = js.every(4, start=2)
mean, inside = js.all_reduce_gradients("replica"), js.all_reduce_gradients("device")
both = js.all_reduce_gradients(("replica", "device"))
clip = js.clip_by_global_norm(1.0, "tensor")
own = js.gradient_transform(optax.identity(), axes=("replica", "device"))
REDUCES = {"weight", "ready_order", "param_specs"}
SCALE = {"weight", "finite", "validation", "unscaled"}
TABLE = {
    "all_reduce_gradients": (mean, ("replica",), REDUCES, {"of_rows"}),
    "over several": (both, ("replica", "device"), REDUCES, {"of_rows"}),
    "all_reduce_rows": (js.all_reduce_rows("replica"), ("replica",), {"weight"}, set()),
    "rows and dense": (
        js.all_reduce_rows("replica", dense=both),
        ("replica", "device"),
        REDUCES,
        set(),
    ),
    "clip": (clip, (), {"validation"}, {"clips", "of_rows"}),
    "sum_tied": (
        js.pipeline.sum_tied_gradients("stage", [{0: "w", 1: "w"}]),
        ("stage",),
        set(),
        set(),
    ),
    "post_local": (js.post_local_gradients(LATE, mean), ("replica",), REDUCES, {"of_rows"}),
    "post_local over fewer": (
        js.post_local_gradients(LATE, both, inside),
        ("replica", "device"),
        REDUCES,
        {"of_rows"},
    ),
    "accumulate": (js.accumulate(mean, 2), ("replica",), REDUCES, set()),
    "accumulate updates": (
        js.accumulate(js.chain(mean, optax.sgd(0.1)), 2),
        ("replica",),
        REDUCES,
        {"returns_updates"},
    ),
    "skip_unused": (
        js.skip_unused(js.chain(mean, clip, optax.sgd(0.1)), "replica"),
        ("replica",),
        REDUCES | {"validation"},
        {"clips", "skips", "returns_updates"},
    ),
    "loss scale": (
        js.dynamic_loss_scale(optax.sgd(0.1), "replica"),
        (),
        SCALE,
        {"skips", "returns_updates"},
    ),
    "loss scale around": (
        js.dynamic_loss_scale(js.chain(mean, clip, optax.sgd(0.1))),
        ("replica",),
        REDUCES | SCALE,
        {"clips", "skips", "returns_updates"},
    ),
    "gradient_transform": (own, ("replica", "device"), {"weight"}, set()),
    "chain": (
        js.chain(mean, optax.clip(1.0), clip),
        ("replica",),
        REDUCES | {"validation"},
        {"clips", "returns_updates"},
    ),
    "chain of ours": (
        js.chain(mean, clip),
        ("replica",),
        REDUCES | {"validation"},
        {"clips", "of_rows"},
    ),
    "optax.chain": (optax.chain(mean, clip), (), set(), {"returns_updates"}),
}
FLAGS = {"clips", "skips", "returns_updates", "of_rows"}


@pytest.mark.parametrize("name", TABLE)
def test_what_each_says(name):
    tx, axes, takes, flags = TABLE[name]
    spec = spec_of(tx)
    assert (spec.axes, spec.takes) == (axes, takes)
    assert {flag for flag in FLAGS if getattr(spec, flag)} == flags


def over_time(tx, updates, axes=("replica", "device")):
    """By update, the reductions that are due, from the states of one virtual replica."""
    due, state = [], None

    def one(params):
        nonlocal state
        state = tx.init(params) if state is None else state
        for _ in range(updates):
            found = spec_of(tx).reductions_of(state)
            due.append([(each.axes, jnp.asarray(each.due)) for each in found])
            _, state = tx.update(PARAMS, state, params)
        return [[jnp.asarray(d) for _, d in each] for each in due]

    run = one
    for axis in axes:
        run = jax.vmap(run, axis_name=axis, axis_size=2, in_axes=None)
    values = jax.jit(run)(PARAMS)
    return [
        [axes for (axes, _), d in zip(each, ds, strict=True) if np.all(d)]
        for each, ds in zip(due, values, strict=True)
    ]


def test_when_each_reduces():
    both_then_inside = js.post_local_gradients(LATE, both, inside)
    wide, narrow = ("replica", "device"), ("device",)
    assert over_time(both_then_inside, 4) == [[wide], [wide], [narrow], [narrow]]
    assert over_time(js.post_local_gradients(LATE, mean), 3) == [[("replica",)]] * 2 + [[]]
    every_other = [[], [wide], [], [narrow]]
    found = over_time(
        js.accumulate(js.post_local_gradients(js.every(1, start=1), both, inside), 2), 4
    )
    assert found == every_other
    joined = js.chain(inside, js.skip_unused(js.chain(mean), "replica"))
    assert over_time(joined, 1) == [[("device",), ("replica",)]]


def test_a_due_of_ones_own():
    counting = optax.scale_by_schedule(lambda count: 1.0)
    tx = js.gradient_transform(counting, "replica", due=lambda state: state.count % 2 == 1)
    assert over_time(tx, 4) == [[], [("replica",)], [], [("replica",)]]
    assert bool(tx.spec.due(tx.init(PARAMS))) is False


def test_states_of_which_nobody_knows():
    adam = optax.adam(0.1)
    tx = js.dynamic_loss_scale(js.chain(mean, adam, js.accumulate(optax.chain(mean), 2)))
    first, second = tx.spec.unknown(tx.init(PARAMS))
    assert jax.tree.structure(first) == jax.tree.structure(adam.init(PARAMS))
    assert isinstance(second[0], js.AllReduceGradientsState)
    assert js.chain(mean, clip).spec.unknown(((), ())) == []


def test_other_words():
    with pytest.raises(
        ValueError, match=r"GradientSpec: `takes` must be words of .* got \['loss'\]"
    ):
        js.GradientSpec(takes=frozenset({"loss"}))


def test_identities():
    assert is_identity(optax.identity())
    assert is_identity(optax.chain(optax.identity()))
    assert not is_identity(optax.scale(0.5))
    assert not is_identity(mean)
