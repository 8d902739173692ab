"""The byte-level GPT against one in NumPy: loss, gradients, layers, and every way to write it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from jaxslowmo import models
from support.strict import SETTINGS, assert_equal_bits

TINY = models.GPTConfig(num_layers=2, num_heads=2, embed_dim=8, context_length=6)
WAYS = {
    "plain": TINY,
    "by head": dataclasses.replace(TINY, qkv_by_head=True, num_layers=1),
    "remat": dataclasses.replace(TINY, remat=True, tied=True),
}


def batch_of(rows: int) -> np.ndarray:
    shape = (rows, TINY.context_length + 1)
    return np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)


def norm(x, params):
    x = x - x.mean(axis=-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6)
    return x * params["scale"] + params["bias"]


def linear(x, params):
    return x @ params["kernel"] + params.get("bias", 0)


def attention(config, qkv):
    """One sequence, head by head."""
    time, heads = len(qkv), config.num_heads
    if config.qkv_by_head:
        parts = qkv.reshape(time, heads, 3, -1).transpose(2, 1, 0, 3)
    else:
        parts = qkv.reshape(time, 3, heads, -1).transpose(1, 2, 0, 3)
    mixed = []
    for query, key, value in zip(*parts, strict=True):
        weights = np.exp(query @ key.T / np.sqrt(query.shape[1]))
        weights = np.tril(weights)
        mixed.append(weights / weights.sum(axis=1, keepdims=True) @ value)
    return np.concatenate(mixed, axis=1)


def loss_in_numpy(config, params, batch):
    """Mean cross-entropy of each next byte, in double precision."""
    losses = []
    for window in batch.astype(int):
        x = params["embed"]["kernel"][window[:-1]] + params["positions"]
        for block in params["blocks"].values():
            qkv = linear(norm(x, block["norm_attention"]), block["qkv"])
            x = x + linear(attention(config, qkv), block["project"])
            h = linear(norm(x, block["norm_mlp"]), block["expand"])
            h = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
            x = x + linear(h, block["contract"])
        x = norm(x, params["norm"])
        out = x @ (params["embed"]["kernel"].T if config.tied else params["head"]["kernel"])
        own = out[np.arange(len(out)), window[1:]]
        losses.append(np.log(np.exp(out).sum(axis=1)) - own)
    return np.mean(losses)


@pytest.mark.parametrize("way", WAYS)
def test_loss_and_gradients_are_those_of_numpy(way):
    """Gradients along a random direction; the model as a list of layers gives the same ones."""
    config, batch, rng = WAYS[way], batch_of(3), np.random.default_rng(1)
    params = jax.tree.map(lambda x: x + rng.normal(size=x.shape) * 0.4, models.init_gpt(config))
    params = jax.tree.map(jnp.float32, params)
    parts = models.gpt_layers(config)
    blocks = parts.layers[1:-1]
    assert all(block is blocks[0] for block in blocks)  # so stages as long share a program
    assert parts.tied == (((0, "embed/kernel"), (len(blocks) + 1, "embed/kernel")),) * config.tied
    model = js.LayeredModel(parts.layers, parts.loss, tied=parts.tied)
    loss_fn = models.gpt_loss_fn(config)

    @jax.jit
    def both(params):
        layers = jax.value_and_grad(model)(parts.split(params), batch)
        return jax.value_and_grad(loss_fn)(params, batch), layers

    (loss, grads), (of_layers, by_layer) = both(params)
    wide = jax.tree.map(np.float64, params)
    np.testing.assert_allclose(loss, loss_in_numpy(config, wide, batch), rtol=1e-5)
    step = jax.tree.map(lambda x: rng.normal(size=x.shape), wide)
    ends = [jax.tree.map(lambda x, d, e=e: x + e * d, wide, step) for e in (-1e-5, 1e-5)]
    slope = np.diff([loss_in_numpy(config, end, batch) for end in ends])[0] / 2e-5
    found = sum(map(np.vdot, jax.tree.leaves(grads), jax.tree.leaves(step)))
    np.testing.assert_allclose(found, slope, rtol=1e-3)
    np.testing.assert_allclose(of_layers, loss, rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        parts.join(by_layer),
        grads,
    )


def test_remat_keeps_less():
    params, kept = models.init_gpt(TINY), []
    for remat in (False, True):
        loss_fn = models.gpt_loss_fn(dataclasses.replace(TINY, remat=remat))
        vjp = jax.eval_shape(
            lambda p, fn=loss_fn: jax.vjp(lambda p: fn(p, batch_of(4)), p)[1], params
        )
        kept.append(sum(leaf.size for leaf in jax.tree.leaves(vjp)) - models.num_parameters(TINY))
    assert kept[1] < 0.6 * kept[0]


SIZES = {"tiny": 11_760, "demo": 470_528, "1m": 1_073_536, "10m": 10_942_464}
SIZES |= {"40m": 40_044_800, "124m": 121_675_008, "7b": 6_454_648_832}


def test_presets_have_the_sizes_in_their_names_and_whole_heads():
    for name, count in SIZES.items():
        config = models.gpt_preset(name)
        assert models.num_parameters(config) == count
        assert config.embed_dim // config.num_heads in (8, 32, 64, 128)


@pytest.mark.usefixtures("standard_promotion")  # flax's LayerNorm in half precision
def test_parameters_and_loss_are_float32_whatever_the_compute_dtype():
    config = dataclasses.replace(TINY, dtype="bfloat16")
    params, loss_fn = models.init_gpt(config), models.gpt_loss_fn(config)
    loss, grads = jax.eval_shape(jax.value_and_grad(loss_fn), params, batch_of(2))
    assert {x.dtype for x in jax.tree.leaves((params, loss, grads))} == {jnp.dtype("float32")}
    assert "bf16[" in str(jax.make_jaxpr(loss_fn)(params, batch_of(2)))


def test_initial_parameters_are_those_of_gpt_2_and_depend_on_the_seed_alone():
    wide = dataclasses.replace(TINY, embed_dim=64, num_layers=8)
    params, again, other = (models.init_gpt(wide, seed) for seed in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, params, again)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == models.num_parameters(wide)
    kernels = {name: x["kernel"] for name, x in params["blocks"][3].items() if "kernel" in x}
    kernels |= {"embed": params["embed"]["kernel"], "positions": params["positions"]}
    for name, x in kernels.items():
        deviation = 0.02 / 4 if name in ("project", "contract") else 0.02
        assert np.std(x) == pytest.approx(deviation, rel=0.2), name
    assert not np.array_equal(params["positions"], other["positions"])
    last = params["norm"]
    assert (np.unique(last["scale"]), np.unique(last["bias"])) == (1, 0)


def test_it_trains_alike_under_jaxs_debugging_settings():
    mesh, policy = js.make_mesh({"replica": 2}), js.gradients.Policy("bfloat16")
    start = models.init_gpt(TINY, 0)

    def trained():
        loss_fn, sync = models.gpt_loss_fn(TINY), js.local_sgd("replica", sync_every=2)
        step = js.make_train_step(loss_fn, optax.adamw(0.01), sync=sync, mesh=mesh, policy=policy)
        state = step.init(start)
        for _ in range(2):
            state, metrics = step(state, batch_of(4))
        return metrics, state.params

    expected = trained()
    with SETTINGS["set_mesh"](mesh), SETTINGS["checks"](mesh):
        assert_equal_bits(trained(), expected)
