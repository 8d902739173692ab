"""Every adopted recorded run of gossip, alone and under slow momentum, in every execution."""

from itertools import product

import numpy as np
import pytest

from support.executions import EXECUTIONS, gossip_state, run
from support.exhaustive import sweep
from support.golden_fairscale import FLOAT32, GOSSIP, GoldenRun

PUSH_SUM = [name for name in GOSSIP if "pushsum" in name]
SEEN = [name for name in GOSSIP if "forward_params_0" in GoldenRun.load(name).arrays]
HOST = [
    "hier_sgp_slowmo_w8_n2_s4_nme_explicitinit",
    "sgp_pushsum_w4_irregular_table",
    "sgp_slowmo_w4_s6_m0.5_me_explicitinit",
    "sgp_w5_default",
    "sgp_w8_npeer_ppi2",
]


def test_the_special_recordings_are_here():
    assert len(PUSH_SUM) == 2
    assert set(PUSH_SUM) < set(SEEN)
    assert len(SEEN) == 5


def weights_and_params(params, state):
    return gossip_state(state).weight, params


def check(golden: GoldenRun, history) -> None:
    weights = np.stack([weight for weight, _ in history])
    np.testing.assert_allclose(weights, golden.weights(), rtol=0, atol=1e-6)
    golden.check([params for _, params in history])
    if "forward_params_0" in golden.arrays:
        # What FairScale de-biases before the forward pass are our parameters.
        before = [golden.initial(), *(params for _, params in history[:-1])]
        for key, seen in golden.tree("forward_params").items():
            ours = np.stack([params[key] for params in before])
            np.testing.assert_allclose(ours, golden.of_replicas(seen), **FLOAT32, err_msg=key)


def trajectory(golden: GoldenRun, execution: str, *, host: bool = False, **options):
    sync = golden.sync()
    history, _ = run(
        golden.chain(sync),
        golden.initial(),
        golden.tree("grads"),
        axes=golden.axes,
        execution=execution,
        sync=sync if host else None,
        paused=golden.paused,
        record=weights_and_params,
        **options,
    )
    return history


# In the usual run every recording is taken under vmap, and a few in each other execution.
@pytest.mark.parametrize(
    ("name", "execution"),
    sweep(product(GOSSIP, ["vmap", "shard_map"]), lambda n, e: e == "vmap" or n in HOST),
)
def test_trajectory_traced(name, execution):
    golden = GoldenRun.load(name)
    check(golden, trajectory(golden, execution))


@pytest.mark.parametrize(
    ("name", "execution"),
    sweep(product(HOST, EXECUTIONS), lambda n, e: n == HOST[0] or (n, e) == (HOST[1], "pmap")),
)
def test_trajectory_host_scheduled(name, execution):
    golden = GoldenRun.load(name)
    check(golden, trajectory(golden, execution, host=True))


PAUSES = {"array": "vmap", "static": "shard_map", "host": "pmap"}


@pytest.mark.parametrize(
    ("execution", "pause"), sweep(product(EXECUTIONS, PAUSES), lambda e, p: PAUSES[p] == e)
)
def test_paused_updates_neither_exchange_nor_rotate(execution, pause):
    """FairScale's evaluation mode is communicate=False."""
    golden = GoldenRun.load("sgp_w4_eval_steps")
    assert golden.paused == {4, 5}
    options = {"host": True} if pause == "host" else {"pause": pause}
    check(golden, trajectory(golden, execution, **options))


@pytest.mark.parametrize("name", PUSH_SUM)
def test_weights_move_in_these_recordings(name):
    weights = GoldenRun.load(name).weights()
    assert np.ptp(weights, axis=1).max() > 0.3
    np.testing.assert_allclose(weights.sum(1), 4, atol=1e-5)


def test_devices_of_a_node_agree_in_the_recording():
    """What `of_replicas` leaves out: the other ranks follow their node's first rank."""
    for name in [name for name in GOSSIP if name.startswith("hier")]:
        for recorded in GoldenRun.load(name).tree("params").values():
            assert np.array_equal(recorded[:, 0::2], recorded[:, 1::2]), name
