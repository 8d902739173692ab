"""Every adopted recorded run of FairScale: averages, gossip and slow momentum."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxslowmo as js
from support.executions import gossip_state, lift, one_step, run
from support.exhaustive import sweep
from support.golden_fairscale import FLOAT32, GOSSIP, LOCAL, GoldenRun

# Of each kind one; `make test-exhaustive` takes all of them.
USUAL = {
    "hier_localsgd_w4_n2_f3_initperrank",
    "localsgd_slowmo_w2_f3_s6_m0.2_lr0.7_me_mom_explicitinit",
    "localsgd_slowmo_w4_f1_s3_m0.5_nme_lrsched_mom_explicitinit",
    "localsgd_slowmo_w4_f3_s6_groups_explicitinit",
    "localsgd_slowmo_w8_f3_s6_m0.5_me_emptyshard_explicitinit",
    "singlenode_w4_n4_localsgd_slowmo_me_explicitinit",
    "sgp_pushsum_w4_nonuniform_mixing",
    "sgp_slowmo_w4_s6_m0.5_me_avg_explicitinit",
    "sgp_slowmo_w8_s4_m0.2_me_lrsched_explicitinit",
    "sgp_w4_bipexp_pushpull",
    "sgp_w4_npeer_ppi2",
    "sgp_w8_ddexp",
}
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


@pytest.mark.parametrize("name", sweep([*LOCAL, *GOSSIP], USUAL.__contains__))
def test_trajectory(name):
    check_trajectory(name, "vmap")


def test_trajectory_on_devices():
    check_trajectory("hier_sgp_slowmo_w8_n2_s4_nme_explicitinit", "shard_map")


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


# FairScale's float16 runs with a float32 master: `js.codecs.float16(error_feedback=True)`. The
# recorded module is in float16, and the optimizer steps a flat float32 copy of it. Ours has the
# copy alone, of which the module is what float16 makes of it.

CODEC = js.codecs.float16(error_feedback=True)


def flat(tree) -> np.ndarray:
    return np.concatenate([np.asarray(tree[k]).reshape(4, -1) for k in sorted(tree)], axis=1)


def trajectory(golden: GoldenRun, sync):
    """Return stacked float32 parameters after every step."""
    tx, axes = golden.chain(sync), golden.axes
    params = {k: jnp.asarray(v, jnp.float32) for k, v in golden.initial().items()}
    state = lift(tx.init, axes, "vmap", (False,))(params)
    step = lift(one_step(tx), axes, "vmap", (False,) * 3)
    found = []
    for t in range(golden.config["steps"]):
        grads = {k: jnp.asarray(v[t], jnp.float32) for k, v in golden.tree("grads").items()}
        params, state = step(params, state, grads)
        found.append(params)
    return found


@pytest.mark.parametrize("name", ["fp16_localsgd_w4_f3", "fp16_sgp_w4"])
def test_trajectory_in_float16(name):
    golden = GoldenRun.load(name)
    history = trajectory(golden, golden.sync(CODEC))
    # The recording depends on the order of sums in half precision.
    near = {"rtol": 0, "atol": 2e-3 if "sgp" in name else 2.5e-2}
    masters = np.stack([flat(step) for step in history])
    np.testing.assert_allclose(masters, golden.arrays["fp32_flat"], **near)
    for key, recorded in golden.tree("params").items():
        ours = np.stack([np.asarray(step[key]).astype(np.float16) for step in history])
        np.testing.assert_allclose(np.float32(ours), np.float32(recorded), **near, err_msg=key)
