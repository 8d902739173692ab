"""What holds for every public transform."""

import inspect
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from support.executions import EXECUTIONS, lift
from support.exhaustive import sweep
from support.transforms import PARAMETER, TRANSFORMS, stacked


def types(tree):
    return jax.tree.map(lambda x: (x.shape, jnp.dtype(x.dtype)), tree)


def test_no_public_transform_is_missing():
    made = {name.split()[0] for name in TRANSFORMS}
    factories = {
        name
        for name, value in inspect.getmembers(js, inspect.isfunction)
        if inspect.isclass(returned := typing.get_type_hints(value).get("return"))
        and issubclass(returned, optax.GradientTransformation)
    }
    # Without those of others, which are here, and with one of js.pipeline.
    assert made == factories - {"chain", "gradient_transform"} | {"sum_tied_gradients"}


# Adam of optax itself relies on implicit promotion.
# A name of several words is of a variant.
@pytest.mark.parametrize(
    "name", sweep([name for name in TRANSFORMS if "adam" not in name], lambda name: " " not in name)
)
def test_five_updates_in_a_scan(name, strict_promotion):
    """State and updates keep shapes and dtypes, or the scan refuses; our own types are explicit."""
    tx = TRANSFORMS[name]()
    params = stacked()

    def run(params, grads):
        def step(state, _):
            updates, state = tx.update(grads, state, params)
            return state, updates

        return jax.lax.scan(step, tx.init(params), length=5)

    state, updates = jax.jit(jax.vmap(run, axis_name="replica"))(params, stacked(scale=0.1))
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    for leaf in jax.tree.leaves((state, updates)):
        assert np.all(np.isfinite(np.asarray(leaf, np.float32)))
    if name in PARAMETER:
        assert np.array_equal(state.count, [5] * 4)


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_state_and_update_types(name, execution):
    tx = TRANSFORMS[name]()
    params = stacked()

    def step(params):
        state = tx.init(params)
        updates, after = tx.update(params, state, params)
        return state, after, updates

    axes = {"replica": 4}
    before, after, updates = jax.eval_shape(lift(step, axes, execution, (False,)), params)
    assert types(before) == types(after)
    wanted = types(params)
    if name in PARAMETER:
        wide = lambda s, d: (s, jnp.dtype(jnp.float32) if d.itemsize < 4 else d)  # noqa: E731
        wanted = jax.tree.map(lambda t: wide(*t), wanted, is_leaf=lambda t: isinstance(t, tuple))
    assert types(updates) == wanted
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(before))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_extra_arguments_are_accepted(name):
    tx = TRANSFORMS[name]()

    def step(params):
        chain = optax.chain(optax.sgd(0.1), tx)
        state = chain.init(params)
        return chain.update(params, state, params, value=jnp.ones([]), of_something_else="x")[0]

    out = jax.eval_shape(jax.vmap(step, axis_name="replica"), stacked())
    assert jax.tree.structure(out) == jax.tree.structure(stacked())


@pytest.mark.parametrize("name", PARAMETER)
def test_communicate_false_leaves_y_alone(name):
    tx = TRANSFORMS[name]()
    params, grads = stacked(), stacked(scale=0.1)

    def step(params, grads):
        state = tx.init(params)._replace(count=jnp.full([], 3, jnp.int32))
        given = [tx.update(grads, state, params, communicate=c)[0] for c in (False, no)]
        return given

    no = jnp.zeros([], bool)
    program = jax.jit(jax.vmap(step, axis_name="replica"))
    for updates in program(params, grads):
        for u, g in zip(jax.tree.leaves(updates), jax.tree.leaves(grads), strict=True):
            assert np.array_equal(np.asarray(u, np.float32), np.asarray(g, np.float32))


@pytest.mark.parametrize("name", PARAMETER)
def test_a_local_phase_holds_no_collective(name):
    tx = TRANSFORMS[name]()

    def step(params, phase):
        return tx.update(params, tx.init(params), params, phase=phase)[0]

    def program(phase):
        return str(
            jax.make_jaxpr(lift(lambda p: step(p, phase), {"replica": 4}, "shard_map", (False,)))(
                stacked()
            )
        )

    collectives = ("psum", "all_gather", "reduce_scatter", "ppermute", "all_to_all", "cond[")
    assert not [c for c in collectives if c in program(())]
    due = next(phase for phase in tx.phases() if phase)
    assert [c for c in collectives[:-1] if c in program(due)]


@pytest.mark.parametrize("name", TRANSFORMS)
def test_empty_trees_pass_through(name):
    tx = TRANSFORMS[name]()

    def step(x):
        updates, _ = tx.update({}, tx.init({}), {})
        return updates, x

    for execution in ("vmap", "shard_map"):
        out = jax.eval_shape(lift(step, {"replica": 4}, execution, (False,)), jnp.ones(4))
        assert out[0] == {}


@pytest.mark.parametrize("name", PARAMETER)
def test_float64_leaves_keep_their_precision(name):
    with jax.enable_x64(True):
        tx = TRANSFORMS[name]()
        params = {"d": jnp.ones((4, 3), jnp.float64), "f": jnp.ones((4, 3), jnp.float32)}

        def step(params):
            state = tx.init(params)
            updates, after = tx.update(params, state, params)
            return state, after, updates

        before, after, updates = jax.eval_shape(jax.vmap(step, axis_name="replica"), params)
        assert types(before) == types(after)
        assert types(updates) == types(params)
