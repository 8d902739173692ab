"""The chains of the recipes give one result in every execution, and the limits are as stated."""

import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from recipes.doc_blocks import LOOP, MAPPED, SETTING, fresh, run

MULTI_STEPS = "Gradient accumulation and optax.MultiSteps"
MASKED = "optax.masked: leaves that stay local, leaves that are no floats"
NOT_FINITE = "Skipping steps that are not finite"


def recipe(title: str) -> dict[str, Any]:
    return run("recipes", SETTING, LOOP, MAPPED, title)


def assert_close(tree: Any, expected: Any) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), tree, expected
    )


def spread(leaf: jax.Array) -> float:
    """How far replicas are apart."""
    return float(np.max(np.ptp(np.asarray(leaf), axis=0)))


@pytest.mark.parametrize(
    ("title", "name", "by_pmap"),
    [
        ("Gradient clipping", "clip_local", False),
        (MULTI_STEPS, "tx", True),
        pytest.param(MULTI_STEPS, "tx_reduced", False, marks=pytest.mark.exhaustive),
        pytest.param("optax.partition", "tx", False, marks=pytest.mark.exhaustive),
        ("optax.partition", "tx_groups", True),
        pytest.param(MASKED, "tx", True, marks=pytest.mark.exhaustive),
        (NOT_FINITE, "tx", False),
    ],
)
def test_executions_agree(title, name, by_pmap):
    found = recipe(title)
    expected, _ = found["train_mapped"](found[name], found["vmap"])
    results = [found["train"](found[name], check_vma=c) for c in (True, False)]
    if by_pmap:
        results.append(found["train_mapped"](found[name], found["pmap"]))
    for params, _ in results:
        assert_close(params, expected)
    local = {"b"} if title == MASKED else set()
    assert {leaf for leaf, x in expected.items() if spread(x) > 1e-5} == local


def test_the_loops_agree():
    found = run("recipes", SETTING, LOOP, MAPPED)
    assert_close(found["by_pmap"], found["stacked"])
    assert_close(found["by_vmap"], found["stacked"])
    assert_close(found["train"](found["tx"], check_vma=False)[0], found["stacked"])


def test_the_training_step_equals_the_loop():
    found = recipe("The training step of the library")
    assert_close(found["state"].params, found["stacked"])
    averaged = jax.tree.map(lambda x: np.mean(x, axis=0), found["state"].params)
    assert_close(found["final"], averaged)


def test_two_levels_equal_the_training_step():
    found = recipe("Two levels in shard_map")
    step = js.make_train_step(
        found["loss_fn"], optax.sgd(0.1), sync=found["sync"], mesh=found["two_levels"]
    )
    state = step.init(found["params"])
    for batch in found["batches"]:
        state, _ = step(state, batch)
    assert_close(found["stacked"], state.params)
    assert_close(found["train_two_levels"](check_vma=False), state.params)


def test_where_clipping_goes():
    found = fresh("recipes", SETTING, LOOP, "Gradient clipping")
    batch = found["batches"][0]
    shares = jax.tree.map(lambda b: b.reshape(4, -1, *b.shape[1:]), batch)
    grads = jax.vmap(jax.grad(found["loss_fn"]), in_axes=(None, 0))(found["params"], shares)

    def clipped(grad):
        norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(grad)))
        assert norm > 1
        return jax.tree.map(lambda g: np.asarray(g) / norm, grad)

    def mean(trees):
        return jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *trees)

    each = [jax.tree.map(lambda g, i=i: g[i], grads) for i in range(4)]
    expected = {"clip_each": mean(map(clipped, each)), "clip_mean": clipped(mean(each))}
    found["batches"][1:] = []
    for name, gradient in expected.items():
        params, _ = found["train"](found[name])
        assert_close(params, jax.tree.map(lambda g: np.stack([-0.1 * g] * 4), gradient))
    gradients = optax.chain(found["clip"], found["all_reduce"])
    for name, parts in {
        "clip_each": {"gradients": gradients, "optimizer": optax.sgd(0.1)},
        "clip_mean": {
            "gradients": found["all_reduce"],
            "optimizer": optax.chain(found["clip"], optax.sgd(0.1)),
        },
    }.items():
        step = js.make_train_step(found["loss_fn"], **parts, mesh=found["mesh"])
        state, _ = step(step.init(found["params"]), batch)
        assert_close(state.params, found["train"](found[name])[0])


def test_a_learning_rate_of_zero_leaves_finite_state():
    found = recipe("Learning-rate schedules")
    assert found["schedule"](0) == found["schedule"](18) == 0
    params, state = found["train"](found["tx"])
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves((params, state)))


def test_multi_steps_around_the_chain_gives_the_same_numbers():
    found = recipe(MULTI_STEPS)
    around = optax.MultiSteps(optax.chain(optax.adam(0.1), found["slow"]()), 2)
    expected, _ = found["train"](found["tx"])
    assert_close(found["train"](around.gradient_transformation())[0], expected)
    # The same 12 updates by accumulation in the training step.
    state = found["step"].init(found["params"])
    for first, second in zip(found["batches"][::2], found["batches"][1::2], strict=True):
        joined = jax.tree.map(
            lambda *parts: np.concatenate([p.reshape(4, 16, -1) for p in parts], axis=1),
            first,
            second,
        )
        x, y = joined
        state, _ = found["step"](state, (x.reshape(-1, 3), y.reshape(-1)))
    assert_close(state.params, expected)


