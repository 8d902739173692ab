"""Logical sharding rules of the GPT: which specs they give, and that values stay as they are."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxslowmo import models

TINY = models.GPTConfig(num_layers=1, num_heads=2, embed_dim=16, context_length=8)
BOTH = AbstractMesh((2, 2, 2), ("replica", "fsdp", "tensor"))


def test_default_rules_are_megatron_s_over_tensor_and_the_rest_over_fsdp():
    specs = models.gpt_param_specs(TINY, BOTH)
    block = specs["blocks"][0]
    for name in ("qkv", "expand"):
        assert block[name] == {"kernel": P("fsdp", "tensor"), "bias": P("tensor")}
    for name in ("project", "contract"):
        assert block[name] == {"kernel": P("tensor", "fsdp"), "bias": P()}
    assert block["norm_mlp"] == block["norm_attention"] == {"scale": P(), "bias": P()}
    assert specs["embed"] == {"kernel": P("tensor", "fsdp")}
    assert specs["positions"] == P(None, "fsdp")
    assert specs["head"] == {"kernel": P("fsdp", "tensor")}
    assert "head" not in models.gpt_param_specs(dataclasses.replace(TINY, tied=True), BOTH)


def test_own_rules_and_what_is_named_by_none():
    rules = [("embed", ("fsdp", "tensor")), ("norm", "fsdp")]
    specs = models.gpt_param_specs(TINY, BOTH, rules)
    assert specs["head"]["kernel"] == P(("fsdp", "tensor"))
    assert specs["norm"]["scale"] == P("fsdp")
    assert specs["blocks"][0]["expand"]["bias"] == P()
    # Axes that a mesh does not have split nothing by default.
    specs = models.gpt_param_specs(TINY, AbstractMesh((2, 4), ("replica", "fsdp")))
    assert specs["blocks"][0]["qkv"] == {"kernel": P("fsdp"), "bias": P()}
    # As in flax, the first rule whose axes are free counts.
    specs = models.gpt_param_specs(
        TINY, BOTH, [("mlp", "fsdp"), ("embed", "fsdp"), ("embed", "tensor")]
    )
    assert specs["blocks"][0]["expand"]["kernel"] == P("tensor", "fsdp")


def test_rules_change_where_activations_lie_and_not_their_values(mesh_of):
    mesh = mesh_of({"fsdp": 4, "tensor": 2})
    config = dataclasses.replace(TINY, qkv_by_head=True, remat=True)
    params, rng = models.init_gpt(config), np.random.default_rng(0)
    batch = rng.integers(0, 256, (8, 9)).astype(np.uint8)
    expected = jax.jit(jax.value_and_grad(models.gpt_loss_fn(config)))(params, batch)
    specs = models.gpt_param_specs(config, mesh)
    lies = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    with jax.set_mesh(mesh):
        loss_fn = models.gpt_loss_fn(config, models.gpt_rules(mesh))
        step = jax.jit(jax.value_and_grad(loss_fn), out_shardings=(None, lies))
        found = step(jax.device_put(params, lies), batch)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)
        with pytest.raises(ValueError, match=r"'batch'.* has 6"):
            jax.eval_shape(loss_fn, params, batch[:6])
