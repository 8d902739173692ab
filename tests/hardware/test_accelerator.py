"""Runs on an accelerator end where the same runs end on a CPU.

With one accelerator its replicas are virtual; with several each has a device of its own. On a CPU
(`make test TEST_ARGS="-m hardware"`) both sides are CPU devices.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from islands.together import run_together
from jaxslowmo.models import GPTConfig, gpt_loss_fn, init_gpt
from support.layered import assert_close, language_model, tokens

pytestmark = pytest.mark.hardware

REPLICAS, STEPS = 2, 6
SIZES = (16, 64, 64, 4)
# Its update is as exact as the gradient; Adam's divides by the size of the gradient.
OPTIMIZER = optax.sgd(0.1, momentum=0.9)


@pytest.fixture(autouse=True)
def full_precision():
    """Products in float32, where a GPU computes in TF32 otherwise."""
    with jax.default_matmul_precision("highest"):
        yield


def mesh_of_accelerators(axes: dict[str, int]) -> Any:
    """Return a mesh of accelerators, or virtual replicas on the only one."""
    is_single = len(jax.devices()) == 1
    return js.virtual_mesh(axes) if is_single else js.make_mesh(axes)


def mesh_of_cpus(axes: dict[str, int]) -> Any:
    """Return a mesh of the last CPU devices, none of which is the default device."""
    return js.make_mesh(axes, jax.devices("cpu")[-REPLICAS:])


def loss(params, batch):
    x, y = batch
    for name in sorted(params)[:-1]:
        x = jnp.tanh(x @ params[name])
    return jnp.mean(jnp.square(x @ params[sorted(params)[-1]] - y))


def parameters():
    rng = np.random.default_rng(0)
    pairs = itertools.pairwise(SIZES)
    return {f"w{i}": np.float32(rng.normal(size=pair) / 8) for i, pair in enumerate(pairs)}


def batches():
    rng = np.random.default_rng(1)
    for _ in range(STEPS):
        x = rng.normal(size=(8 * REPLICAS, SIZES[0]))
        yield np.float32(x), np.float32(np.sin(x[:, : SIZES[-1]]))


def run(mesh, optimizer=OPTIMIZER, **options):
    """Return the step, the last state and the losses of a run."""
    step = js.make_train_step(loss, optimizer, mesh=mesh, **options)
    state, losses = step.init(parameters()), []
    for batch in batches():
        state, metrics = step(state, batch)
        losses.append(js.host_mean(metrics)["loss"])
    return step, state, losses


AVERAGE = js.local_sgd("replica", sync_every=2)
ALGORITHMS = {
    "all_reduce": {"gradients": js.all_reduce_gradients("replica", bucket_bytes=4096)},
    "int8": {"gradients": js.all_reduce_gradients("replica", hook=js.hooks.int8())},
    "slowmo, host": {"sync": js.slowmo("replica", base=AVERAGE, sync_every=4), "mode": "host"},
    "sgp": {"sync": js.sgp("replica", overlap=1), "mode": "host"},
    "diloco": {"sync": js.diloco("replica", sync_every=3)},
    "diloco, fp8": {"sync": js.diloco("replica", sync_every=3, codec=js.codecs.fp8())},
    "diloco, top_k": {
        "sync": js.diloco("replica", sync_every=3, codec=js.codecs.top_k(0.2, values="bits2"))
    },
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_run_ends_where_it_ends_on_a_cpu(name):
    axes = {"replica": REPLICAS}
    ends = []
    for mesh in (mesh_of_accelerators(axes), mesh_of_cpus(axes)):
        step, state, losses = run(mesh, **ALGORITHMS[name])
        ends.append((step.consensus(state), losses))
    (params, losses), (wanted, losses_on_cpu) = ends
    # A value that lies between two codes may be rounded to either.
    is_coarse = any(word in name for word in ("int8", "fp8", "int4", "top_k", "powersgd"))
    tolerance = 1e-2 if is_coarse else 1e-4
    np.testing.assert_allclose(losses, losses_on_cpu, rtol=tolerance)
    assert losses[-1] < losses[0]
    for leaf, want in zip(jax.tree.leaves(params), jax.tree.leaves(wanted), strict=True):
        assert next(iter(leaf.devices())).platform == jax.devices()[0].platform
        np.testing.assert_allclose(leaf, want, rtol=tolerance, atol=tolerance)


def as_island(url, name, mesh, codec):
    island = js.islands.join(
        str(url), name=name, sync_every=2, quorum=2, deadline_seconds=60, codec=codec
    )
    step = js.make_train_step(loss, OPTIMIZER, mesh=mesh, sync=island.transform(AVERAGE))
    with jax.default_matmul_precision("highest"):  # in this thread
        state = island.exchange(step.init(parameters()))
        for t, batch in enumerate(batches(), 1):
            state, _ = step(state, batch)
            if island.due(t):
                state = island.exchange(state)
    return island.round, [np.asarray(x)[0] for x in jax.tree.leaves(state.params)]


@pytest.mark.parametrize("codec", [None, js.codecs.int4()], ids=["float32", "int4"])
def test_islands_on_an_accelerator_and_on_cpus_hold_the_same_bits(codec, tmp_path):
    axes = {"replica": REPLICAS}
    ends = {}
    for url, make_mesh in {"two kinds": mesh_of_accelerators, "cpus": mesh_of_cpus}.items():
        meshes = {"first": make_mesh(axes), "second": mesh_of_cpus(axes)}
        runs = [functools.partial(as_island, tmp_path / url, *x, codec) for x in meshes.items()]
        first, second = run_together(runs)
        assert first[0] == second[0] == STEPS // 2
        for x, y in zip(first[1], second[1], strict=True):
            np.testing.assert_array_equal(x, y)
        ends[url] = first[1]
    tolerance = 1e-4 if codec is None else 1e-2
    for x, y in zip(*ends.values(), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_losses_of_16_bits_are_near(dtype):
    mesh = mesh_of_accelerators({"replica": REPLICAS})
    gradients = js.all_reduce_gradients("replica")
    scaled = js.dynamic_loss_scale(OPTIMIZER, initial=1024.0) if dtype == "float16" else OPTIMIZER
    _, _, losses = run(mesh, scaled, gradients=gradients, policy=js.gradients.Policy(dtype))
    _, _, exact = run(mesh, gradients=gradients)
    np.testing.assert_allclose(losses, exact, rtol=2e-2)


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="cuDNN is NVIDIA's")
@pytest.mark.usefixtures("standard_promotion")  # flax's LayerNorm in half precision
def test_attention_of_cudnn_is_near():
    tokens = np.random.default_rng(0).integers(0, 256, (4, 65), np.uint8)
    found = []
    for attention in ("xla", "cudnn"):
        shape = GPTConfig(2, 4, 128, 64, dtype="bfloat16", attention=attention)
        loss = lambda params, shape=shape: gpt_loss_fn(shape)(params, tokens)  # noqa: E731
        found.append(jax.jit(jax.value_and_grad(loss))(init_gpt(shape)))
    (value, grads), (other, others) = found
    np.testing.assert_allclose(value, other, rtol=1e-2)
    for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(others), strict=True):
        np.testing.assert_allclose(x, y, rtol=0.1, atol=0.1 * np.abs(y).max())


@pytest.mark.parametrize("executor", ["one_program", "host"])
def test_a_pipeline_gives_the_gradients_of_the_model(executor):
    stages = min(2, len(jax.devices()))
    model, params = language_model(2)
    schedule = js.schedules.one_f_one_b(stages, 4)
    mesh = js.make_mesh({"stage": stages})
    pipe = js.pipelined(model, params, schedule, mesh=mesh, executor=executor)
    differentiate = jax.value_and_grad(pipe, has_aux=True)
    if executor == "one_program":
        differentiate = jax.jit(differentiate)
    values, grads = differentiate(pipe.layout.stack(params), tokens(8))
    with jax.default_device(jax.devices("cpu")[0]):
        expected_values, expected = jax.value_and_grad(model, has_aux=True)(params, tokens(8))
    assert_close(values, expected_values, 1e-4)
    assert_close(pipe.layout.unstack(grads), expected, 1e-4)
