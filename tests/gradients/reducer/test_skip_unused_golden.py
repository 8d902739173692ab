"""Unused parameters as torch's DistributedDataParallel treats them; recorded runs."""

import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxslowmo as js
from support.executions import lift
from support.golden_peers import cases

TOLERANCE = 2e-6


UNUSED = cases("ddp_unused.npz")
JOIN = {k: v for k, v in cases("ddp_join.npz").items() if k.startswith("unused")}


@functools.cache
def programs(world, execution, sticky, divide_by, weight_decay, lr, momentum):
    """Of initial state and step, with SGD as torch has it around what reduces the gradients."""
    tx = js.gradients.skip_unused(
        optax.chain(
            js.all_reduce_gradients("replica", bucket_bytes=32, divide_by=divide_by),
            optax.add_decayed_weights(weight_decay),
            optax.sgd(lr, momentum=momentum),
        ),
        "replica",
        sticky=sticky,
    )

    def step(params, state, grads, extras):
        updates, state = tx.update(grads, state, params, **extras)
        return optax.apply_updates(params, updates), state

    axes = {"replica": world}
    return lift(tx.init, axes, execution, (False,)), lift(step, axes, execution, (False,) * 4)


def run(meta, execution, init, grads, *, sticky=False, divide_by="initial", **extras):
    """Parameters and used counts after each step, stacked over replicas.

    Gradients and extras have leading axes (replicas, steps).
    """
    start, step = programs(
        meta["world"],
        execution,
        sticky,
        divide_by,
        *(meta[name] for name in ("weight_decay", "lr", "momentum")),
    )
    params = [np.broadcast_to(p, (meta["world"], *p.shape)) for p in init]
    state, history = start(params), []
    for t in range(grads[0].shape[1]):
        at = lambda tree, t=t: jax.tree.map(lambda x: x[:, t], tree)  # noqa: E731
        params, state = step(params, state, at(grads), at(extras))
        history.append(jax.tree.map(np.asarray, (params, state.used_by)))
    return history


def prescribed(values):
    count = sum(name.endswith("/init") for name in values)
    return [[values[f"p{i}/{kind}"] for i in range(count)] for kind in ("init", "G", "param")]


@pytest.mark.parametrize("case", UNUSED)
def test_unused(case):
    """Uses are told under vmap, and found as gradients that are not zero under shard_map."""
    execution = "vmap" if case in ("0", "1", "2", "3") else "shard_map"
    meta, values = UNUSED[case]
    init, grads, expected = prescribed(values)
    used = values["used"].astype(bool)
    grads = [
        np.where(used[:, :, i].reshape(*used.shape[:2], *[1] * (g.ndim - 2)), g, 0)
        for i, g in enumerate(grads)
    ]
    told: dict[str, Any] = (
        {"used": [used[:, :, i] for i in range(len(init))]} if execution == "vmap" else {}
    )
    if meta["zero_grad"] == "never":  # gradients pile up, averaged ones and local ones
        piled = [np.cumsum(g.mean(axis=0), axis=0) for g in grads]
        grads = [
            g + np.concatenate([np.zeros_like(p[:1]), p[:-1]])
            for g, p in zip(grads, piled, strict=True)
        ]
        told = {}  # a stale gradient is applied again
    history = run(meta, execution, init, grads, sticky=meta["zero_grad"] == "zero", **told)
    for t, (params, used_by) in enumerate(history):
        for p, wanted in zip(params, expected, strict=True):
            np.testing.assert_allclose(p, wanted[:, t], rtol=0, atol=TOLERANCE)
        if meta["zero_grad"] == "none":
            assert np.array_equal(used_by == 0, values["grad_is_none"][:, t].astype(bool))
            assert np.array_equal(used_by[0], used[:, t].sum(axis=0))


@pytest.mark.parametrize("case", JOIN)
def test_join_with_unused_parameters(case):
    """A joined rank tells torch again what all ranks used in the last step it saw."""
    meta, values = JOIN[case]
    init, grads, expected = prescribed(values)
    batches = np.array(meta["batches"])
    steps = batches.max()
    active = np.arange(steps) < batches[:, None]
    used = values["used"].astype(bool)
    for t in range(1, steps):
        for rank in np.flatnonzero(~active[:, t]):
            used[rank, t] = used[:, t - 1].any(axis=0)
    by_initial = meta["divide_by_initial_world_size"]
    divide_by = "initial" if by_initial else "active"
    grads = [
        np.where(used[:, :, i].reshape(*used.shape[:2], *[1] * (g.ndim - 2)), np.nan_to_num(g), 0)
        for i, g in enumerate(grads)
    ]
    told: dict[str, Any] = {"used": [used[:, :, i] for i in range(len(init))]}
    weight = active.astype(np.float32)
    history = run(meta, "vmap", init, grads, divide_by=divide_by, weight=weight, **told)
    last = int(batches.argmax())
    for t, (params, _) in enumerate(history):
        for i, (p, wanted) in enumerate(zip(params, expected, strict=True)):
            # Replicas that have run out follow the others, which torch's do only at the end.
            np.testing.assert_allclose(p, np.broadcast_to(wanted[last, t], p.shape), atol=TOLERANCE)
            if t == steps - 1:
                np.testing.assert_allclose(p, values[f"p{i}/final"], rtol=0, atol=TOLERANCE)
