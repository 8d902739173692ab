"""What gradient transforms say of themselves, alone and joined, and one made of a user's own."""

import copy
import dataclasses

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
tied = js.pipeline.sum_tied_gradients("stage", [{0: "w", 1: "w"}])
ONE, TWO = ("replica",), ("replica", "device")
REDUCES = {"weight", "ready_order", "param_specs"}
SCALE = {"weight", "finite", "unscaled"}
ROWS, CLIPS, SKIPS, HOLDS = "of_rows", "clips", "skips", "returns_updates"
TABLE = {
    "all_reduce_gradients": (both, TWO, REDUCES, {ROWS}),
    "all_reduce_rows": (js.sparse.all_reduce_rows("replica"), ONE, {"weight"}, set()),
    "rows and dense": (js.sparse.all_reduce_rows("replica", dense=both), TWO, REDUCES, set()),
    "clip": (clip, (), set(), {CLIPS, ROWS}),
    "sum_tied": (tied, ("stage",), set(), set()),
    "accumulate": (js.gradients.accumulate(mean, 2), ONE, REDUCES, set()),
    "accumulate updates": (js.gradients.accumulate(js.chain(mean, SGD), 2), ONE, REDUCES, {HOLDS}),
    "skip_unused": (
        js.gradients.skip_unused(js.chain(mean, clip, SGD), "replica"),
        ONE, REDUCES, {CLIPS, SKIPS, HOLDS},
    ),
    "loss scale": (js.dynamic_loss_scale(SGD, "replica"), (), SCALE, {SKIPS, HOLDS}),
    "loss scale around": (
        js.dynamic_loss_scale(js.chain(mean, clip, SGD)),
        ONE, REDUCES | SCALE, {CLIPS, SKIPS, HOLDS},
    ),
    "gradient_transform": (own, TWO, {"weight"}, set()),
    "chain": (
        js.chain(mean, optax.clip(1.0), clip), ONE, REDUCES, {CLIPS, HOLDS}
    ),
    "chain of ours": (js.chain(mean, clip), ONE, REDUCES, {CLIPS, ROWS}),
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


def test_states_of_which_nobody_knows():
    adam = optax.adam(0.1)
    tx = js.dynamic_loss_scale(js.chain(mean, adam, js.gradients.accumulate(optax.chain(mean), 2)))
    first, second = tx.spec.unknown(tx.init(PARAMS))
    assert jax.tree.structure(first) == jax.tree.structure(adam.init(PARAMS))
    assert isinstance(second[0], js.gradients.AllReduceGradientsState)
    assert js.chain(mean, clip).spec.unknown(((), ())) == []


def test_optax_identity_lets_rows_pass_as_none_does_and_nobody_calls_others_to_find_out():
    def refusing(*args):
        raise AssertionError("`init` and `update` are for the one who trains")

    identity, other = optax.identity(), optax.GradientTransformation(refusing, refusing)
    for tx, of_rows in ((identity, True), (optax.scale(1.0), False), (other, False)):
        assert spec_of(tx).of_rows is js.chain(both, tx).spec.of_rows is of_rows


class EverySecond(js.spec.Reduction):
    def due(self, state):
        return state.count % 2 == 1


def test_a_subclass_overrides_what_differs_and_wrappers_ask_it():
    assert js.GradientSpec is js.spec.Reduction
    spec = EverySecond(axes=ONE, takes={"weight"})
    tx = js.GradientTransform(*counting, spec)
    assert over_time(tx, 4) == [[], [ONE], [], [ONE]]
    assert over_time(js.chain(js.gradients.accumulate(tx, 2)), 8) == [[]] * 3 + [[ONE]] + [
        []
    ] * 3 + [[ONE]]
    assert js.chain(tx).spec.takes == {"weight"}
    assert dataclasses.replace(spec, axes=TWO).due(optax.ScaleByScheduleState(count=1))


def test_it_is_a_transform_of_optax_of_two_items_whose_copies_keep_the_spec():
    init, update = mean
    assert (init, update) == (mean.init, mean.update)
    assert optax.with_extra_args_support(mean) is mean
    assert copy.copy(mean).spec is copy.deepcopy(mean).spec is mean.spec
    assert mean._replace(init=lambda params: optax.EmptyState()).spec is mean.spec
    unknown = mean._replace(update=optax.trace(0.5).update)
    assert type(unknown) is optax.GradientTransformationExtraArgs
    local = js.GradientTransform(*mean, dataclasses.replace(mean.spec, axes=()))
    assert local.spec.axes == ()
