"""The module while it is traced, and after."""

import jax
import jax.numpy as jnp
import models
import numpy as np
import torch
from torch import nn

from torch_compat import on_jax
from torch_compat.on_jax._functional import Functional


def test_what_is_trained_and_what_is_carried():
    module = models.Counting()
    module.linear.bias.requires_grad_(False)
    functional = Functional("owner", module)
    assert functional.trained == ["linear.weight"]
    assert functional.carried == ["linear.bias", "calls", "order", "mask", "bytes", "seen"]
    params, state = functional.values()
    models.assert_close({**params, **state}, models.held(module), 0)


def test_parts_keep_the_mode_of_the_time():
    module = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    module[1].eval()
    loss_fn, params, state = on_jax.as_loss(module, lambda m, x: m(x).mean())
    module.train()
    _, (_, after) = jax.jit(loss_fn)(params, jnp.ones((3, 2)), model_state=state)
    counts = [int(after[f"{i}.num_batches_tracked"]) for i in range(2)]
    assert counts == [1, 0]
    assert module[1].training


def test_a_closure_over_the_module_sees_the_same_tensors():
    module = nn.Linear(2, 1, bias=False)
    loss_fn, params, _ = on_jax.as_loss(module, lambda m, x: m(x).mean() + module.weight.sum())
    gradients, _ = jax.grad(loss_fn, has_aux=True)(params, np.zeros((1, 2), np.float32))
    np.testing.assert_array_equal(gradients["weight"], [[1.0, 1.0]])


def test_hooks_run():
    module, seen = nn.Linear(2, 2), []
    module.register_forward_hook(lambda m, args, out: (seen.append(type(out)), out * 2)[1])
    _, params, _ = on_jax.as_loss(module, lambda m, x: m(x).mean())
    x = np.ones((1, 2), np.float32)
    doubled = on_jax.as_apply(module)(params, {}, x)
    np.testing.assert_allclose(doubled, module(torch.from_numpy(x)).detach(), rtol=1e-6)
    assert seen[0] is not torch.Tensor
