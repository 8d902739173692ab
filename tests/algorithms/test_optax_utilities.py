"""optax's own tools for states get, set and map what they are meant to, and nothing of ours."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from support.exhaustive import sweep
from support.transforms import TRANSFORMS, stacked

REPLICAS = 4
# Parameters of optax's factories that are no hyperparameters: what they wrap.
WRAPPED = {"inner", "init", "update", "base_optimizer", "optimizer"}


def hyperparameters_of_optax() -> set[str]:
    factories = [
        value
        for module in (optax, optax.contrib)
        for name, value in inspect.getmembers(module, callable)
        if inspect.isfunction(value) and not name.startswith("_")
    ]
    names = {
        name
        for factory in factories
        for signature in [inspect.signature(factory)]
        if "GradientTransformation" in str(signature.return_annotation)
        for name in signature.parameters
    }
    return names - WRAPPED


def stacked_state(tx):
    return jax.vmap(tx.init, axis_name="replica")(stacked(REPLICAS))


def named_tuples(tree) -> list:
    """All states in a state, those inside of others too."""
    found = []

    def visit(x):
        if hasattr(x, "_fields"):
            found.append(x)
            for field in x:
                jax.tree.leaves(field, is_leaf=visit)
        return False

    jax.tree.leaves(tree, is_leaf=visit)
    return found


def test_no_field_has_the_name_of_a_hyperparameter_of_optax():
    reserved = hyperparameters_of_optax()
    assert {"learning_rate", "momentum", "b1", "weight_decay", "decay", "scale"} <= reserved
    shared = {
        (type(state).__name__, field)
        for make in TRANSFORMS.values()
        for state in named_tuples(stacked_state(make()))
        if type(state).__module__.startswith("jaxslowmo")
        for field in state._fields
        if field in reserved
    }
    assert shared == set()


@pytest.mark.parametrize("name", sweep(TRANSFORMS, lambda name: " " not in name))
def test_the_rate_that_optax_sets_is_that_of_the_optimizer(name):
    chain = optax.chain(
        optax.inject_hyperparams(optax.sgd)(learning_rate=0.1, momentum=0.9), TRANSFORMS[name]()
    )
    state = stacked_state(chain)
    rates = jnp.full(REPLICAS, 0.5, jnp.float32)
    after = optax.tree.set(state, learning_rate=rates)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    np.testing.assert_array_equal(optax.tree.get(after, "learning_rate"), rates)
    changed = [
        jax.tree_util.keystr(path)
        for (path, new), old in zip(
            jax.tree.leaves_with_path(after), jax.tree.leaves(state), strict=True
        )
        if not np.array_equal(new, old)
    ]
    assert changed == ["[0].hyperparams['learning_rate']"]


# Of states in flat buffers optax cannot tell which parts are parameters.
TREES = [
    name
    for name in TRANSFORMS
    if "int8" not in name
    and "fp8" not in name
    and "top_k" not in name
    and (
        not name.startswith(("slowmo", "diloco", "only_finite around"))
        or name in ("slowmo whole", "slowmo inexact", "slowmo over sgp inexact", "diloco adam")
    )
]


@pytest.mark.parametrize("name", TREES)
def test_what_a_state_holds_in_the_form_of_the_parameters_can_be_mapped(name):
    tx = TRANSFORMS[name]()
    params = stacked(REPLICAS)
    state = stacked_state(tx)
    marked = optax.tree.map_params(
        tx, lambda _, name: name, state, params_names(params), transform_non_params=lambda _: None
    )
    leaves = jax.tree.leaves_with_path(marked)
    # Counters have the shape of a scalar parameter.
    shapes = {x.shape for x in jax.tree.leaves(params) if x.ndim > 1}
    assert bool(leaves) == any(x.shape in shapes for x in jax.tree.leaves(state))
    for path, leaf in leaves:
        assert jax.tree_util.keystr(path).endswith(leaf)


def params_names(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: jax.tree_util.keystr(path), params)


@pytest.mark.parametrize("rate", [0.05, np.full(2, 0.05, np.float32)], ids=["scalar", "stacked"])
def test_a_step_goes_on_with_the_rate_that_optax_sets(rate):
    """SlowMo's own record of the last rate stays: only the optimizer's rate is another one."""

    def trained(set_rate):
        step = js.make_train_step(
            lambda params, batch: 0.5 * jnp.mean((params["w"] - batch) ** 2),
            optax.inject_hyperparams(optax.sgd)(learning_rate=0.5),
            sync=js.slowmo(
                "replica", base=js.local_sgd("replica", sync_every=1), sync_every=2,
                learning_rate=optax.piecewise_constant_schedule(0.5, {4: 0.1}),
            ),
            mesh=js.virtual_mesh({"replica": 2}),
        )  # fmt: skip
        state = step.init({"w": np.ones(3, np.float32)})
        for t in range(8):
            if t == 4:
                state = set_rate(state)
            state, _ = step(state, np.full((2, 3), 4.0, np.float32))
        return state.params["w"]

    def by_optax(state):
        return state._replace(opt_state=optax.tree.set(state.opt_state, learning_rate=rate))

    def by_hand(state):
        state.opt_state[1].hyperparams["learning_rate"] = 0.05
        return state

    np.testing.assert_array_equal(trained(by_optax), trained(by_hand))
