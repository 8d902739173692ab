"""Parameters that travel in 16 bits: the arithmetic, what is kept, sent and refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from support.bad_input import ALL, PARAMETER_TRANSFORMS
from support.executions import gossip_state, lift
from support.reports import (
    BATCH,
    FLOAT32_BYTES,
    HALF_BYTES,
    PARAMS,
    SLOW_BYTES,
    loss,
    report,
    rows,
)
from support.transforms import IRREGULAR, slowmo_over_local

MAKE = {"bfloat16": js.codecs.bfloat16, "float16": js.codecs.float16}
EPS = {"bfloat16": 2.0**-8, "float16": 2.0**-11}  # largest relative error of rounding
AXES = {"replica": 4}


def codecs():
    return [
        pytest.param(name, kept, id=f"{name}-{'kept' if kept else 'dropped'}")
        for name in MAKE
        for kept in (False, True)
    ]


def apart(scale: float = 1.0) -> np.ndarray:
    """Parameters of four replicas that have moved a little from a common start, (4, 9)."""
    rng = np.random.default_rng(0)
    return np.float32(scale * (rng.normal(size=9) + 0.01 * rng.normal(size=(4, 9))))


def moved(tx, params, steps=1, moves=None, execution="vmap", weight=None):
    """Parameters after updates by `moves`, and the last state."""

    def run(x, moves, *weight):
        state = tx.init(x)

        def one(carry, move):
            x, state = carry
            told = {"weight": weight[0]} if weight else {}
            updates, state = tx.update(move, state, x, **told)
            return (optax.apply_updates(x, updates), state), None

        return jax.lax.scan(one, (x, state), moves)[0]

    if moves is None:
        moves = np.zeros((4, steps, *params.shape[1:]), np.float32)
    told = () if weight is None else (np.float32(weight),)
    program = lift(run, AXES, execution, (False,) * (2 + len(told)))
    found, state = program(jnp.asarray(params), moves, *told)
    return np.asarray(found), state


def rounded(x: np.ndarray, name: str) -> np.ndarray:
    return np.float64(np.float32(x).astype(jnp.dtype(name)))


# LocalSGD


@pytest.mark.parametrize(("name", "kept"), codecs())
@pytest.mark.parametrize("execution", ["vmap", "shard_map"])
def test_the_mean_of_the_rounded_parameters_and_what_rounding_left(name, kept, execution):
    y = apart()
    tx = js.local_sgd("replica", sync_every=1, codec=MAKE[name](error_feedback=kept))
    found, _ = moved(tx, y, execution=execution)
    part = rounded(y, name)  # a division by 4 rounds nothing
    residual = y - part if kept else np.zeros_like(y)
    # Sums of four are rounded three times in 16 bits.
    near = 1.5 * EPS[name] * np.abs(y).max(0)
    assert np.all(np.abs(found - (part.mean(0) + residual)) <= near)
    # Replicas differ by their residuals, and by nothing else.
    np.testing.assert_allclose(found - found[:1], residual - residual[:1], rtol=0, atol=2e-7)


@pytest.mark.parametrize(("name", "kept"), codecs())
def test_weights(name, kept):
    y, weight = apart(), np.array([1.0, 3.0, 0.0, 2.5])
    tx = js.local_sgd("replica", sync_every=1, codec=MAKE[name](error_feedback=kept))
    found, _ = moved(tx, y, weight=weight)
    wanted = weight @ y / weight.sum()
    near = 2.5 * EPS[name] * np.abs(y).max(0)
    assert np.all(np.abs(found[2] - wanted) <= near)  # the idle one takes the mean, and no residual
    assert np.all(np.abs(weight @ found / weight.sum() - wanted) <= near)
    assert np.any(found[0] != found[2]) == kept
    assert np.array_equal(moved(tx, y, weight=np.zeros(4))[0], y)


def test_a_leaf_that_is_no_wider_travels_as_it_is():
    half = jnp.asarray(apart(), jnp.bfloat16)
    plain, _ = moved(js.local_sgd("replica", sync_every=1), half)
    for make in MAKE.values():
        codec = make(error_feedback=True)
        found, _ = moved(js.local_sgd("replica", sync_every=1, codec=codec), half)
        assert np.array_equal(found, plain)


def test_groups_of_replicas():
    y = np.random.default_rng(0).normal(size=(2, 2, 5)).astype(np.float32)
    codec = js.codecs.float16(error_feedback=True)
    tx = js.hierarchical_local_sgd({"device": 1, ("node", "device"): 2}, codec=codec)

    def run(x):
        updates, _ = tx.update(jnp.zeros_like(x), tx.init(x), x)
        return optax.apply_updates(x, updates)

    found = jax.vmap(jax.vmap(run, axis_name="device"), axis_name="node")(y)
    np.testing.assert_allclose(found.mean(1), y.mean(1), rtol=0, atol=4e-3)
    assert np.ptp(found, axis=1).max() < 4e-3


# Gossip


@pytest.mark.parametrize("overlap", [0, 1, 3])
def test_gossip_keeps_the_sums_over_the_replicas(overlap):
    """Of numerators, in flight too, where nodes give and get different weights."""
    y = apart()
    tx = js.sgp(
        "replica",
        graph=IRREGULAR,
        overlap=overlap,
        codec=js.codecs.bfloat16(error_feedback=True),
    )
    found, state = moved(tx, y, steps=20)
    gossip = gossip_state(state)
    held = [(gossip.weight, found), *((a.weight, a.mean) for a in gossip.in_flight)]
    total = sum(np.float64(w)[:, None] * np.float64(x) for w, x in held).sum(0)
    np.testing.assert_allclose(total, np.float64(y).sum(0), rtol=1e-5)
    assert np.ptp(np.float64(gossip.weight)) > 0.1


def test_gossip_without_error_feedback_loses_what_it_rounds():
    y = apart()
    tx = js.sgp("replica", graph=js.topology.ring(4), codec=js.codecs.bfloat16())
    lost = np.abs(moved(tx, y, steps=20)[0].sum(0) - y.sum(0))
    assert np.max(lost) > 1e-3


def test_replicas_that_agree_stay_as_they_are():
    y = np.broadcast_to(apart()[:1], (4, 9))
    for name, make in MAKE.items():
        tx = js.sgp("replica", graph=js.topology.ring(4), codec=make(error_feedback=True))
        np.testing.assert_allclose(moved(tx, y, steps=3)[0], y, rtol=3e-7, err_msg=name)


# Slow steps


def outer_steps(codec, count: int, name: str = "diloco"):
    """Parameters after slow steps on replicas that move by other amounts in every update."""
    moves = np.random.default_rng(1).normal(size=(4, 2 * count, 9)).astype(np.float32) * 1e-3
    start = np.broadcast_to(apart()[:1], (4, 9))
    if name == "diloco":
        sgd = optax.sgd(1.0)
        tx = js.diloco("replica", sync_every=2, outer_optimizer=sgd, shard_state=False, codec=codec)
    else:
        tx = slowmo_over_local(shard_state=False, codec=codec)
    found, state = moved(tx, start, moves=moves)
    return found, state


@pytest.mark.parametrize("name", MAKE)
def test_slow_steps_lose_in_proportion_to_what_replicas_moved(name):
    """That travels, 1e-3 here, and not where they are, 1: 40 steps lose less than one average."""
    exact = outer_steps(None, 40)[0].mean(0)
    kept = outer_steps(MAKE[name](error_feedback=True), 40)[0]
    dropped = outer_steps(MAKE[name](), 40)[0]
    for found in (kept, dropped):
        off = np.abs(found.mean(0) - exact).max()
        assert 0 < off < 0.05 * EPS[name]
    # Replicas differ by what each has not sent, else by nothing.
    assert 0 < np.ptp(kept, axis=0).max() < 0.05 * EPS[name]
    assert not np.ptp(dropped, axis=0).any()


def drift(make, name, kept, exchanges=40):
    """How far the mean of four replicas ends from the exact one."""
    start = apart()
    moves = np.random.default_rng(1).normal(size=(4, exchanges, 9)).astype(np.float32) * 1e-2
    found, _ = moved(make(MAKE[name](error_feedback=kept)), start, moves=moves)
    exact = np.float64(start).mean(0) + np.float64(moves).mean(0).sum(0)
    return np.abs(np.float64(found).mean(0) - exact).mean()


AVERAGES = {
    "local_sgd": lambda codec: js.local_sgd("replica", sync_every=1, codec=codec),
    "diloco": lambda codec: js.diloco(
        "replica", sync_every=2, outer_optimizer=optax.sgd(1.0), codec=codec
    ),
    "slowmo": lambda codec: js.slowmo(
        "replica",
        base=js.local_sgd("replica", sync_every=2),
        sync_every=2,
        momentum=0.0,
        codec=codec,
    ),
}


@pytest.mark.parametrize("algorithm", AVERAGES)
def test_error_feedback_gains_nothing_where_a_mean_is_rounded(algorithm):
    """Once it does, docstrings and docs/choosing.md have something else to say."""
    with_feedback, without = (
        drift(AVERAGES[algorithm], "bfloat16", kept) for kept in (True, False)
    )
    assert 0.3 < with_feedback / without < 3


def test_error_feedback_keeps_the_mean_of_gossip():
    def ring(codec):
        return js.sgp("replica", graph=js.topology.ring(4), codec=codec)

    assert drift(ring, "bfloat16", True) < 1e-3 * drift(ring, "bfloat16", False)
    # In float16 mixtures are rounded as FairScale rounds them.
    assert drift(ring, "float16", True) > drift(ring, "float16", False)


def test_slowmo_takes_the_exchange_of_its_own_codec():
    exact, state = outer_steps(None, 8, "slowmo")
    found, coded = outer_steps(js.codecs.float16(error_feedback=True), 8, "slowmo")
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-5)
    assert np.any(found != exact)
    assert jax.tree.structure(coded) == jax.tree.structure(state)  # nothing more to save
    assert all(np.ptp(x, axis=0).max() == 0 for x in jax.tree.leaves(coded.anchor))


def test_slow_step_over_push_sum_and_weights():
    weight = np.array([1.0, 3.0, 0.0, 2.0])
    start = np.broadcast_to(apart()[:1], (4, 9))
    moves = np.random.default_rng(1).normal(size=(4, 3, 9)).astype(np.float32) * 1e-2
    base = js.sgp("replica", graph=IRREGULAR)
    both = [
        js.slowmo("replica", base=base, sync_every=3, shard_state=False, codec=codec)
        for codec in (None, js.codecs.float16(error_feedback=True))
    ]
    for told in (None, weight):
        exact, found = (moved(tx, start, moves=moves, weight=told)[0] for tx in both)
        np.testing.assert_allclose(found, exact, rtol=0, atol=5e-5)
        assert np.any(found != exact)


# Large and infinite numbers


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("make", [js.local_sgd, js.sgp, js.diloco])
def test_numbers_beyond_float16_stay_finite(make, kept):
    options = {} if make is js.sgp else {"sync_every": 1}
    tx = make("replica", codec=js.codecs.float16(error_feedback=kept), **options)
    found, _ = moved(tx, apart(1e6), steps=2, moves=np.full((4, 2, 9), 1e5, np.float32))
    assert np.all(np.isfinite(found))
    if make is not js.diloco:  # its momentum goes on
        assert np.all(np.abs(found.mean(0) / (apart(1e6).mean(0) + 2e5) - 1) < 0.2)


def test_only_finite_keeps_a_replica_that_diverged_alone():
    y = apart()
    y[1, 3] = np.inf
    codec = js.codecs.float16(error_feedback=True)
    tx = js.only_finite(js.local_sgd("replica", sync_every=1, codec=codec))
    found, state = moved(tx, y)
    assert np.array_equal(found, y)
    assert list(state.refused) == [1] * 4


# What is sent


@pytest.mark.parametrize("virtual", [False, True])
def test_half_of_the_bytes_travel(mesh_of, virtual):
    mesh = js.virtual_mesh(AXES) if virtual else mesh_of(AXES)
    codec = js.codecs.float16(error_feedback=True)
    half = FLOAT32_BYTES // 2
    found = report(mesh, sync=js.local_sgd("replica", sync_every=2, codec=codec))
    assert rows(found, "average") == {("all-reduce", 2, half + HALF_BYTES)}
    assert rows(found, "local") == set()

    base = js.local_sgd("replica", sync_every=2)
    sync = js.slowmo("replica", base=base, sync_every=4, codec=codec)
    found = report(mesh, "host", sync=sync)
    assert rows(found, "average") == {("all-reduce", 2, FLOAT32_BYTES + HALF_BYTES)}
    assert rows(found, "slow") == {("all-reduce", 1, SLOW_BYTES // 2)}

    sync = js.sgp("replica", graph=js.topology.ring, codec=codec)
    found = report(mesh, "host", sync=sync)
    assert rows(found, "round 0") == {("collective-permute", 2, half + HALF_BYTES)}


def test_devices_of_a_replica_send_their_parts(mesh_of):
    mesh = mesh_of({"replica": 2, "device": 4})
    codec = js.codecs.bfloat16(error_feedback=True)
    parts = {
        "gradients": js.all_reduce_gradients("device"),
        "sync": js.local_sgd("replica", sync_every=2, local_axis_name="device", codec=codec),
    }
    ((_, count, size),) = rows(report(mesh, "host", **parts), "average")
    assert count == 2
    # A quarter of half of the bytes, each buffer in whole rows.
    assert (FLOAT32_BYTES // 2 + HALF_BYTES) / 4 <= size < 0.27 * FLOAT32_BYTES


@pytest.mark.parametrize("name", MAKE)
def test_what_is_lowered_travels_in_the_codecs_dtype(mesh_of, name):
    sync = js.local_sgd("replica", sync_every=2, codec=MAKE[name]())
    step = js.make_train_step(loss, optax.sgd(0.1), sync=sync, mesh=mesh_of(AXES), mode="host")
    traced = step.traced_by_phase(jax.eval_shape(step.init, PARAMS), BATCH)
    text = traced["average"].lower().as_text()
    assert {"bfloat16": "xbf16>", "float16": "xf16>"}[name] in text


def test_sharded_leaves_are_rounded_as_whole_ones(mesh_of):
    """On a mesh with an axis inside the replica: the same numbers as without."""
    mesh = mesh_of({"replica": 2, "fsdp": 4})
    codec = js.codecs.float16(error_feedback=True)
    params = {"w": apart()[0][:8].reshape(4, 2)}

    def train(mesh, specs):
        sync = js.diloco("replica", sync_every=1, codec=codec, param_specs=specs)
        step = js.make_train_step(
            lambda p, batch: jnp.mean((batch @ p["w"]) ** 2), optax.sgd(0.1), sync=sync, mesh=mesh
        )
        state = step.init(params)
        if specs is not None:
            where = jax.sharding.NamedSharding(mesh, P("replica", "fsdp"))
            state = state._replace(params={"w": jax.device_put(state.params["w"], where)})
        for t in range(3):
            batch = np.random.default_rng(t).normal(size=(8, 4)).astype(np.float32)
            state, _ = step(state, batch)
        return np.asarray(state.params["w"])

    whole = train(js.virtual_mesh({"replica": 2}), None)
    np.testing.assert_allclose(train(mesh, {"w": P("fsdp")}), whole, rtol=0, atol=1e-6)


# What is refused


@pytest.mark.parametrize("name", PARAMETER_TRANSFORMS)
@pytest.mark.parametrize("codec", ["bfloat16", jnp.bfloat16, js.codecs.bfloat16, 16])
def test_a_codec_that_is_none(name, codec):
    with pytest.raises(ValueError, match=rf"{name}: `codec` must be None or one of js\.codecs"):
        ALL[name]("replica", codec=codec)


@pytest.mark.parametrize("make", [slowmo_over_local, lambda **o: js.diloco("replica", **o)])
def test_a_codec_needs_a_whole_anchor(make):
    codec = js.codecs.bfloat16()
    with pytest.raises(ValueError, match=r"must hold all; got js\.codecs\.bfloat16.* shard_state"):
        make(codec=codec, shard_state=True)
    assert not make(codec=codec).shards(make(codec=codec).init({"w": jnp.zeros((2, 3))}))


def test_a_codec_needs_an_exchange():
    with pytest.raises(ValueError, match=r"slowmo: `exact_average=False` .* `codec`; got js"):
        slowmo_over_local(codec=js.codecs.float16(), exact_average=False)
