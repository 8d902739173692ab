"""The byte-level GPT: sizes, causality, and the pure functions under jax's transforms."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxslowmo.models import (
    GPT,
    GPT_PRESETS,
    GPTConfig,
    gpt_loss_fn,
    gpt_preset,
    init_gpt,
    num_parameters,
)

TINY = GPTConfig(num_layers=1, num_heads=2, embed_dim=16, context_length=8)


def batch_of(rows: int, config: GPTConfig = TINY, seed: int = 0) -> np.ndarray:
    shape = (rows, config.context_length + 1)
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)


REPLICAS = 2


@pytest.fixture(scope="module")
def gradients():
    """Parameters and a batch of every replica, and the gradients under vmap."""
    params = [init_gpt(TINY, seed) for seed in range(REPLICAS)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)
    batch = batch_of(2 * REPLICAS)
    with jax.numpy_dtype_promotion("strict"):
        mapped = jax.jit(jax.vmap(jax.grad(gpt_loss_fn(TINY))))
        return stacked, batch, mapped(stacked, batch.reshape(REPLICAS, 2, -1))


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("tiny", 11_760),
        ("demo", 470_528),
        ("1m", 1_073_536),
        ("10m", 10_942_464),
        ("124m", 121_675_008),
        ("7b", 6_454_648_832),
    ],
)
def test_presets_have_the_sizes_in_their_names(name, count):
    assert num_parameters(gpt_preset(name)) == count


def test_counted_parameters_are_those_made():
    params = init_gpt(TINY)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == num_parameters(TINY)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_parameters_and_loss_are_float32_whatever_the_compute_dtype(dtype):
    config = dataclasses.replace(TINY, dtype=dtype)
    params = init_gpt(config)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    loss_fn = gpt_loss_fn(config)
    loss, grads = jax.eval_shape(jax.value_and_grad(loss_fn), params, batch_of(2))
    assert {leaf.dtype for leaf in jax.tree.leaves((loss, grads))} == {jnp.dtype("float32")}
    assert float(jax.jit(loss_fn)(params, batch_of(2))) == pytest.approx(math.log(256), abs=0.1)


def test_initial_parameters_depend_on_the_seed_alone():
    leaves = [jax.tree.leaves(init_gpt(TINY, seed)) for seed in (0, 0, 1)]
    same = [np.array_equal(a, b) for a, b in zip(leaves[0], leaves[1], strict=True)]
    other = [np.array_equal(a, b) for a, b in zip(leaves[0], leaves[2], strict=True)]
    assert all(same)
    assert not all(other)


def test_a_byte_changes_no_prediction_before_it():
    from flax import nnx

    model = GPT(TINY, rngs=nnx.Rngs(0))
    tokens = batch_of(1)[:, :-1]
    changed = tokens.copy()
    changed[0, 5] ^= 1
    logits = jax.jit(model.__call__)  # op by op, each would compile on its own
    before, after = logits(tokens), logits(changed)
    np.testing.assert_allclose(before[0, :5], after[0, :5], rtol=1e-6)
    assert not np.allclose(before[0, 5:], after[0, 5:])


def test_gradient_descent_learns_a_batch():
    loss_fn, batch = gpt_loss_fn(TINY), batch_of(4)
    params = init_gpt(TINY)

    @jax.jit
    def descend(params):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads), loss

    losses = []
    for _ in range(40):
        params, loss = descend(params)
        losses.append(float(loss))
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_computes_each_replica_s_gradients(mesh_of, gradients, check_vma):
    stacked, batch, expected = gradients

    def on_one(params, batch):
        grads = jax.grad(gpt_loss_fn(TINY))(jax.tree.map(lambda x: x[0], params), batch)
        return jax.tree.map(lambda x: x[None], grads)

    found = jax.jit(
        jax.shard_map(
            on_one,
            mesh=mesh_of({"replica": REPLICAS}),
            in_specs=(P("replica"), P("replica")),
            out_specs=P("replica"),
            check_vma=check_vma,
        )
    )(stacked, batch)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_a_tied_model_is_one_whose_output_layer_is_the_embedding_s_table():
    tied = dataclasses.replace(TINY, tied=True)
    params, batch = init_gpt(tied), batch_of(2)
    assert "head" not in params
    assert num_parameters(TINY) - num_parameters(tied) == 256 * TINY.embed_dim
    table = params["embed"]["kernel"]
    loss, grads = jax.jit(jax.value_and_grad(gpt_loss_fn(tied)))(params, batch)
    apart = jax.jit(jax.value_and_grad(gpt_loss_fn(TINY)))
    same, both = apart({**params, "head": {"kernel": table.T}}, batch)
    assert float(loss) == pytest.approx(float(same), abs=1e-6)
    expected = both["embed"]["kernel"] + both.pop("head")["kernel"].T
    both["embed"]["kernel"] = expected
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(both), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_remat_keeps_less_and_computes_the_same():
    config = dataclasses.replace(TINY, num_layers=2)
    params, batch = init_gpt(config), batch_of(4)
    kept, found = [], []
    for remat in (False, True):
        loss_fn = gpt_loss_fn(dataclasses.replace(config, remat=remat))
        vjp = jax.eval_shape(lambda p, fn=loss_fn: jax.vjp(lambda p: fn(p, batch), p)[1], params)
        kept.append(sum(leaf.size for leaf in jax.tree.leaves(vjp)) - num_parameters(config))
        found.append(jax.jit(jax.grad(loss_fn))(params, batch))
    assert kept[1] < kept[0] / 2
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_windows_of_another_length_are_refused():
    with pytest.raises(ValueError, match=r"context_length \+ 1.*\(local_batch, 9\), got \(2, 8\)"):
        gpt_loss_fn(TINY)(init_gpt(TINY), batch_of(2)[:, :-1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "`num_layers` must be >= 1, got 0"),
        ({"num_heads": 3}, "`num_heads` must divide `embed_dim`, got 3 and 16"),
        ({"dtype": "float64"}, "`dtype` must be one of .*, got 'float64'"),
    ],
)
def test_impossible_shapes_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **change)


def test_unknown_preset_and_negative_seed_are_refused():
    with pytest.raises(
        ValueError, match="`preset` must be one of tiny, demo, 1m, 10m, 124m, 7b, got '2b'"
    ):
        gpt_preset("2b")
    with pytest.raises(ValueError, match="`seed` must be >= 0, got -1"):
        init_gpt(TINY, -1)


def test_every_preset_is_a_whole_number_of_heads():
    for config in GPT_PRESETS.values():
        assert config.embed_dim // config.num_heads in (8, 32, 64, 128)
