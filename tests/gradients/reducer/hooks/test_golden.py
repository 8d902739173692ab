"""Communication hooks against recorded runs of torch's DistributedDataParallel with theirs."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from support.executions import lift
from support.golden_ddp import Case, replay

# The hooks of recorded cases; two have four ranks.
HOOKS = {
    "none": None,
    "allreduce": js.hooks.mean(),
    "fp16": js.hooks.fp16_compress(),
    "bf16": js.hooks.bf16_compress(),
    "fp16_allreduce_wrapper": js.hooks.fp16_compress(js.hooks.mean()),
    "noop": js.hooks.noop(),
    "fp16_w4": js.hooks.fp16_compress(),
    "bf16_w4": js.hooks.bf16_compress(),
}


def keep(grads, state, params=None):
    return grads, grads


KEEP = optax.GradientTransformation(lambda params: params, keep)


def trained(case: Case, hook: js.hooks.CommHook | None, execution: str = "shard_map") -> Any:
    """Yield the reduced gradients, the parameters and the hook's state after each step."""
    reduced = js.all_reduce_gradients("replica", hook=hook)
    tx = optax.chain(reduced, KEEP, optax.sgd(case.meta["lr"]))
    axes = {"replica": case.world}
    history = replay(tx, case.stacked_init(), case.leaves("G"), axes=axes, execution=execution)
    assert len(history) == case.meta["steps"]
    for params, state in history:
        yield state[1], params, state[0].hook


def assert_recorded(case: Case, t: int, tolerance: float, **found: Mapping[str, Any]) -> None:
    for what, values in found.items():
        for name, wanted in case.leaves(what).items():
            np.testing.assert_allclose(values[name], wanted[:, t], rtol=tolerance, atol=tolerance)


def bits(x: Any) -> np.ndarray:
    """Of float32; every NaN is one."""
    return np.where(np.isnan(x), np.float32(np.nan), x).astype(np.float32).view(np.int32)


@pytest.mark.parametrize("name", HOOKS)
def test_recorded_runs(name):
    case = Case("ddp_hook", name)
    tolerance = {"bf16_w4": 1e-2, "fp16_w4": 2e-3}.get(name, 2e-6)
    for t, (means, params, _) in enumerate(trained(case, HOOKS[name])):
        assert_recorded(case, t, tolerance, grad=means, param=params)
        if "16" in name and case.world == 2:
            for leaf, wanted in case.leaves("grad").items():
                np.testing.assert_array_equal(bits(means[leaf]), bits(wanted[:, t]))


# Of each case of PowerSGD the first matrix of each shape that is compressed, among a step's draws.
FIRST = {"0": (0, 1, 3, 4), "1": (0, 1, 3), "3": (0, 1, 3), "4": (0, 1, 3, 4), "w4": (0, 1)}


def low_rank(case: Case, monkeypatch: pytest.MonkeyPatch | None = None) -> js.hooks.CommHook:
    """Return the hook of a case, with the numbers that torch drew in place of `draw_normal`."""
    given, arrays = case.meta["powersgd"], case.arrays
    start = given["start_powerSGD_iter"]
    # torch draws for matrices of one shape together or one after the other.
    draws = [
        [matrix for j in range(9) for matrix in arrays.get(f"randn/{t}/{j}", ())]
        for t in range(start, case.meta["steps"])
    ]

    def recorded(seed, count, bucket_index, index, shape):
        first = FIRST[case.name][index]
        chosen = np.stack([np.stack(step[first : first + shape[0]]) for step in draws if step])
        assert chosen.shape[1:] == shape
        return jnp.asarray(chosen)[jnp.maximum(count - start - 1, 0)]

    if monkeypatch:
        monkeypatch.setattr("jaxslowmo.gradients.hooks._powersgd.draw_normal", recorded)
    return js.hooks.powersgd(
        given["matrix_approximation_rank"],
        start,
        error_feedback=given.get("use_error_feedback", True),
        warm_start=given.get("warm_start", True),
        min_compression_rate=given["min_compression_rate"],
    )


@pytest.mark.parametrize("name", FIRST)
def test_recorded_runs_of_powersgd(name, monkeypatch):
    case = Case("ddp_powersgd", name)
    execution = "shard_map" if name == "w4" else "vmap"
    for t, (means, params, _) in enumerate(trained(case, low_rank(case, monkeypatch), execution)):
        assert_recorded(case, t, 2e-4, grad=means, param=params)


@pytest.mark.parametrize(("name", "count"), [("0", 2), ("1", 3)])
def test_bytes_of_powersgd_are_those_that_torch_counted(name, count):
    case = Case("ddp_powersgd", name)
    _, before, after = case.meta["compression_stats"]
    steps = case.meta["steps"] - case.meta["powersgd"]["start_powerSGD_iter"]
    tx = js.all_reduce_gradients("replica", hook=low_rank(case))

    def replica(grads):
        return tx.update(grads, tx.init(grads))[0]

    program = lift(replica, {"replica": case.world}, "shard_map", (False,))
    first = {n: x[:, 0] for n, x in case.leaves("G").items()}
    found = js.comm_report_of(program.lower(first), compile=False)
    assert found.bytes(axis="replica", kind="warm_up") * steps == 4 * before
    assert found.bytes(axis="replica", kind="powersgd") * steps == 4 * after
    assert found.count(axis="replica", kind="warm_up") == 1
    assert found.count(axis="replica", kind="powersgd") == count
