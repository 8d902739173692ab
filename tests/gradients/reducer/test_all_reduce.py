"""Gradients of leaves that are sharded inside a replica: every device reduces its own blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js

AXES = {"replica": 2, "fsdp": 2, "tensor": 2}
SPECS = {"bias": P(), "in": P("fsdp", "tensor"), "out": P("tensor", "fsdp"), "table": P("fsdp")}
SHAPES = {"bias": (5,), "in": (4, 6), "out": (6, 4), "table": (8,)}
ON_A_DEVICE = 4 * (5 + 2 * 24 // 4 + 8 // 2)  # bytes of a device's blocks


def gradients(mesh, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    # Whole numbers: their sums are exact in every dtype.
    values = {k: rng.integers(-8, 9, (2, *shape)) for k, shape in SHAPES.items()}
    lies = lies_on(mesh)
    return values, {k: jax.device_put(jnp.asarray(x, dtype), lies[k]) for k, x in values.items()}


def lies_on(mesh):
    return {name: NamedSharding(mesh, P("replica", *spec)) for name, spec in SPECS.items()}


def program(mesh, tx, *, specs=True, **told):
    """`(gradients, weights) -> means`: one update of the transform alone."""

    def per_replica(grads, weight):
        grads = jax.tree.map(lambda x: x[0], grads)
        weight = {} if weight is None else {"weight": weight[0]}
        means, _ = tx.update(grads, js.gradients.AllReduceGradientsState(), **told, **weight)
        return jax.tree.map(lambda x: jax.lax.pcast(x, "replica", to="varying")[None], means)

    mapped = jax.shard_map(
        per_replica,
        mesh=mesh,
        in_specs=P("replica"),
        out_specs=P("replica"),
        axis_names={"replica"},
    )
    return jax.jit(mapped, out_shardings=lies_on(mesh) if specs else None)


def sent(fn, *args, level):
    rows = js.comm_report(fn, *args).select(level=level)
    return {(row.axis, row.collective): row.bytes for row in rows}


@pytest.mark.parametrize("told", ["by the transform", "by the step", "by types"])
def test_devices_reduce_their_own_blocks(mesh_of, told):
    """The second replica has weight 0."""
    mesh = mesh_of(AXES, explicit=told == "by types")
    values, grads = gradients(mesh)
    weights = jax.device_put(jnp.array([3.0, 0.0]), NamedSharding(mesh, P("replica")))
    specs = SPECS if told == "by the transform" else None
    tx = js.all_reduce_gradients("replica", divide_by="active", param_specs=specs)
    fn = program(mesh, tx, **({"param_specs": SPECS} if told == "by the step" else {}))
    # Over Explicit axes jax 0.10 gathers all that goes into and out of a shard_map.
    for level in ("emitted",) if told == "by types" else ("emitted", "compiled"):
        assert sent(fn, grads, weights, level=level) == {("replica", "all-reduce"): ON_A_DEVICE + 8}
    for name, mean in fn(grads, weights).items():
        np.testing.assert_array_equal(np.asarray(mean)[1], values[name][0])
        lies = NamedSharding(mesh, P("replica", *SPECS[name]))
        assert mean.sharding.is_equivalent_to(lies, mean.ndim)


def test_half_precision_is_reduced_on_cpu(mesh_of):
    """XLA for CPU aborts on such a sum where it lays out the buffer itself."""
    mesh = mesh_of(AXES)
    values, grads = gradients(mesh, jnp.bfloat16)
    found = program(mesh, js.all_reduce_gradients("replica", param_specs=SPECS))(grads, None)
    for name, mean in found.items():
        np.testing.assert_array_equal(np.asarray(mean, np.float32)[0], np.mean(values[name], 0))


def with_memory():
    """A hook that adds to the mean what was there before, on each device its own."""

    def update(bucket, state):
        total = state["total"] + bucket.flat
        mean = jax.lax.pmean(total, bucket.axis_name)
        return mean, {"total": total, "calls": state["calls"] + 1}

    def init(bucket):
        return {"total": jnp.zeros(bucket.size, bucket.dtype), "calls": jnp.zeros([], jnp.int32)}

    return js.hooks.CommHook(init, update)


def test_a_hook_keeps_a_state_for_each_block(mesh_of):
    mesh = mesh_of(AXES)
    values, grads = gradients(mesh)
    tx = js.all_reduce_gradients("replica", hook=with_memory(), param_specs=SPECS)
    state = js.init(tx, grads, mesh=mesh)
    (held,) = state.hook
    assert held["total"].shape == (2, 4, ON_A_DEVICE // 4)
    assert held["total"].sharding.spec[:2] == ("replica", ("fsdp", "tensor"))
    assert held["calls"].shape == (2, 4)

    def per_replica(grads, state):
        grads, state = jax.tree.map(lambda x: x[0], (grads, state))
        means, state = tx.update(grads, state)
        return jax.tree.map(lambda x: x[None], (means, state))

    mapped = jax.shard_map(
        per_replica,
        mesh=mesh,
        in_specs=P("replica"),
        out_specs=P("replica"),
        axis_names={"replica"},
    )
    step = jax.jit(mapped)
    assert sent(step, grads, state, level="emitted") == {("replica", "all-reduce"): ON_A_DEVICE}
    for count in (1, 2):
        means, state = step(grads, state)
        for name, mean in means.items():
            np.testing.assert_array_equal(np.asarray(mean)[0], count * np.mean(values[name], 0))
    np.testing.assert_array_equal(state.hook[0]["calls"], np.full((2, 4), 2))
