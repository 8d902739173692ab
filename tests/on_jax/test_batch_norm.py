"""Normalisation with running statistics: outputs, gradients and statistics are torch's."""

import jax
import models
import numpy as np
import pytest
import torch
from torch import nn

from torch_compat import on_jax

CASES = {
    "momentum": (nn.BatchNorm2d(3), (4, 3, 2, 2)),
    "a mean of all batches": (nn.BatchNorm1d(3, momentum=None), (4, 3)),
    "sequences": (nn.BatchNorm1d(3, momentum=0.3), (4, 3, 5)),
    "volumes": (nn.BatchNorm3d(3, affine=False), (2, 3, 2, 2, 2)),
    "no statistics": (nn.BatchNorm1d(3, track_running_stats=False), (4, 3)),
    "instances": (nn.InstanceNorm1d(3, affine=True, track_running_stats=True), (2, 3, 5)),
    "instances alone": (nn.InstanceNorm2d(3), (2, 3, 4, 4)),
}


def loss(module, batch):
    return ((module(batch) + 0.3) ** 2 * torch.arange(batch.shape[-1])).mean()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_it_is_torchs(case, training):
    module, shape = CASES[case]
    module.train(training)
    loss_fn, params, state = on_jax.as_loss(module, loss)
    gradients = jax.jit(jax.grad(loss_fn, argnums=1, has_aux=True))
    apply = jax.jit(on_jax.as_apply(module))
    for x in np.random.default_rng(0).normal(2, 3, (3, *shape)).astype(np.float32):
        output = apply(params, state, x)
        of_input, (_, state) = gradients(params, x, model_state=state)
        tensor = torch.from_numpy(x).requires_grad_()
        loss(module, tensor).backward()
        np.testing.assert_allclose(of_input, tensor.grad, atol=models.TOLERANCE)
        models.assert_close({**params, **state}, models.held(module))
        module.eval()
        evaluated = jax.jit(on_jax.as_apply(module))(params, state, x)
        np.testing.assert_allclose(evaluated, module(tensor).detach(), atol=models.TOLERANCE)
        module.train(training)
        assert output.shape == shape


def test_statistics_of_half_precision_are_summed_in_float32():
    module = nn.BatchNorm1d(4).to(torch.bfloat16)
    module.running_mean = module.running_mean.float()
    module.running_var = module.running_var.float()
    loss_fn, params, state = on_jax.as_loss(module, lambda m, x: m(x).float().mean())
    x = np.random.default_rng(0).normal(5, 1, (512, 4)).astype(np.float32)
    _, (_, state) = loss_fn(params, jax.numpy.asarray(x, jax.numpy.bfloat16), model_state=state)
    rounded = np.asarray(jax.numpy.asarray(x, jax.numpy.bfloat16), np.float32)
    np.testing.assert_allclose(state["running_mean"], 0.1 * rounded.mean(0), atol=1e-5)
    variance = 0.9 + 0.1 * rounded.var(0, ddof=1)
    np.testing.assert_allclose(state["running_var"], variance, atol=1e-5)