def test_multi_steps_runs_what_it_wraps_in_every_microstep():
    calls = []

    @optax.stateless
    def count(grads, params):
        jax.debug.callback(lambda: calls.append(1))
        return grads

    tx = optax.MultiSteps(count, 4)
    params = {"w": jnp.zeros(3)}
    state = tx.init(params)
    for _ in range(4):
        _, state = jax.jit(tx.update)(params, state, params)
    jax.effects_barrier()
    assert len(calls) == 4


def test_conditions_of_optax_around_reduced_gradients():
    found, all_reduce = recipe(NOT_FINITE), js.all_reduce_gradients("replica")
    k_steps = optax.MultiSteps(optax.chain(all_reduce, optax.sgd(0.1)), 2)
    finite = optax.chain(all_reduce, optax.apply_if_finite(optax.adam(0.1), 5))
    varying = {
        k_steps.gradient_transformation(): recipe(MULTI_STEPS)["tx_varying"],
        finite: found["tx_reduced"],
    }
    for tx, mended in varying.items():
        with pytest.raises(TypeError, match="cond branches must have equal output types"):
            found["train"](tx, check_vma=True)
        expected, _ = found["train"](tx, check_vma=False)
        for check_vma in (True, False):
            assert_close(found["train"](mended, check_vma=check_vma)[0], expected)


def test_a_replica_that_skips_its_step_still_synchronises():
    found = fresh("recipes", SETTING, LOOP, NOT_FINITE)
    x, y = found["batches"][4]
    found["batches"][4] = (x, np.where(np.arange(64) // 16 == 1, np.nan, y))
    for tx in (found["tx"], found["tx_reduced"]):
        params, _ = found["train"](tx)
        assert max(spread(leaf) for leaf in params.values()) < 1e-5
        assert all(np.all(np.isfinite(leaf)) for leaf in params.values())


def test_a_condition_on_data_around_an_exchange_hangs():
    code = """
import os
os.environ["XLA_FLAGS"] = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=1 "
    "--xla_cpu_collective_call_terminate_timeout_seconds=2"
)
from recipes.doc_blocks import LOOP, SETTING, fresh
found = fresh("recipes", SETTING, LOOP)
jax, np, optax, js = found["jax"], found["np"], found["optax"], found["js"]
x, y = found["batches"][5]
found["batches"][5] = (x, np.where(np.arange(64) // 16 == 1, np.nan, y))
chain = optax.chain(optax.sgd(0.1), js.local_sgd("replica", sync_every=6))
print("started", flush=True)
params, _ = found["train"](optax.apply_if_finite(chain, max_consecutive_errors=5))
jax.block_until_ready(params)
print("finished")
"""
    paths = [p for p in sys.path if p.endswith("tests")]
    assert paths
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths}\n{code}"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    # The runtime gives up on the replicas that wait, and ends the process.
    assert result.returncode != 0
    assert result.stdout.split() == ["started"], result.stderr
    assert "rendezvous" in result.stderr.lower()


def test_masked_leaves_stay_as_they_are():
    found = recipe(MASKED)
    order = [[2, 0, 1]] * 4
    np.testing.assert_array_equal(found["state"].model_state["order"], order)
    np.testing.assert_array_equal(found["stacked"]["order"], order)
    unchecked, _ = found["train"](
        found["tx_floats"],
        params=found["mixed"],
        grad_fn=found["grads_with_zeros"],
        check_vma=False,
    )
    assert_close(unchecked, found["stacked"])
    with pytest.raises(ValueError, match="order \\(int32\\)"):
        js.init(
            found["slow"](),
            js.replicate(found["mixed"], mesh=found["mesh"]),
            mesh=found["mesh"],
        )
    with pytest.raises(ValueError, match=r"must be a js\.ParameterTransform"):
        js.make_train_step(
            found["loss_fn"],
            optax.sgd(0.1),
            sync=optax.masked(found["slow"](), {"w": True, "b": False}),
            mesh=found["mesh"],
        )


def test_exchanges_per_group_are_refused_by_a_host_scheduled_step():
    found = recipe("optax.partition")
    options = {"mesh": found["mesh"], "donate": False}
    for mode in ("traced", "host"):
        step = js.make_train_step(found["loss_fn"], found["tx_groups"], mode=mode, **options)
        if mode == "traced":
            step(step.init(found["params"]), found["batches"][0])
        else:
            with pytest.raises(ValueError, match=r'`mode`="host" .* use mode="traced"'):
                step.init(found["params"])


def test_an_exported_step_has_no_container_that_jax_cannot_write():
    found = recipe("jax.export: the training step itself")

    def kinds(tree):
        data = tree.node_data()
        return {data and data[0]}.union(*map(kinds, tree.children()))

    exported, step, batch = (found[name] for name in ("exported", "step", "batches"))
    for tree in (exported.in_tree, exported.out_tree):
        assert kinds(tree) <= {None, tuple, list, dict}
    state, metrics = step(step.init(found["params"]), batch[0])
    assert_close(found["state"].params, state.params)
    assert_close(found["metrics"], metrics)
