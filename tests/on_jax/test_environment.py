"""Random numbers come from the key, and plain torch in the same process stays as it was."""

import contextlib
import os
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torch_compat import on_jax


class Draws(nn.Module):
    def forward(self):
        big = 40_000
        ones, probabilities = torch.ones(big), torch.tensor([0.1, 0.2, 0.7])
        half = torch.rand(big, dtype=torch.bfloat16)
        return {
            "rand in half precision": torch.where(half < 1, half, torch.nan).float(),
            "rand": torch.rand(big),
            "randn": torch.randn(big),
            "randint": torch.randint(0, 1000, (big,)).float(),
            "randperm": torch.randperm(big).float(),
            "dropout": F.dropout(ones, 0.3),
            "multinomial": torch.multinomial(probabilities, big, replacement=True).float(),
            "gumbel": F.gumbel_softmax(ones.reshape(-1, 4)),
            "exponential": torch.empty(big).exponential_(2.0),
            "random": torch.empty(big).random_() / 2**24,
            "random from": torch.empty(big)[5:].random_(-50, 50),
            "normal": torch.empty(big).normal_(3.0, 2.0),
            "normal of two": torch.normal(3.0 * ones, 2.0 * ones),
            "normal of a mean": torch.normal(3.0 * ones, 2.0),
            "normal of a deviation": torch.normal(3.0, 2.0 * ones),
            "normal of numbers": torch.normal(3.0, 2.0, (big,)),
            "uniform": torch.empty(big).uniform_(-1.0, 3.0),
            "geometric": torch.empty(big).geometric_(0.25),
            "bernoulli": torch.empty(big).bernoulli_(0.3),
            "again": torch.rand(big),
        }


def test_every_kind_of_random_number_follows_the_key_and_is_distributed_as_torchs():
    draw = jax.jit(on_jax.as_apply(Draws()))
    found, other, again = (draw({}, {}, rng=jax.random.key(i)) for i in (0, 1, 0))
    assert not np.array_equal(found["rand"], found["again"])
    for name, wanted in Draws()().items():
        assert not np.array_equal(found[name], other[name]), name
        np.testing.assert_array_equal(found[name], again[name])
        spread = float(wanted.std())
        assert abs(float(found[name].mean()) - float(wanted.mean())) < 0.04 * spread, name
        assert abs(float(found[name].std()) - spread) < 0.04 * spread, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_matrix_draw_each_for_themselves(dtype):
    number, n = 4000, 300
    weights = torch.tensor([[4.0, 0, 12, 16], [0.25, 0.5, 0, 0.25]], dtype=dtype)
    many = weights.repeat_interleave(number, 0)
    even = torch.ones(3, n, dtype=dtype)

    class Rows(nn.Module):
        def forward(self):
            of_logits = torch.distributions.Categorical(logits=many.log()).sample()
            two, several = torch.multinomial(many, 2), torch.multinomial(weights, number, True)
            return of_logits, two, several, *(torch.multinomial(even, n, r) for r in (False, True))

    one, two, several, order, again = on_jax.as_apply(Rows())({}, {}, rng=jax.random.key(0))
    wanted = (weights / weights.sum(1, keepdim=True)).float().numpy()
    for drawn in (one, two[:, 0], several.ravel()):
        found = [np.bincount(row, minlength=4) / number for row in np.reshape(drawn, (2, number))]
        np.testing.assert_allclose(found, wanted, rtol=0, atol=0.03)
        assert not np.any(np.array(found)[wanted == 0])
    assert not np.any(two[:, 0] == two[:, 1])
    assert np.array_equal(np.sort(order), np.tile(np.arange(n), (3, 1)))
    for rows in (order, again):
        assert len(np.unique(rows, axis=0)) == 3
    assert abs(np.mean(np.asarray(again)) - n / 2) < 20


def state_of_torch():
    return {
        "seed": torch.random.get_rng_state().tolist(),
        "fast attention": torch.backends.mha.get_fastpath_enabled(),
        "device": str(torch.get_default_device()),
        "dtype": torch.get_default_dtype(),
        "kind": type(torch.ones(2)),
        "gradients": torch.is_grad_enabled(),
        "apply": torch.autograd.function._is_setup_context_defined,
        "validates": torch.distributions.Distribution._validate_args,
        "filters": list(warnings.filters),
    }


def test_what_asks_torch_for_an_accelerator_finds_none():
    """As before torchax, which names a backend that torch then takes for one."""
    assert not torch.accelerator.is_available()
    assert torch._C._get_privateuse1_backend_name() == "privateuseone"
    loader = torch.utils.data.DataLoader(list(range(4)), batch_size=4)
    assert next(iter(loader)).tolist() == [0, 1, 2, 3]
    assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist() == [2.0, 2.0]


@pytest.mark.parametrize("fails", [False, True])
def test_torch_is_as_it_was(fails):
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout())
    tensors = [*module.parameters(), *module.buffers()]
    before = state_of_torch()

    def loss(module, x):
        return module(x).no_such_thing() if fails else module(x).mean()

    loss_fn, params, state = on_jax.as_loss(module, loss)
    options = {"rng": jax.random.key(0), "model_state": state}
    with pytest.raises(AttributeError) if fails else contextlib.nullcontext():
        jax.jit(jax.grad(loss_fn, has_aux=True))(params, jnp.ones((3, 2)), **options)
    assert state_of_torch() == before
    after = [*module.parameters(), *module.buffers()]
    assert all(a is b for a, b in zip(after, tensors, strict=True))
    assert module[1].num_batches_tracked == 0


PROGRAM = """
import os, sys, torch, torch_compat
assert not {"torchax", "jax"} & sys.modules.keys(), "loaded before it is used"
sys.modules["torchax"] = None
try:
    from torch_compat import on_jax
except ModuleNotFoundError as error:
    assert error.name == "torchax" and "jaxslowmo[torchax]" in str(error), error
else:
    raise AssertionError("torchax is not there")
del sys.modules["torchax"]
before = torch.backends.mha.get_fastpath_enabled(), dict(os.environ)
from torch_compat import on_jax
assert torch_compat.on_jax is on_jax
assert (torch.backends.mha.get_fastpath_enabled(), dict(os.environ)) == before
"""


def test_importing_it_changes_nothing_and_says_what_is_missing():
    environment = {k: v for k, v in os.environ.items() if "TELEMETRY" not in k}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
