"""A step's states lie where its first one lies; later ones are moved there."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js

SPECS = {"b": P(), "w": P("fsdp")}
SGD = optax.sgd(0.1)
LAYOUTS = [SPECS, {"b": P(), "w": P(None, "fsdp")}, {"b": P(), "w": P()}]
RNG = np.random.default_rng(0)
PARAMS = {"b": np.arange(3, dtype=np.float32), "w": RNG.normal(size=(8, 4)).astype(np.float32)}
BATCH = RNG.normal(size=(8, 8)).astype(np.float32)


def loss(params, batch):
    return ((batch @ params["w"]) ** 2).mean() + params["b"].sum()


def step_of(mesh, sync, optimizer=SGD, fn=loss):
    return js.make_train_step(fn, optimizer, sync=sync, mesh=mesh, donate=False)


def start(step, specs=SPECS, **options):
    lies = {name: NamedSharding(step.mesh, spec) for name, spec in specs.items()}
    return step.init({k: jax.device_put(x, lies[k]) for k, x in PARAMS.items()}, **options)


def slowmo(**options):
    base = js.local_sgd("replica", sync_every=1)
    return js.slowmo("replica", base=base, sync_every=2, **{"shard_state": False, **options})


def lying_as(tree, like):
    for one, other in zip(*map(jax.tree.leaves, (tree, like)), strict=True):
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
    return tree


def test_states_of_other_layouts_are_moved_to_that_of_the_first_which_is_told_once(mesh_of):
    mesh, sync = mesh_of({"replica": 4, "fsdp": 2}), slowmo(shard_state=True)
    step = step_of(mesh, sync)
    states = [start(step)]
    with pytest.warns(UserWarning, match="lies elsewhere than the first state of") as told:
        states.append(start(step, LAYOUTS[1]))
    states += [start(step, LAYOUTS[2]), jax.device_put(states[0], jax.devices()[0])]
    ends = [step(state, BATCH)[0] for state in states]  # a second warning would be an error
    assert len(told) == 1
    for end in ends[1:]:
        lying_as(end, ends[0])
        jax.tree.map(np.testing.assert_array_equal, end, ends[0])
    again, _ = step(states[0], BATCH)  # nothing was donated, or changed for the first one
    jax.tree.map(np.testing.assert_array_equal, again, ends[0])
    there, _ = step(again, BATCH)  # as from a checkpoint, without a place: silently
    moved, _ = step(jax.tree.map(np.asarray, again), BATCH)
    jax.tree.map(np.testing.assert_array_equal, lying_as(moved, there), there)


def test_state_may_be_sharded_where_no_parameter_is(mesh_of):
    """As in ZeRO-1, and it stays so."""
    mesh, sync = mesh_of({"replica": 4, "fsdp": 2}), js.local_sgd("replica")
    step, other = (step_of(mesh, sync, optax.adam(0.1)) for _ in range(2))
    state, split = step.init(PARAMS), NamedSharding(mesh, P("replica", "fsdp"))
    adam, *rest = state.opt_state
    mu = adam.mu | {"w": jax.device_put(adam.mu["w"], split)}
    changed = state._replace(opt_state=(adam._replace(mu=mu), *rest))
    for _ in range(2):
        changed, _ = other(changed, BATCH)
        state, _ = step(state, BATCH)
        assert changed.opt_state[0].mu["w"].sharding.is_equivalent_to(split, 3)
        for a, b in zip(*map(jax.tree.leaves, (changed, state)), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize(("kind", "accumulate"), [("beside fsdp", 1), ("explicit", 2)])
def test_axes_that_a_loss_could_not_leave_to_the_compiler_are_mapped(mesh_of, kind, accumulate):
    """Beside an axis that shards parameters, and of Explicit type; both with a lookup in a table.

    XLA of jax 0.12 aborts on it where two axes inside a replica are the compiler's.
    """
    axes = {"replica": 2, "fsdp": 2, "device": 2} if kind == "beside fsdp" else {"replica": 4}
    mesh = mesh_of({**axes, "device": 2}, explicit=kind == "explicit")
    draw = np.random.default_rng(0)
    params = {"table": draw.normal(size=(8, 4)), "w": draw.normal(size=(4, 8))}
    params = {name: np.float32(x) for name, x in params.items()}
    if kind == "beside fsdp":
        params = jax.device_put(params, NamedSharding(mesh, P("fsdp")))
    seen = []

    def lookup(params, batch):
        seen.append(batch["ids"].shape)
        logits = jnp.tanh(params["table"][batch["ids"]]) @ params["w"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    batch = {name: draw.integers(0, 8, 16) for name in ("ids", "y")}
    found = []
    for named in (None, js.all_reduce_gradients("device")):
        step = js.make_train_step(
            lookup,
            optax.adam(0.1),
            sync=js.local_sgd("replica", sync_every=2),
            gradients=named,
            mesh=mesh,
            accumulate=accumulate,
        )
        state = step.init(params)
        for _ in range(3):
            state, metrics = step(state, batch)
        found.append((state.params, metrics))
    cells = mesh.size // axes.get("fsdp", 1)
    assert {shape[0] for shape in seen} == {16 // (cells * accumulate)}
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
