"""Post-local SGD, Join and no_sync as torch's DistributedDataParallel recorded them."""

import numpy as np
import optax
import pytest

import jaxslowmo as js
from support.golden_ddp import EXECUTIONS, Case, case_names, replay

LOCAL = [name for name in case_names("ddp_local") if name != "unused"]
JOIN = [name for name in case_names("ddp_join") if not name.startswith("unused")]
NOSYNC = case_names("ddp_nosync")


def test_all_cases_are_here():
    assert (len(LOCAL), len(JOIN), len(NOSYNC)) == (10, 6, 5)


def sgd(meta: dict) -> optax.GradientTransformation:
    decay = optax.add_decayed_weights(meta.get("weight_decay", 0.0))
    return optax.chain(decay, optax.sgd(meta["lr"], momentum=meta["momentum"]))


def post_local(meta: dict) -> optax.GradientTransformation:
    """torch counts steps from 0, its schedules are due where (step - warmup) % period == 0."""
    everyone, warmup = ("node", "device"), meta["warmup_steps"]
    if not meta["ddp"]:
        gradients = optax.identity()
    else:
        inside = js.all_reduce_gradients("device" if meta["subgroup_size"] else everyone)
        gradients = js.post_local_gradients(
            js.every(1, start=meta["start_localSGD_iter"]),
            js.all_reduce_gradients(everyone),
            inside if meta["post_local_gradient_allreduce"] else None,
        )
    if meta["averager"] == "periodic":
        when = js.every(meta["period"], start=warmup, offset=1)
        average = js.local_sgd(everyone, sync_every=when)
    else:
        groups = {2: "device", 4: everyone}
        average = js.hierarchical_local_sgd(
            {
                groups[size]: js.every(period, start=warmup, offset=1 - warmup)
                for period, size in meta["period"]
            }
        )
    return optax.chain(gradients, sgd(meta), average)


def executed(names: list[str], on_devices: set[str]) -> list[tuple[str, str]]:
    """Every case on virtual replicas, some on devices too."""
    both = [(name, execution) for name in names for execution in EXECUTIONS]
    return [(n, e) for n, e in both if e == "vmap" or n in on_devices]


@pytest.mark.parametrize(("name", "execution"), executed(LOCAL, {"0", "6"}))
def test_post_local_sgd_and_hierarchical_averaging(name, execution):
    case = Case("ddp_local", name)
    ours = replay(
        post_local(case.meta),
        case.stacked_init(),
        case.leaves("G"),
        axes={"node": 2, "device": 2},
        execution=execution,
    )
    for t, params in enumerate(ours):
        for leaf, recorded in case.leaves("param").items():
            np.testing.assert_allclose(params[leaf], recorded[:, t], rtol=5e-6, atol=5e-6)


def test_local_sgd_leaves_alone_what_nobody_used():
    case = Case("ddp_local", "unused")
    used, grads = case.arrays["used"], case.leaves("G")
    for i, g in enumerate(grads.values()):
        g[~used[:, :, i]] = 0
    everyone = ("node", "device")
    tx = optax.chain(
        js.skip_unused(sgd(case.meta), everyone),
        js.local_sgd(everyone, sync_every=js.every(case.meta["period"], offset=1)),
    )
    axes = {"node": 2, "device": 2}
    ours = replay(tx, case.stacked_init(), grads, axes=axes, execution="vmap")
    for t, params in enumerate(ours):
        for leaf, recorded in case.leaves("param").items():
            np.testing.assert_allclose(params[leaf], recorded[:, t], rtol=5e-6, atol=5e-6)


@pytest.mark.parametrize(("name", "execution"), executed(JOIN, {"3", "4"}))
def test_replicas_that_run_out_follow_the_others(name, execution):
    case = Case("ddp_join", name)
    batches = np.array(case.meta["batches"])
    divide_by = "initial" if case.meta["divide_by_initial_world_size"] else "active"
    weight = (np.arange(batches.max())[None] < batches[:, None]).astype(np.float32)
    grads = case.leaves("G")
    for g in grads.values():
        g[weight == 0] = np.nan  # whatever a replica without data computes
    ours = replay(
        optax.chain(js.all_reduce_gradients("replica", divide_by=divide_by), sgd(case.meta)),
        case.stacked_init(),
        grads,
        axes={"replica": case.world},
        execution=execution,
        extra={"weight": weight},
    )
    for leaf, recorded in case.leaves("param").items():
        for t, params in enumerate(ours):
            alive = weight[:, t] > 0
            np.testing.assert_allclose(
                params[leaf][alive], recorded[alive, t], rtol=2e-6, atol=2e-6
            )
    for leaf, final in case.leaves("final").items():
        np.testing.assert_allclose(ours[-1][leaf], final, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(("name", "execution"), executed(NOSYNC, {"4"}))
def test_gradients_of_several_calls_are_reduced_once(name, execution):
    case = Case("ddp_nosync", name)
    meta = case.meta
    grads = {k: g * np.float32(meta["loss_scale"]) for k, g in case.leaves("G").items()}
    boundary = np.stack([np.array(meta["step_after"])] * case.world)
    chain = optax.chain(js.all_reduce_gradients("replica"), sgd(meta))
    ours = replay(
        js.accumulate(chain, every=99, average=False),
        case.stacked_init(),
        grads,
        axes={"replica": case.world},
        execution=execution,
        extra={"step": boundary},
    )
    for t, params in enumerate(ours):
        for leaf, recorded in case.leaves("param").items():
            np.testing.assert_allclose(params[leaf], recorded[:, t], rtol=2e-6, atol=2e-6)
