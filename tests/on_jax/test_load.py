"""Arrays back in a module: in place, all or none."""

import jax.numpy as jnp
import models
import numpy as np
import pytest
import torch
from torch import nn

from torch_compat import on_jax


def of(module):
    return on_jax.as_loss(module, models.loss)[1:]


def test_everything_comes_back_in_place():
    module = models.Counting()
    params, state = of(module)
    state |= {"calls": jnp.int32(5), "mask": ~state["mask"], "bytes": state["bytes"][::-1]}
    params = {name: x + 1 for name, x in params.items()}
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    on_jax.load_arrays(module, params, state)
    models.assert_close(models.held(module), {**params, **state}, 0)
    for name, x in [*module.named_parameters(), *module.named_buffers()]:
        assert x is tensors[name]
    assert (module.calls.dtype, module.mask.dtype) == (torch.int64, torch.bool)


def test_ties_dtypes_and_what_is_frozen_stay():
    module = models.TiedLanguageModel().to(torch.bfloat16)
    module.hidden.requires_grad_(False)
    params, state = of(module)
    on_jax.load_arrays(module, {n: x * 2 for n, x in params.items()}, state)
    assert module.out.weight is module.embed.weight
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert not module.hidden.weight.requires_grad
    assert module.embed.weight.requires_grad
    found = np.asarray(params["embed.weight"] * 2, np.float32)
    np.testing.assert_array_equal(module.embed.weight.detach().float(), found)


def broken(params, state):
    del params["linear.bias"]
    params["other"] = jnp.ones(2)
    params["linear.weight"] = params["linear.weight"][None]
    state["calls"] = state["calls"].astype(jnp.float32)


def test_all_misfits_are_named_and_nothing_is_written():
    module = models.Counting()
    params, state = of(module)
    state["seen"] += 1
    broken(params, state)
    before = models.held(module)
    with pytest.raises(ValueError, match="load_arrays: the arrays do not fit") as error:
        on_jax.load_arrays(module, params, state)
    for said in (
        "linear.bias is missing",
        "other is not in the module",
        "linear.weight is float32(1, 4, 8), in the module float32(4, 8)",
        "calls is float32(), in the module int32()",
    ):
        assert said in str(error.value)
    models.assert_close(models.held(module), before, 0)


def test_another_module_of_the_kind():
    module, other = models.Convolutions(), models.Convolutions()
    on_jax.load_arrays(other, *of(module))
    models.assert_close(models.held(other), models.held(module), 0)


def test_no_module():
    with pytest.raises(ValueError, match=r"must be a torch\.nn\.Module"):
        on_jax.load_arrays(nn.Linear, {})
