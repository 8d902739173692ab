"""What each transform sends, counted in the program: collectives and bytes per kind of step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from support.reports import BATCH, FLOAT32_BYTES, HALF_BYTES, PARAMS, SLOW_BYTES, loss, report, rows


def padded(num_bytes: int, replicas: int, parts: int = 1) -> int:
    from jaxslowmo.collectives import shard_layout

    return 4 * replicas * shard_layout(num_bytes // 4, replicas, num_parts=parts).size


@pytest.fixture(params=["traced", "host"])
def mode(request) -> str:
    return request.param


@pytest.fixture
def mesh(mesh_of):
    return mesh_of({"replica": 4})


@pytest.fixture(params=["devices", "explicit", "virtual"])
def any_mesh(request, mesh_of):
    if request.param == "virtual":
        return js.virtual_mesh({"replica": 4})
    return mesh_of({"replica": 4}, explicit=request.param == "explicit")


def test_all_reduce_every_step_in_buckets(any_mesh):
    gradients = js.all_reduce_gradients("replica", bucket_bytes=16384, first_bucket_bytes=100)
    found = report(any_mesh, gradients=gradients, order="reverse")
    assert found.kinds == ("every",)
    # Last leaf first: [scale, kernel] passes 100 bytes, [half], [embedding] 16 KiB, [bias].
    assert found.bytes(axis="replica") == FLOAT32_BYTES + HALF_BYTES
    assert found.count(axis="replica", collective="all-reduce") == 4
    assert found.count(axis="replica") == 4
    # By default in the order of the backward pass: other buckets, the same bytes.
    ready = report(any_mesh, gradients=gradients)
    assert ready.bytes(axis="replica") == FLOAT32_BYTES + HALF_BYTES
    assert ready.count(axis="replica") == 3


def test_local_sgd_sends_each_dtype_buffer_once_when_due(any_mesh, mode):
    found = report(any_mesh, mode, sync=js.local_sgd("replica", sync_every=3))
    assert set(found.kinds) == {"local", "average"}
    assert found.count(axis="replica", kind="local") == 0
    assert rows(found, "average") == {("all-reduce", 2, FLOAT32_BYTES + HALF_BYTES)}


def test_sharded_slow_step_is_one_reduce_scatter_and_one_all_gather(any_mesh, mode):
    base = js.local_sgd("replica", sync_every=2)
    found = report(any_mesh, mode, sync=js.slowmo("replica", base=base, sync_every=4))
    assert set(found.kinds) == {"local", "average", "slow"}
    assert found.count(axis="replica", kind="local") == 0
    whole = padded(SLOW_BYTES, 4)
    assert SLOW_BYTES <= whole <= SLOW_BYTES * 1.01 + 4 * 8192
    assert rows(found, "slow") == {("reduce-scatter", 1, whole), ("all-gather", 1, whole)}
    assert rows(found, "average") == {("all-reduce", 2, FLOAT32_BYTES + HALF_BYTES)}


def test_unsharded_slow_step_is_one_all_reduce(mesh, mode):
    base = js.local_sgd("replica", sync_every=2)
    slowmo = js.slowmo("replica", base=base, sync_every=4, shard_state=False)
    assert rows(report(mesh, mode, sync=slowmo), "slow") == {("all-reduce", 1, SLOW_BYTES)}


def test_slow_step_on_the_base_average_adds_nothing(mesh, mode):
    base = js.local_sgd("replica", sync_every=2)
    slowmo = js.slowmo("replica", base=base, sync_every=4, exact_average=False)
    found = report(mesh, mode, sync=slowmo)
    average = {("all-reduce", 2, FLOAT32_BYTES + HALF_BYTES)}
    assert rows(found, "average") == average
    if mode == "host":
        assert set(found.kinds) == {"local", "average", "average+slow"}
        assert rows(found, "average+slow") == average
    assert found.count(axis="replica", kind="local") == 0


@pytest.mark.parametrize("shard_state", [True, False])
def test_diloco_outer_step(mesh, mode, shard_state):
    found = report(mesh, mode, sync=js.diloco("replica", sync_every=5, shard_state=shard_state))
    whole = padded(SLOW_BYTES, 4)
    expected = {("reduce-scatter", 1, whole), ("all-gather", 1, whole)}
    assert rows(found, "slow") == (expected if shard_state else {("all-reduce", 1, SLOW_BYTES)})
    assert found.count(axis="replica", kind="local") == 0


def test_two_levels_move_one_part_per_device(mesh_of, mode):
    mesh = mesh_of({"replica": 4, "device": 2})
    base = js.local_sgd("replica", sync_every=2, local_axis_name="device")
    slowmo = js.slowmo("replica", base=base, sync_every=4, local_axis_name="device")
    found = report(mesh, mode, sync=slowmo)
    assert found.count(axis="replica", kind="local") == 0
    whole = padded(SLOW_BYTES, 4, parts=2)
    assert rows(found, "slow") == {("reduce-scatter", 1, whole // 2), ("all-gather", 1, whole // 2)}
    average = found.bytes(axis="replica", kind="average")
    assert (FLOAT32_BYTES + HALF_BYTES) / 2 <= average <= (FLOAT32_BYTES + HALF_BYTES) / 2 + 8192


def test_several_buckets(mesh_of, mode):
    sync = js.local_sgd("replica", sync_every=2, bucket_bytes=8192)
    found = report(mesh_of({"replica": 4}), mode, sync=sync)
    assert rows(found, "average") == {("all-reduce", 4, FLOAT32_BYTES + HALF_BYTES)}


@pytest.mark.parametrize("accumulate", [2, 4])
def test_microbatches_add_no_collective(mesh_of, mode, accumulate):
    mesh = mesh_of({"replica": 2, "device": 2})
    sync = js.local_sgd("replica", sync_every=3)
    one, many = (report(mesh, mode, accumulate=k, sync=sync) for k in (1, accumulate))
    for kind in one.kinds:
        for axis in ("replica", "device"):
            assert rows(one, kind, axis) == rows(many, kind, axis)
    assert not any(row.in_loop for row in many.rows)


@pytest.mark.parametrize("k", [1, 3])
def test_model_state_travels_only_with_parameters(mesh_of, mode, k):
    def stateful(params, batch, *, rng, model_state):
        del rng
        return loss(params, batch), ({}, {"mean": model_state["mean"] + jnp.mean(batch)})

    mesh = mesh_of({"replica": 4})
    step = js.make_train_step(
        stateful, optax.sgd(0.1), sync=js.local_sgd("replica", sync_every=k), mesh=mesh, mode=mode
    )
    params = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), PARAMS)
    state = step.init(params, model_state={"mean": jnp.zeros(5)})
    found = js.comm_report(step, state, np.zeros(BATCH.shape, np.float32))
    if k > 1:
        assert found.count(axis="replica", kind="local") == 0
    assert rows(found, "average") == {("all-reduce", 3, FLOAT32_BYTES + HALF_BYTES + 20)}


def test_traced_and_host_scheduled_reports_agree(mesh_of):
    mesh = mesh_of({"replica": 4, "device": 2})
    sync = js.slowmo("replica", base=js.local_sgd("replica", sync_every=2), sync_every=4)
    traced, host = (report(mesh, mode, sync=sync) for mode in ("traced", "host"))
    for kind in host.kinds:
        for axis in ("replica", "device"):
            assert rows(traced, kind, axis) == rows(host, kind, axis)


def test_compiled_local_step_sends_nothing_either(mesh_of, mode):
    step = js.make_train_step(
        loss,
        optax.adam(1e-3),
        sync=js.local_sgd("replica", sync_every=3),
        mesh=mesh_of({"replica": 4}),
        mode=mode,
    )
    params = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), PARAMS)
    found = js.comm_report(step, step.init(params), np.zeros(BATCH.shape, np.float32))
    assert found.count(axis="replica", kind="local", level="compiled") == 0
    assert found.bytes(axis="replica", kind="average", level="compiled") >= FLOAT32_BYTES


def test_static_phase_in_a_plain_chain(mesh_of):
    """Without the step builder: `phase=` given to update."""
    mesh, sync = mesh_of({"replica": 4}), js.local_sgd("replica", sync_every=2)
    stacked = js.replicate({"w": np.ones(10, np.float32)}, mesh=mesh)
    state = js.init(sync, stacked, mesh=mesh)

    def step(phase):
        def per_device(params, state):
            params, state = jax.tree.map(lambda x: x[0], (params, state))
            updates, state = sync.update(params, state, params, phase=phase)
            return jax.tree.map(lambda x: x[None], (optax.apply_updates(params, updates), state))

        return jax.shard_map(per_device, mesh=mesh, in_specs=P("replica"), out_specs=P("replica"))

    assert js.comm_report(step(sync.phase(1)), stacked, state).rows == ()
    assert js.comm_report(step(sync.phase(2)), stacked, state).bytes(axis="replica") == 40
