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
from jaxslowmo.checkpoint import Checkpoints
from torch_compat import on_jax

REPLICAS, RATE = 4, 0.1
MODES = ("traced", "host")


@pytest.fixture(scope="module")
def mesh():
    return js.make_mesh({"replica": REPLICAS}, devices=jax.devices()[:REPLICAS])


def step_of(module, mesh, of_batch=models.loss, **options):
    """A step with SGD for the module, and its first state."""
    loss_fn, params, model_state = on_jax.as_loss(module, of_batch)
    step = js.make_train_step(loss_fn, optax.sgd(RATE), mesh=mesh, **options)
    return step, step.init(params, model_state=model_state)


def parts(batch):
    """Each replica's part of a batch."""
    return [jax.tree.map(lambda x, i=i: np.split(x, REPLICAS)[i], batch) for i in range(REPLICAS)]


def sgd(module, batch):
    module.zero_grad()
    models.loss(module, models.in_torch(batch))[0].backward()
    with torch.no_grad():
        for p in module.parameters():
            p.sub_(RATE * p.grad)


def average(modules):
    """Every floating tensor of all modules becomes their mean."""
    for tensors in zip(*(m.state_dict().values() for m in modules), strict=True):
        if tensors[0].is_floating_point():
            mean = torch.stack(tensors).mean(0)
            for tensor in tensors:
                tensor.copy_(mean)


@pytest.mark.parametrize("mode", MODES)
def test_local_sgd(mesh, mode):
    module = models.Convolutions()
    step, state = step_of(module, mesh, sync=js.local_sgd("replica", sync_every=3), mode=mode)
    twins = [copy.deepcopy(module) for _ in range(REPLICAS)]
    for number, batch in enumerate(models.images(8, 4 * REPLICAS), 1):
        state, _ = step(state, batch)
        for twin, part in zip(twins, parts(batch), strict=True):
            sgd(twin, part)
        if number % 3 == 0:
            average(twins)
    for i, twin in enumerate(twins):
        own = jax.tree.map(lambda x, i=i: x[i], {**state.params, **state.model_state})
        models.assert_close(own, models.held(twin))
    average(twins)
    on_jax.load_back(module, state, step)
    models.assert_close(models.held(module), models.held(twins[0]))


def test_slow_momentum(mesh):
    module = models.TiedLanguageModel()
    sync = js.slowmo(
        "replica",
        base=js.local_sgd("replica", sync_every=1),
        sync_every=2,
        momentum=0.5,
        slow_learning_rate=0.7,
        learning_rate=RATE,
    )
    step, state = step_of(module, mesh, sync=sync)
    twins = [copy.deepcopy(module) for _ in range(REPLICAS)]
    anchors = [p.detach().clone() for p in module.parameters()]
    momenta = [torch.zeros_like(p) for p in anchors]
    for number, batch in enumerate(models.tokens(6, 2 * REPLICAS), 1):
        state, _ = step(state, batch)
        for twin, part in zip(twins, parts(batch), strict=True):
            sgd(twin, part)
        average(twins)
        if number % 2 == 0:
            mean = [p.detach() for p in twins[0].parameters()]
            momenta = [
                0.5 * m + (a - p) / RATE for m, a, p in zip(momenta, anchors, mean, strict=True)
            ]
            anchors = [a - 0.7 * RATE * m for a, m in zip(anchors, momenta, strict=True)]
            with torch.no_grad():
                for twin in twins:
                    for p, anchor in zip(twin.parameters(), anchors, strict=True):
                        p.copy_(anchor)
    on_jax.load_back(module, state, step)
    models.assert_close(models.held(module), models.held(twins[0]))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_averaged_gradients_are_those_of_the_whole_batch(mesh, accumulate):
    module = models.TiedLanguageModel()
    buckets = js.all_reduce_gradients("replica", bucket_bytes=512, first_bucket_bytes=256)
    step, state = step_of(module, mesh, gradients=buckets, accumulate=accumulate)
    twin = copy.deepcopy(module)
    batches = models.tokens(5, 4 * REPLICAS)
    for batch in batches:
        state, metrics = step(state, batch)
        sgd(twin, batch)
    assert metrics["right"].shape == (REPLICAS,)
    on_jax.load_back(module, state, step)
    models.assert_close(models.held(module), models.held(twin))
    report = js.comm_report(step, state, batches[0])
    (row,) = [r for r in report.select(level="compiled") if r.count]
    num = sum(p.numel() for p in module.parameters())
    assert (row.collective, row.bytes) == ("all-reduce", 4 * num)
    (row,) = [r for r in report.select(level="emitted") if r.count]
    assert row.count > 1  # buckets


