"""Every adopted recorded run of local SGD and slow momentum, in every execution."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxslowmo as js
from support.executions import EXECUTIONS, run
from support.exhaustive import sweep
from support.golden_fairscale import FLOAT32, LOCAL, NAMES, GoldenRun

# The others schedule on the host; `test_executions.py` has all of both.
TRACED = ("vmap", "shard_map")
HOST = [e for e in EXECUTIONS if e not in TRACED]
# In the usual run every recording is taken under vmap, and a few in each other execution.
EVERYWHERE = (
    "hier_localsgd_slowmo_w4_n2_f3_s6_me_explicitinit",
    "localsgd_slowmo_w4_f3_s6_m0.5_me_adam_explicitinit",
    "localsgd_slowmo_w2_f3_s6_m0.2_lr0.7_me_mom_explicitinit",
)


def is_usual(name: str, execution: str) -> bool:
    return execution == "vmap" or name in EVERYWHERE


def test_all_families_are_here():
    assert len(NAMES) == 72
    for family, count in {
        "localsgd_w": 5,
        "localsgd_slowmo_": 17,
        "hier_localsgd_": 4,
        "singlenode_": 3,
        "buffers_": 2,
        "fp16_": 4,
        "sgp_w": 22,
        "sgp_slowmo_": 10,
        "sgp_pushsum_": 2,
        "hier_sgp_": 3,
    }.items():
        assert sum(name.startswith(family) for name in NAMES) == count, family


@pytest.mark.parametrize(("name", "execution"), sweep(product(LOCAL, TRACED), is_usual))
def test_trajectory_traced(name, execution):
    golden = GoldenRun.load(name)
    tx = golden.chain(golden.sync())
    history, _ = run(
        tx, golden.initial(), golden.tree("grads"), axes=golden.axes, execution=execution
    )
    golden.check(history)


@pytest.mark.parametrize(
    ("name", "execution"),
    sweep(product([n for n in LOCAL if "_w2_" in n or "hier" in n], HOST), is_usual),
)
def test_trajectory_host_scheduled(name, execution):
    golden = GoldenRun.load(name)
    sync = golden.sync()
    history, _ = run(
        golden.chain(sync),
        golden.initial(),
        golden.tree("grads"),
        axes=golden.axes,
        execution=execution,
        sync=sync,
    )
    golden.check(history)


@pytest.mark.parametrize(
    "name",
    sweep([n for n in LOCAL if "slowmo" in n and "_me" in n], lambda name: is_usual(name, "whole")),
)
def test_sharding_never_changes_numbers(name):
    golden = GoldenRun.load(name)
    history, _ = run(
        golden.chain(golden.sync(shard_state=False)),
        golden.initial(),
        golden.tree("grads"),
        axes=golden.axes,
        execution="vmap",
    )
    golden.check(history)


def test_devices_of_a_node_agree_in_the_recording_after_the_first_average():
    """What `of_replicas` leaves out: the other ranks follow their node's first rank."""
    golden = GoldenRun.load("hier_localsgd_w4_n2_f3_initperrank")
    for recorded in golden.tree("params").values():
        assert np.array_equal(recorded[2:, 0::2], recorded[2:, 1::2])


@pytest.mark.parametrize("name", ["buffers_localsgd_w4_f3", "buffers_off_localsgd_w4_f3"])
@pytest.mark.parametrize("virtual", [False, True])
def test_model_state_is_seen_as_recorded(name, virtual):
    """FairScale's buffers: broadcast from rank 0 before every forward pass, or left alone."""
    golden = GoldenRun.load(name)
    broadcast = golden.config["constructor_args"]["broadcast_buffers"]
    mesh = js.virtual_mesh(golden.axes) if virtual else js.make_mesh(golden.axes)

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
        mesh=mesh,
        model_state="broadcast" if broadcast else "local",
    )
    buffers = np.asarray(golden.config["buffers"], np.float32)
    state = step.init({k: v[0] for k, v in golden.initial().items()})
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
