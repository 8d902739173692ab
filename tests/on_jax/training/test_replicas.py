"""A torch module in `js.make_train_step`, against one torch module per replica, by hand."""

import copy

import jax
import models
import numpy as np
import optax
import pytest
import torch
from torch import nn

import jaxslowmo as js
from support.refusals import Refusal
from torch_compat import on_jax

REPLICAS, RATE = 4, 0.1


def step_of(module, of_batch=models.loss, **options):
    return models.step_of(module, of_batch, replicas=REPLICAS, **options)


def parts(batch):
    """Each replica's part of a batch."""
    return [jax.tree.map(lambda x, i=i: np.split(x, REPLICAS)[i], batch) for i in range(REPLICAS)]


class Twin:
    """A copy of a module that torch trains by SGD."""

    def __init__(self, module: nn.Module, momentum: float = 0.0) -> None:
        self.module = copy.deepcopy(module)
        self.optimizer = torch.optim.SGD(self.module.parameters(), RATE, momentum)

    def step(self, batch) -> float:
        self.optimizer.zero_grad()
        value, _ = models.loss(self.module, models.in_torch(batch))
        value.backward()
        self.optimizer.step()
        return value.item()


def average(modules):
    """Every floating tensor of all modules becomes their mean."""
    for tensors in zip(*(m.state_dict().values() for m in modules), strict=True):
        if tensors[0].is_floating_point():
            mean = torch.stack(tensors).mean(0)
            for tensor in tensors:
                tensor.copy_(mean)


def partly_frozen() -> nn.Module:
    """With both kinds of running statistics."""
    module = models.Convolutions()
    module.conv.requires_grad_(False)
    module.norm.weight.requires_grad_(False)
    return module


@pytest.mark.parametrize(
    ("make", "data", "mode"),
    [(partly_frozen, models.images, "traced"), (models.Counting, models.rows, "host")],
)
def test_twenty_steps_of_sgd_with_momentum_and_averages(make, data, mode):
    """Integer buffers and frozen layers among them; all that the module holds is torch's."""
    module = make()
    sync = js.local_sgd("replica", sync_every=3)
    optimizer = optax.sgd(RATE, momentum=0.9)
    step, state = step_of(module, sync=sync, mode=mode, optimizer=optimizer)
    twins = [Twin(module, momentum=0.9) for _ in range(REPLICAS)]
    for number, batch in enumerate(data(20, 4 * REPLICAS), 1):
        state, metrics = step(state, batch)
        losses = [twin.step(part) for twin, part in zip(twins, parts(batch), strict=True)]
        np.testing.assert_allclose(metrics["loss"], losses, atol=models.TOLERANCE)
        if number % 3 == 0:
            average([twin.module for twin in twins])
    for i, twin in enumerate(twins):
        own = jax.tree.map(lambda x, i=i: x[i], {**state.params, **state.model_state})
        models.assert_close(own, models.held(twin.module))
    average([twin.module for twin in twins])
    on_jax.load_back(module, state, step)
    models.assert_close(models.held(module), models.held(twins[0].module))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_averaged_gradients_are_those_of_the_whole_batch(accumulate):
    module = models.TiedLanguageModel()
    buckets = js.all_reduce_gradients("replica", bucket_bytes=512, first_bucket_bytes=256)
    step, state = step_of(module, gradients=buckets, accumulate=accumulate)
    twin = Twin(module)
    for batch in models.tokens(5, 4 * REPLICAS):
        state, metrics = step(state, batch)
        twin.step(batch)
    assert metrics["right"].shape == (REPLICAS,)
    on_jax.load_back(module, state, step)
    models.assert_close(models.held(module), models.held(twin.module))


def test_push_sum_and_back_without_the_step():
    """The state tells the mesh and how replicas count; where it lies on no mesh, that is said."""
    module, other = models.Convolutions(), models.Convolutions()
    step, state = step_of(module, sync=js.sgp("replica"), mode="host")
    first = None
    for batch in models.images(10, 4 * REPLICAS):
        state, metrics = step(state, {"x": batch["x"], "y": (batch["x"].mean((1, 2, 3)) > 0) * 1})
        first = metrics["loss"].mean() if first is None else first
    assert metrics["loss"].mean() < first - 0.1
    shares = step.sync.shares(state.exchange)
    wanted = js.consensus(state.params, mesh=step.mesh, shares=shares)
    on_jax.load_back(module, state, step)
    models.assert_close(models.held(module), {**models.held(module), **wanted}, 0)
    on_jax.load_back(other, state)
    models.assert_close(models.held(other), models.held(module), 0)
    Refusal(lambda: on_jax.load_back(other, jax.device_get(state)), "`state`").check()
