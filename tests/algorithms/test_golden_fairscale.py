"""Every adopted recorded run of FairScale: averages, gossip and slow momentum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxslowmo as js
from support.executions import gossip_state, lift, one_step, run
from support.golden_fairscale import FLOAT32, GOSSIP, HALF, LOCAL, GoldenRun

# Taken in other executions than vmap as well; `test_executions.py` has both schedules of all.
ON_DEVICES = {
    "hier_localsgd_slowmo_w4_n2_f3_s6_me_explicitinit": "shard_map_unchecked",
    "localsgd_slowmo_w4_f3_s6_m0.5_me_adam_explicitinit": "pmap",
    "sgp_pushsum_w4_irregular_table": "shard_map",
}


def check_trajectory(name, execution, *, host=False, pause="static", **overrides):
    golden = GoldenRun.load(name)
    sync = golden.sync(**overrides)
    weight = gossip_state if name in GOSSIP else (lambda state: None)
    history, _ = run(
        golden.chain(sync),
        golden.initial(),
        golden.tree("grads"),
        axes=golden.axes,
        execution=execution,
        sync=sync if host else None,
        paused=golden.paused,
        pause=pause,
        record=lambda params, state: (params, weight(state)),
    )
    golden.check([params for params, _ in history])
    if name in GOSSIP:
        weights = np.stack([state.weight for _, state in history])
        np.testing.assert_allclose(weights, golden.weights(), rtol=0, atol=1e-6)
    if "forward_params_0" in golden.arrays:
        # What FairScale de-biases before the forward pass are our parameters.
        before = [golden.initial(), *(params for params, _ in history[:-1])]
        for key, seen in golden.tree("forward_params").items():
            ours = np.stack([params[key] for params in before])
            np.testing.assert_allclose(ours, golden.of_replicas(seen), **FLOAT32, err_msg=key)


@pytest.mark.parametrize("name", [*LOCAL, *GOSSIP])
def test_trajectory(name):
    check_trajectory(name, "vmap")


@pytest.mark.parametrize("name", ON_DEVICES)
def test_trajectory_scheduled_by_the_host(name):
    check_trajectory(name, ON_DEVICES[name], host=True)


@pytest.mark.parametrize(
    ("execution", "options"), [("shard_map", {"pause": "array"}), ("pmap", {"host": True})]
)
def test_paused_updates_neither_exchange_nor_rotate(execution, options):
    """FairScale's evaluation mode is communicate=False."""
    assert GoldenRun.load("sgp_w4_eval_steps").paused == {4, 5}
    check_trajectory("sgp_w4_eval_steps", execution, **options)


@pytest.mark.parametrize(
    ("name", "make_mesh"),
    [("buffers_localsgd_w4_f3", js.make_mesh), ("buffers_off_localsgd_w4_f3", js.virtual_mesh)],
)
def test_model_state_is_seen_as_recorded(name, make_mesh):
    """FairScale's buffers: broadcast from rank 0 before every forward pass, or left alone."""
    golden = GoldenRun.load(name)
    broadcast = golden.config["constructor_args"]["broadcast_buffers"]

    def loss(params, batch, *, rng, model_state):
        del rng
        grads, (rank, t) = jax.tree.map(lambda x: x[0], batch)
        # The recording adds (rank + 1)(t + 1) before the forward pass, which broadcasts first.
        seen = {f"seen{i}": model_state["buffer"][i] for i in range(3)}
        value = sum(jnp.sum(params[k] * grads[k]) for k in grads)
        return value, (seen, {"buffer": model_state["buffer"] + (rank + 1) * (t + 2)})

    step = js.make_train_step(
        loss,
        golden.optimizer(),
        sync=golden.sync(),
        mesh=make_mesh(golden.axes),
        model_state="broadcast" if broadcast else "local",
    )
    buffers = np.asarray(golden.config["buffers"], np.float32)
    params = {k: v[0] for k, v in golden.initial().items()}
    state = step.init(params, model_state={"buffer": buffers})
    first = buffers + (np.arange(4, dtype=np.float32)[:, None] + 1)  # t = 0 on every rank
    state = state._replace(model_state={"buffer": jnp.asarray(first)})
    for t in range(golden.config["steps"]):
        grads = {k: v[t] for k, v in golden.tree("grads").items()}
        ranks = np.arange(4, dtype=np.float32), np.full(4, t, np.float32)
        state, metrics = step(state, (grads, ranks))
        seen = np.stack([np.asarray(metrics[f"seen{i}"]) for i in range(3)], axis=1)
        np.testing.assert_allclose(seen, golden.arrays["buffer_seen"][t], atol=1e-5)
    for key, recorded in golden.tree("params").items():
        np.testing.assert_allclose(state.params[key], recorded[-1], **FLOAT32)


