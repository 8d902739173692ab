"""Post-local SGD, Join, no_sync, unused parameters: recorded DistributedDataParallel of torch."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from support.golden_ddp import Case, replay

# Of each kind one case on devices, the others on virtual replicas.
LOCAL = {"0": "vmap", "1": "vmap", "4": "vmap", "6": "shard_map", "8": "vmap"}
JOIN = {"0": "vmap", "2": "vmap", "4": "shard_map", "unused0": "vmap", "unused1": "vmap"}
NOSYNC = {"0": "vmap", "2": "vmap", "4": "shard_map"}
UNUSED = {"0": "vmap", "1": "shard_map", "2": "vmap", "3": "shard_map"}
CLOSE = {"rtol": 2e-6, "atol": 2e-6}


def sgd(meta: dict) -> optax.GradientTransformation:
    decay = optax.add_decayed_weights(meta.get("weight_decay", 0.0))
    return optax.chain(decay, optax.sgd(meta["lr"], momentum=meta["momentum"]))


EVERYONE, GROUPS = ("node", "device"), {2: "device", 4: ("node", "device")}


def averages(meta: dict, first: int) -> js.ParameterTransform:
    """Return the averages of parameters for a step whose first update is that number `first`.

    torch counts updates from 0. Averages start at the warm-up's end; a periodic one is due where
    (update - warmup) % period == 0, a hierarchical one where update % period == 0.
    """
    start = max(meta["warmup_steps"] - first, 0)

    def due(period: int, phase: int) -> js.spec.Every:
        return js.every(period, start=start, offset=1 + phase - first - start)

    if meta["averager"] == "periodic":
        return js.local_sgd(EVERYONE, sync_every=due(meta["period"], meta["warmup_steps"]))
    return js.hierarchical_local_sgd({GROUPS[size]: due(p, 0) for p, size in meta["period"]})


def two_steps(case: Case, mesh: Any) -> Iterator[dict[str, Any]]:
    """Yield the parameters after each update, trained as docs/ddp.md shows post-local SGD."""
    meta, first, inside = case.meta, 0, None
    if meta["ddp"]:
        first = meta["start_localSGD_iter"]
        if meta["post_local_gradient_allreduce"]:
            inside = js.all_reduce_gradients(GROUPS[meta["subgroup_size"]])

    def step_of(**exchange: Any) -> Any:
        return js.make_train_step(linear, sgd(meta), mesh=mesh, axis_name=EVERYONE, **exchange)

    early = step_of(gradients=js.all_reduce_gradients(EVERYONE))
    late = step_of(gradients=inside, sync=averages(meta, first))
    state = early.init(case.leaves("init"))
    for t in range(meta["steps"]):
        if t == first:
            moments = jax.tree.map(lambda x: x[0], state.opt_state)
            state = late.init(early.consensus(state), opt_state=moments)
        step = early if t < first else late
        state, _ = step(state, {name: g[:, t] for name, g in case.leaves("G").items()})
        yield state.params


def linear(params: dict[str, Any], batch: dict[str, Any]) -> Any:
    """Return a loss whose gradient is a replica's only example."""
    return sum(jnp.vdot(params[name], batch[name][0]) for name in params)


@pytest.mark.parametrize(("name", "execution"), LOCAL.items())
def test_post_local_sgd_and_hierarchical_averaging(name, execution):
    case = Case("ddp_local", name)
    mesh_of = js.virtual_mesh if execution == "vmap" else js.make_mesh
    for t, params in enumerate(two_steps(case, mesh_of({"node": 2, "device": 2}))):
        for leaf, recorded in case.leaves("param").items():
            np.testing.assert_allclose(params[leaf], recorded[:, t], rtol=5e-6, atol=5e-6)


