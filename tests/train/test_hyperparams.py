"""Hyperparameters that are set between steps, on all replicas."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js

PARAMS = {"w": np.zeros(3, np.float32)}
BATCH = np.ones((4, 3), np.float32)
KINDS = {"virtual": js.virtual_mesh, "devices": js.make_mesh}
SGD = optax.inject_hyperparams(optax.sgd)(learning_rate=1.0)


def loss(params, batch):
    return jnp.sum(params["w"] * batch.mean(0))


def step_of(optimizer=SGD, kind="virtual", sync=None, **options):
    sync = js.local_sgd("replica", sync_every=3) if sync is None else sync
    mesh = KINDS[kind]({"replica": 2})
    return js.make_train_step(loss, optimizer, sync=sync, mesh=mesh, **options)


def with_function(state, rate):
    return js.set_hyperparams(state, learning_rate=rate)


def by_assignment(state, rate):
    state.opt_state[1].hyperparams["learning_rate"] = rate
    return state


@pytest.fixture(scope="module")
def steps():
    return {
        ("virtual", "traced"): step_of(),
        ("devices", "host"): step_of(kind="devices", mode="host"),
    }


@pytest.mark.parametrize("rate", [0.5, np.float32(0.5), jnp.float32(0.5), 2, np.float32([0.5] * 2)])
@pytest.mark.parametrize("change", [with_function, by_assignment])
@pytest.mark.parametrize("where", [("virtual", "traced"), ("devices", "host")])
def test_the_rate_of_all_replicas(steps, where, change, rate, compilations):
    """Under donation, in local steps and averages, and without another program."""
    step = steps[where]
    state, moved = step.init(PARAMS), 0.0
    for _ in range(3):  # programs of both phases, and of states that a step has returned
        state, _ = step(state, BATCH)
        moved += 1.0
    before, compiled = state.opt_state[1].hyperparams["learning_rate"], compilations.count
    for _ in range(3):
        state = change(state, rate)
        state, _ = step(state, BATCH)
        moved += float(np.max(np.asarray(rate)))
        np.testing.assert_allclose(state.params["w"], np.full((2, 3), -moved))
    after = state.opt_state[1].hyperparams["learning_rate"]
    assert (after.shape, after.dtype, after.sharding) == ((2,), before.dtype, before.sharding)
    if change is with_function or np.ndim(rate) == 0:
        assert compilations.count == compiled


def test_one_number_per_replica():
    step = step_of(sync="none")
    state = js.set_hyperparams(step.init(PARAMS), learning_rate=[1.0, 3.0])
    state, _ = step(state, BATCH)
    np.testing.assert_array_equal(state.params["w"][:, 0], [-1, -3])


def test_wherever_it_stands():
    inner = optax.inject_hyperparams(optax.sgd)(learning_rate=1.0, momentum=0.5)
    wrapped = optax.chain(
        optax.clip(9.0), optax.masked(optax.MultiSteps(inner, 1).gradient_transformation(), True)
    )
    step = step_of(wrapped)
    state = js.set_hyperparams(step.init(PARAMS), learning_rate=0.25, momentum=0.0)
    for _ in range(2):
        state, _ = step(state, BATCH)
    np.testing.assert_array_equal(state.params["w"][:, 0], [-0.5, -0.5])


def test_one_inside_of_another():
    def scaled(factor):
        return optax.chain(optax.inject_hyperparams(optax.sgd)(1.0), optax.scale(factor))

    step = step_of(optax.inject_hyperparams(scaled)(factor=2.0))
    state = js.set_hyperparams(step.init(PARAMS), learning_rate=0.25)
    state.opt_state[1].inner_state[0].hyperparams["learning_rate"] = 0.5
    state, _ = step(js.set_hyperparams(state, factor=4.0), BATCH)
    np.testing.assert_array_equal(state.params["w"][:, 0], [-2, -2])


def test_the_state_that_was_given_is_not_changed():
    state = step_of().init(PARAMS)
    changed = js.set_hyperparams(state, learning_rate=0.5)
    np.testing.assert_array_equal(state.opt_state[1].hyperparams["learning_rate"], [1, 1])
    np.testing.assert_array_equal(changed.opt_state[1].hyperparams["learning_rate"], [0.5, 0.5])
    assert changed.params["w"] is state.params["w"]


def test_slowmo_follows():
    """Slow momentum is kept in units of the rate, so both must see the same one."""
    rates = [1.0, 1.0, 0.25, 0.25, 0.25, 0.25]
    schedule, base = lambda t: jnp.asarray(rates)[t], js.local_sgd("replica", sync_every=1)
    given, told = (
        js.slowmo("replica", base=base, sync_every=2, learning_rate=rate)
        for rate in (schedule, "optimizer")
    )
    runs = [step_of(optax.sgd(schedule), sync=given), step_of(SGD, sync=told)]
    states = [step.init(PARAMS) for step in runs]
    for rate in rates:
        states[1] = js.set_hyperparams(states[1], learning_rate=rate)
        states = [step(state, BATCH)[0] for step, state in zip(runs, states, strict=True)]
        np.testing.assert_allclose(*(state.params["w"] for state in states), rtol=1e-6)


def test_in_a_loop_of_ones_own_and_inside_of_jit():
    mesh = js.virtual_mesh({"replica": 2})
    tx = optax.chain(SGD, js.local_sgd("replica"))
    state = js.init(tx, js.replicate(PARAMS, mesh=mesh), mesh=mesh)
    set_rate = jax.jit(lambda state, rate: js.set_hyperparams(state, learning_rate=rate))
    for found in (js.set_hyperparams(state, learning_rate=0.5), set_rate(state, 0.5)):
        np.testing.assert_array_equal(found[0].hyperparams["learning_rate"], [0.5, 0.5])


def per_leaf_rates(rates):
    return optax.stateless(lambda grads, _: jax.tree.map(lambda g: -rates * g, grads))


@pytest.mark.parametrize("value", [2.0, [2.0] * 3, np.full((2, 3), 2.0)])
def test_one_that_is_an_array(value):
    step = step_of(optax.inject_hyperparams(per_leaf_rates)(rates=jnp.ones(3)), "devices")
    state = js.set_hyperparams(step.init(PARAMS), rates=value)
    state, _ = step(state, BATCH)
    np.testing.assert_array_equal(state.params["w"], np.full((2, 3), -2.0))
    with pytest.raises(ValueError, match=r"\(2, 3\), one array \(3,\) for each .*shape \(2,\)"):
        js.set_hyperparams(state, rates=np.ones(2))


@jax.tree_util.register_pytree_node_class
class Nameless:
    """A state whose class names no children."""

    def __init__(self, inner):
        self.inner = inner

    def tree_flatten(self):
        return (None, self.inner), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(children[1])


def test_inside_of_a_state_that_names_no_children():
    def update(grads, state, params=None):
        updates, inner = SGD.update(grads, state.inner, params)
        return updates, Nameless(inner)

    step = step_of(optax.GradientTransformation(lambda p: Nameless(SGD.init(p)), update))
    state = step.init(PARAMS)
    state.opt_state[1].inner.hyperparams["learning_rate"] = 0.5
    state, _ = step(state, BATCH)
    state, _ = step(js.set_hyperparams(state, learning_rate=0.25), BATCH)
    np.testing.assert_array_equal(state.params["w"], np.full((2, 3), -0.75))


BOTH = {"a": SGD, "b": SGD}


@pytest.mark.parametrize(
    ("optimizer", "values", "said"),
    [
        (optax.sgd(0.1), {"learning_rate": 1.0}, r"found in none; there is none"),
        (SGD, {"lr": 1.0}, r"`lr` must be in.*found in none; they have learning_rate"),
        (optax.partition(BOTH, {"w": "a", "v": "b"}), {"learning_rate": 1.0}, r"found in 2; they"),
        (
            optax.inject_hyperparams(optax.sgd)(optax.linear_schedule(1.0, 0.0, 9)),
            {"learning_rate": 1.0},
            r"`learning_rate` was given as a schedule, which decides in every update",
        ),
        (SGD, {"learning_rate": np.ones(3)}, r"a number or an array \(2,\).* got shape \(3,\)"),
        (SGD, {"learning_rate": None}, r"`learning_rate` must be a number, got None"),
        (SGD, {"learning_rate": "0.1"}, r"`learning_rate` must be a number, got '0.1'"),
    ],
)
def test_errors(optimizer, values, said):
    state = step_of(optimizer).init({**PARAMS, "v": PARAMS["w"]})
    with pytest.raises(ValueError, match=f"set_hyperparams: .*{said}"):
        js.set_hyperparams(state, **values)
