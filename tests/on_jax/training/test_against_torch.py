"""Twenty steps by jax end where twenty steps by torch do, to 1e-5: all that the module holds."""

import jax
import models
import numpy as np
import optax
import pytest
from torch import nn

from torch_compat import on_jax

STEPS = 20


def partly_frozen() -> nn.Module:
    """With both kinds of running statistics."""
    module = models.Convolutions()
    module.conv.requires_grad_(False)
    module.norm.weight.requires_grad_(False)
    return module


CASES = {
    "frozen layers": (partly_frozen, models.images),
    "tied weights": (models.TiedLanguageModel, models.tokens),
    "integer buffers": (models.Counting, models.rows),
}


def trained_by_jax(module, batches):
    """Losses, parameters and model state after SGD with momentum, jitted."""
    loss_fn, params, model_state = on_jax.as_loss(module, models.loss)
    optimizer = optax.sgd(0.1, momentum=0.9)

    @jax.jit
    def step(params, opt_state, model_state, batch, key):
        (loss, (_, model_state)), gradients = jax.value_and_grad(loss_fn, has_aux=True)(
            params, batch, rng=key, model_state=model_state
        )
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, model_state, loss

    opt_state, losses = optimizer.init(params), []
    for number, batch in enumerate(batches):
        key = jax.random.key(number)
        params, opt_state, model_state, loss = step(params, opt_state, model_state, batch, key)
        losses.append(float(loss))
    return losses, params, model_state


@pytest.mark.parametrize("case", CASES)
def test_it_ends_where_torch_does(case):
    make, data = CASES[case]
    module, batches = make(), data(STEPS)
    losses, params, model_state = trained_by_jax(module, batches)
    wanted = models.trained_by_torch(module, batches)
    np.testing.assert_allclose(losses, wanted, atol=models.TOLERANCE)
    assert abs(wanted[-1] - wanted[0]) > 0.01
    models.assert_close({**params, **model_state}, models.held(module))
