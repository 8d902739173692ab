"""Logical sharding rules of the GPT: which specs they give, and that values stay as they are."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxslowmo.models import (
    GPT,
    GPT_PRESETS,
    GPTConfig,
    gpt_loss_fn,
    gpt_param_specs,
    gpt_rules,
    init_gpt,
    num_parameters,
)

TINY = GPTConfig(num_layers=1, num_heads=2, embed_dim=16, context_length=8)
BOTH = AbstractMesh((2, 2, 2), ("replica", "fsdp", "tensor"))


def test_default_rules_are_megatron_s_over_tensor_and_the_rest_over_fsdp():
    across, along = (
        {"kernel": P("fsdp", "tensor"), "bias": P("tensor")},
        {"kernel": P("tensor", "fsdp"), "bias": P()},
    )
    norm = {"scale": P(), "bias": P()}
    block = {
        "norm_attention": norm,
        "qkv": across,
        "project": along,
        "norm_mlp": norm,
        "expand": across,
        "contract": along,
    }
    expected = {
        "embed": {"kernel": P("tensor", "fsdp")},
        "positions": P(None, "fsdp"),
        "blocks": {0: block},
        "norm": norm,
        "head": {"kernel": P("fsdp", "tensor")},
    }
    assert gpt_param_specs(TINY, BOTH) == expected
    del expected["head"]
    assert gpt_param_specs(dataclasses.replace(TINY, tied=True), BOTH) == expected


def test_axes_that_a_mesh_does_not_have_split_nothing_by_default():
    specs = gpt_param_specs(TINY, AbstractMesh((2, 4), ("replica", "fsdp")))
    assert specs["blocks"][0]["qkv"] == {"kernel": P("fsdp"), "bias": P()}
    assert specs["embed"]["kernel"] == P(None, "fsdp")


def test_own_rules_and_what_is_named_by_none():
    rules = [("embed", ("fsdp", "tensor")), ("norm", "fsdp")]
    specs = gpt_param_specs(TINY, BOTH, rules)
    assert specs["head"]["kernel"] == P(("fsdp", "tensor"))
    assert specs["norm"]["scale"] == P("fsdp")
    assert specs["blocks"][0]["expand"]["bias"] == P()
    # As in flax, the first rule whose axes are free counts.
    specs = gpt_param_specs(TINY, BOTH, [("mlp", "fsdp"), ("embed", "fsdp"), ("embed", "tensor")])
    assert specs["blocks"][0]["expand"]["kernel"] == P("tensor", "fsdp")


@pytest.mark.parametrize("name", GPT_PRESETS)
def test_specs_are_a_tree_like_the_parameters_of_every_preset(name):
    config = dataclasses.replace(GPT_PRESETS[name], num_layers=2)
    specs = gpt_param_specs(config, BOTH)
    found = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P))
    model = nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0)))
    like = jax.tree.leaves(nnx.to_pure_dict(nnx.state(model)))
    assert len(found) == len(like)
    split = sum(x.size for x, spec in zip(like, found, strict=True) if len(spec) > 0)
    assert split / num_parameters(config) > 0.97


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([("embd", "fsdp")], "`rules` names 'embd', which no dimension .* are batch, embed, heads"),
        ([("embed", "fsd")], "splits 'embed' over 'fsd', and the mesh has the axes 'replica', 'f"),
        ([("embed", "fsdp", 1)], "must hold pairs of a name and axes of the mesh, got .'embed'"),
        (["embed"], "must hold pairs of a name and axes of the mesh, got 'embed'"),
        (
            [("heads", ("fsdp", "tensor"))],
            r"'heads' over \('fsdp', 'tensor'\), 4 .*`num_heads` has 2",
        ),
        ([("norm", "three")], r"splits 'norm' over 'three', 3 devices, .*bias has 16"),
    ],
)
def test_rules_that_do_not_fit_are_refused(rules, message):
    mesh = AbstractMesh((2, 2, 2, 3), ("replica", "fsdp", "tensor", "three"))
    with pytest.raises(ValueError, match=message):
        gpt_param_specs(TINY, mesh, rules)


def test_a_mesh_without_axes_inside_a_replica_is_refused():
    with pytest.raises(ValueError, match=r"axis \"fsdp\" or \"tensor\" to split a model over, got"):
        gpt_rules(AbstractMesh((2,), ("replica",)))


def test_columns_of_qkv_by_head_are_the_same_model():
    by_head = dataclasses.replace(TINY, qkv_by_head=True)
    params, batch = init_gpt(TINY), np.arange(18, dtype=np.uint8).reshape(2, 9)
    qkv = params["blocks"][0]["qkv"]

    def swapped(x):
        parts = x.reshape(*x.shape[:-1], 3, TINY.num_heads, -1)
        return np.swapaxes(parts, -3, -2).reshape(x.shape)

    other = {**params, "blocks": {0: {**params["blocks"][0], "qkv": jax.tree.map(swapped, qkv)}}}
    losses = [
        float(jax.jit(gpt_loss_fn(c))(p, batch)) for c, p in ((TINY, params), (by_head, other))
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_rules_change_where_activations_lie_and_not_their_values(mesh_of):
    mesh = mesh_of({"fsdp": 4, "tensor": 2})
    config = dataclasses.replace(TINY, qkv_by_head=True, remat=True)
    params, rng = init_gpt(config), np.random.default_rng(0)
    batch = rng.integers(0, 256, (8, 9)).astype(np.uint8)
    expected = jax.jit(jax.value_and_grad(gpt_loss_fn(config)))(params, batch)
    specs = gpt_param_specs(config, mesh)
    lies = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    with jax.set_mesh(mesh):
        loss_fn = gpt_loss_fn(config, gpt_rules(mesh))
        step = jax.jit(jax.value_and_grad(loss_fn), out_shardings=(None, lies))
        found = step(jax.device_put(params, lies), batch)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)
        with pytest.raises(ValueError, match=r"'batch' over .*4 devices, .* has 6"):
            jax.eval_shape(loss_fn, params, batch[:6])
    # Where nothing is the compiler's, and on one device, the same function is the plain one.
    assert float(jax.jit(loss_fn)(params, batch)) == pytest.approx(float(expected[0]), abs=1e-6)
