"""Communication hooks against recorded runs of torch's DistributedDataParallel with theirs."""

import functools

import jax
import numpy as np
import optax
import pytest

import jaxslowmo as js
from support.executions import lift
from support.golden_peers import cases, parameters

CASES = cases("ddp_hook.npz")
# Which hook a recorded kind is.
HOOKS = {
    "none": None,
    "allreduce": js.hooks.mean(),
    "fp16": js.hooks.fp16_compress(),
    "bf16": js.hooks.bf16_compress(),
    "fp16_allreduce_wrapper": js.hooks.fp16_compress(js.hooks.mean()),
    "noop": js.hooks.noop(),
}
SAME_AS = {"builtin_allreduce": "allreduce", "builtin_fp16": "fp16"}


@functools.cache
def trained(case: str):
    """Gradients and parameters of each step, by hook, stacked over replicas."""
    meta, arrays = CASES[case]
    program = step_of(meta["world"], meta["lr"])
    params = {kind: parameters(arrays, "init") for kind in HOOKS}
    spread = lambda x: np.broadcast_to(x, (meta["world"], *x.shape))  # noqa: E731
    params, history = jax.tree.map(spread, params), []
    for t in range(meta["steps"]):
        grads = jax.tree.map(lambda x, t=t: x[:, t], parameters(arrays, "G"))
        means, params = program(params, grads)
        history.append(jax.tree.map(np.asarray, (means, params)))
    return history


@functools.cache
def step_of(world: int, lr: float):
    """One program for all hooks: they do not look at each other."""
    reductions = {kind: js.all_reduce_gradients("replica", hook=h) for kind, h in HOOKS.items()}
    sgd = optax.sgd(lr)

    def step(params, grads):
        means, after = {}, {}
        for kind, reduction in reductions.items():
            state = reduction.init(params[kind])
            means[kind], _ = reduction.update(grads, state, params[kind])
            updates, _ = sgd.update(means[kind], sgd.init(params[kind]))
            after[kind] = optax.apply_updates(params[kind], updates)
        return means, after

    return lift(step, {"replica": world}, "shard_map", (False, False))


def bits(x):
    """Of float32; every NaN is one."""
    return np.where(np.isnan(x), np.float32(np.nan), x).astype(np.float32).view(np.int32)


@pytest.mark.parametrize("case", CASES)
def test_recorded_runs(case):
    meta, arrays = CASES[case]
    kind, world = str(SAME_AS.get(meta["kind"], meta["kind"])), meta["world"]
    for t, (means, params) in enumerate(trained(case)):
        for name, grad in parameters(arrays, "grad").items():
            wanted, found = grad[:, t], means[kind][name]
            if "16" in kind and world == 2:
                np.testing.assert_array_equal(bits(found), bits(wanted))
            else:
                rtol = {"bf16": 1e-2, "fp16": 2e-3}.get(kind, 2e-6)
                np.testing.assert_allclose(found, wanted, rtol=rtol, atol=rtol)
            # From infinite gradients on, parameters are too.
            at = parameters(arrays, "param")[name][:, t]
            rtol = {"bf16": 1e-2, "fp16": 2e-3}.get(kind, 2e-6) if world > 2 else 2e-6
            np.testing.assert_allclose(params[kind][name], at, rtol=rtol, atol=rtol)