@pytest.mark.parametrize("mode", MODES)
def test_push_sum(mesh, mode):
    module = models.Convolutions()
    step, state = step_of(module, mesh, sync=js.sgp("replica"), mode=mode)
    first = None
    for batch in models.images(10, 4 * REPLICAS):
        state, metrics = step(state, {"x": batch["x"], "y": (batch["x"].mean((1, 2, 3)) > 0) * 1})
        first = metrics["loss"].mean() if first is None else first
    assert metrics["loss"].mean() < first - 0.1
    shares = step.sync.shares(state.opt_state[-1])
    wanted = js.consensus(state.params, mesh=mesh, shares=shares)
    for step_or_none in (step, None):  # the state tells how replicas count
        on_jax.load_back(module, state, step_or_none)
        models.assert_close(models.held(module), {**models.held(module), **wanted}, 0)


def test_only_statistics_travel_with_parameters(mesh):
    module = models.Convolutions()
    step, state = step_of(module, mesh, sync=js.local_sgd("replica", sync_every=2), mode="host")
    report = js.comm_report(step, state, models.images(1, REPLICAS)[0])
    sent = {row.kind: row.bytes for row in report.select(level="compiled") if row.bytes}
    floating = [x for x in models.held(module).values() if x.dtype == np.float32]
    assert sent == {"average": sum(x.nbytes for x in floating)}


class Fingerprint(nn.Module):
    """A random number per call, and one of dropout."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return torch.rand(()), self.drop(torch.ones(16) + 0 * x.mean())


def fingerprints(module, batch):
    number, dropped = module(batch["x"])
    code = ((dropped > 0) * 2.0 ** torch.arange(16)).sum()
    return module.weight * 1.0, {"number": number, "square": number**2, "code": code}


@pytest.mark.parametrize("mode", MODES)
def test_random_numbers_differ_between_steps_and_replicas(mesh, mode):
    def run():
        step, state = step_of(
            Fingerprint(), mesh, fingerprints, sync=js.local_sgd("replica"), mode=mode
        )
        seen = []
        for batch in models.rows(4, REPLICAS):
            state, metrics = step(state, batch)
            seen += zip(metrics["number"].tolist(), metrics["code"].tolist(), strict=True)
        return seen

    seen = run()
    assert len({number for number, _ in seen}) == len({code for _, code in seen}) == 4 * REPLICAS
    assert seen == run()


def test_random_numbers_differ_between_microbatches(mesh):
    step, state = step_of(
        Fingerprint(), mesh, fingerprints, sync=js.local_sgd("replica"), accumulate=2
    )
    _, metrics = step(state, models.rows(1, 2 * REPLICAS)[0])
    variance = metrics["square"] - metrics["number"] ** 2
    assert (variance > 1e-5).all()


def test_it_starts_again_from_a_checkpoint(mesh, tmp_path):
    batches = models.images(6, 2 * REPLICAS)
    sync = js.local_sgd("replica", sync_every=2)
    step, state = step_of(models.Convolutions(), mesh, sync=sync)
    for batch in batches[:3]:
        state, _ = step(state, batch)
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(3, state)
    for batch in batches[3:]:
        state, _ = step(state, batch)
    _, params, model_state = on_jax.as_loss(models.Convolutions(), models.loss)
    with Checkpoints(tmp_path / "run") as checkpoints:
        other = checkpoints.restore(step, params, model_state=model_state).state
    for batch in batches[3:]:
        other, _ = step(other, batch)
    models.assert_close(other.params, state.params, 0)
    models.assert_close(other.model_state, state.model_state, 0)


def test_back_without_the_step(mesh):
    """The arrays tell the mesh; where they lie on none, that is said."""
    module, other = models.Convolutions(), models.Convolutions()
    step, state = step_of(module, mesh, sync=js.local_sgd("replica", sync_every=4))
    for batch in models.images(3, 4 * REPLICAS):
        state, _ = step(state, {"x": batch["x"], "y": (batch["x"].mean((1, 2, 3)) > 0) * 1})
    on_jax.load_back(module, state, step)
    on_jax.load_back(other, state)
    models.assert_close(models.held(other), models.held(module), 0)
    with pytest.raises(ValueError, match="load_back: `state` must have its replicas along an axis"):
        on_jax.load_back(other, jax.device_get(state))