# FairScale's float16 runs with a float32 master: `js.codecs.float16(error_feedback=True)`. The
# recorded module is in float16, and the optimizer steps a flat float32 copy of it. Ours has the
# copy alone, of which the module is what float16 makes of it.

CODEC = js.codecs.float16(error_feedback=True)
SLOW = [name for name in HALF if "slowmo" in name]


def tolerance(name: str) -> float:
    """Return the tolerance: the recording depends on the order of sums in half precision."""
    return 2e-3 if "sgp" in name else 2.5e-2


def flat(tree) -> np.ndarray:
    return np.concatenate([np.asarray(tree[k]).reshape(4, -1) for k in sorted(tree)], axis=1)


def first_anchor(golden: GoldenRun, params):
    """Return where FairScale anchors slow momentum by default: parameters after the first step.

    With memory-efficient state element j is that of the rank that keeps it.
    """
    if not golden.config["constructor_args"]["slowmo_memory_efficient"]:
        return params
    whole = flat(params)
    owner = np.arange(whole.shape[1]) // -(-whole.shape[1] // 4)
    ours, start = {}, 0
    mixed = whole[owner, np.arange(whole.shape[1])]
    for key in sorted(params):
        shape = params[key].shape[1:]
        stop = start + int(np.prod(shape))
        ours[key] = jnp.broadcast_to(mixed[start:stop].reshape(shape), (4, *shape))
        start = stop
    return ours


def trajectory(golden: GoldenRun, sync, execution: str):
    """Return stacked float32 parameters after every step."""
    tx, axes = golden.chain(sync), golden.axes
    params = {k: jnp.asarray(v, jnp.float32) for k, v in golden.initial().items()}
    state = lift(tx.init, axes, execution, (False,))(params)
    step = lift(one_step(tx), axes, execution, (False,) * 3)
    found = []
    for t in range(golden.config["steps"]):
        grads = {k: jnp.asarray(v[t], jnp.float32) for k, v in golden.tree("grads").items()}
        params, state = step(params, state, grads)
        if t == 0 and golden.config["effective"]["slowmo"]:
            inner, outer = state
            kind = "shared" if "anchor" in outer.shared else "local"
            held = getattr(outer, kind) | {"anchor": first_anchor(golden, params)}
            state = inner, outer._replace(**{kind: held})
        found.append(params)
    return found


@pytest.mark.parametrize(
    ("name", "execution"), [*((name, "vmap") for name in HALF), (SLOW[0], "shard_map")]
)
def test_trajectory_in_float16(name, execution):
    golden = GoldenRun.load(name)
    # Slow steps exchange float32, as FairScale's do; whole, so that the test can set their anchor.
    whole = {"shard_state": False} if name in SLOW else {}
    history = trajectory(golden, golden.sync(CODEC, **whole), execution)
    near = {"rtol": 0, "atol": tolerance(name)}
    masters = np.stack([flat(step) for step in history])
    np.testing.assert_allclose(masters, golden.arrays["fp32_flat"], **near)
    for key, recorded in golden.tree("params").items():
        ours = np.stack([np.asarray(step[key]).astype(np.float16) for step in history])
        np.testing.assert_allclose(np.float32(ours), np.float32(recorded), **near, err_msg=key)