@pytest.mark.parametrize(("name", "execution"), JOIN.items())
def test_replicas_that_run_out_follow_the_others(name, execution):
    """A joined rank tells torch again what all ranks used in the last step that it saw."""
    case, extra = Case("ddp_join", name), {}
    batches = np.array(case.meta["batches"])
    divide_by = "initial" if case.meta["divide_by_initial_world_size"] else "active"
    weight = (np.arange(batches.max())[None] < batches[:, None]).astype(np.float32)
    grads = case.leaves("G")
    tx = optax.chain(js.all_reduce_gradients("replica", divide_by=divide_by), sgd(case.meta))
    if name.startswith("unused"):
        tx = js.gradients.skip_unused(tx, "replica")
        used = without_unused(case, grads)
        for t in range(1, batches.max()):
            used[weight[:, t] == 0, t] = used[:, t - 1].any(axis=0)
        extra = {"used": {leaf: used[:, :, i] for i, leaf in enumerate(grads)}}
    for g in grads.values():
        g[weight == 0] = np.nan  # whatever a replica without data computes
    ours = replay(
        tx,
        case.stacked_init(),
        grads,
        axes={"replica": case.world},
        execution=execution,
        extra={"weight": weight, **extra},
    )
    for leaf, recorded in case.leaves("param").items():
        for t, (params, _) in enumerate(ours):
            alive = weight[:, t] > 0
            np.testing.assert_allclose(params[leaf][alive], recorded[alive, t], **CLOSE)
    for leaf, final in case.leaves("final").items():
        np.testing.assert_allclose(ours[-1][0][leaf], final, **CLOSE)


def without_unused(case: Case, grads: dict[str, np.ndarray]) -> np.ndarray:
    """Set gradients of parameters that a rank did not use to 0; return which it used."""
    used = case.arrays["used"].astype(bool)
    for i, g in enumerate(grads.values()):
        g[~used[:, :, i]] = 0
    return used


@pytest.mark.parametrize(("name", "execution"), UNUSED.items())
def test_what_no_replica_used_is_left_alone(name, execution):
    """Uses are told under vmap, and found as gradients that are not zero under shard_map."""
    case, extra = Case("ddp_unused", name), {}
    kind, grads = case.meta["zero_grad"], case.leaves("G")
    used = without_unused(case, grads)
    if kind == "never":  # gradients pile up, averaged and local ones, and are applied again
        for g in grads.values():
            g[:, 1:] += np.cumsum(g.mean(axis=0), axis=0)[:-1]
    elif execution == "vmap":
        extra = {"used": {leaf: used[:, :, i] for i, leaf in enumerate(grads)}}
    reduced = optax.chain(js.all_reduce_gradients("replica", bucket_bytes=32), sgd(case.meta))
    ours = replay(
        js.gradients.skip_unused(reduced, "replica", sticky=kind == "zero"),
        case.stacked_init(),
        grads,
        axes={"replica": case.world},
        execution=execution,
        extra=extra,
    )
    for t, (params, state) in enumerate(ours):
        for leaf, recorded in case.leaves("param").items():
            np.testing.assert_allclose(params[leaf], recorded[:, t], **CLOSE)
        if kind == "none":
            assert np.array_equal(state.used_by == 0, case.arrays["grad_is_none"][:, t] != 0)
            assert np.array_equal(state.used_by[0], used[:, t].sum(axis=0))


@pytest.mark.parametrize(("name", "execution"), NOSYNC.items())
def test_gradients_of_several_calls_are_reduced_once(name, execution):
    case = Case("ddp_nosync", name)
    chain = optax.chain(js.all_reduce_gradients("replica"), sgd(case.meta))
    ours = replay(
        js.gradients.accumulate(chain, every=99, average=False),
        case.stacked_init(),
        {k: g * np.float32(case.meta["loss_scale"]) for k, g in case.leaves("G").items()},
        axes={"replica": case.world},
        execution=execution,
        extra={"step": np.stack([np.array(case.meta["step_after"])] * case.world)},
    )
    for t, (params, _) in enumerate(ours):
        for leaf, recorded in case.leaves("param").items():
            np.testing.assert_allclose(params[leaf], recorded[:, t], **CLOSE)
