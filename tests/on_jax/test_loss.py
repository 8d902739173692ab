"""What a loss may return, and what it is given."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from torch_compat import on_jax

X = np.ones((3, 2), np.float32)


def run(loss, batch=X, module=None):
    loss_fn, params, state = on_jax.as_loss(module or nn.Linear(2, 2), loss)
    return jax.jit(loss_fn)(params, batch, rng=jax.random.key(0), model_state=state)


WRONG = {
    r"must be a scalar of a floating dtype.*shape \(3, 2\)": lambda m, x: m(x),
    r"shape \(1,\)": lambda m, x: m(x).mean().reshape(1),
    "got a tensor of shape .* and torch.int32": lambda m, x: m(x).sum().to(torch.int32),
    "must return a scalar tensor.*got float": lambda m, x: 1.0,
    "got NoneType": lambda m, x: None,
    "got dict": lambda m, x: {"loss": m(x).mean()},
    r"got \(a tensor of shape .*, dict, int\)": lambda m, x: (m(x).mean(), {}, 3),
    "metrics must be a dict of scalars, got a tensor": lambda m, x: (m(x).mean(), m(x).mean()),
    "the metric 'y' must be a scalar, got a tensor of shape": lambda m, x: (
        m(x).mean(),
        {"y": m(x)},
    ),
    "the metric 'y' must be a scalar, got str": lambda m, x: (m(x).mean(), {"y": "high"}),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_results_are_named(message):
    with pytest.raises(ValueError, match=message):
        run(WRONG[message])


def test_metrics_and_no_state():
    loss, (metrics, state) = run(lambda m, x: (m(x).mean(), {"a": m(x).max(), "b": 2}))
    assert loss.dtype == metrics["a"].dtype == jnp.float32
    assert (metrics["b"], state) == (2, {})


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    hidden: torch.Tensor | None = None


class ReturnsOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)

    def forward(self, input_ids=None, mask=None):
        assert input_ids.dtype == torch.int32
        assert mask.dtype == torch.bool
        return Output(self.embed(input_ids) * mask[..., None])


def test_a_dict_of_tokens_and_a_dataclass():
    batch = {"input_ids": np.arange(4, dtype=np.int32).reshape(2, 2), "mask": np.eye(2) > 0}
    module = ReturnsOutput()
    loss, _ = run(lambda m, b: m(**b).logits.sum(), batch, module)
    assert loss == pytest.approx(module.embed.weight[[0, 3]].sum().item())
    _, params, _ = on_jax.as_loss(module, lambda m, b: 0)
    output = jax.jit(on_jax.as_apply(module))(params, {}, **batch)
    assert output["hidden"] is None
    assert output["logits"].shape == (2, 2, 3)


Pair = collections.namedtuple("Pair", "first second")


@pytest.mark.parametrize(
    "batch", [(X, X), [X, X], Pair(X, X), {"a": X, "b": [X, 2, None]}, jnp.asarray(X)]
)
def test_batches_keep_their_structure(batch):
    def loss(module, given):
        assert type(given) is type(batch) or isinstance(given, torch.Tensor)
        return module(next(x for x in jax.tree.leaves(given) if hasattr(x, "shape"))).mean()

    assert np.isfinite(run(loss, batch)[0])


@pytest.mark.parametrize("argument", ["params", "model_state"])
def test_other_names_are_refused(argument):
    loss_fn, params, state = on_jax.as_loss(nn.BatchNorm1d(2), lambda m, x: m(x).mean())
    given = {"params": dict(params), "model_state": dict(state)}
    given[argument]["other"] = given[argument].pop(next(iter(given[argument])))
    message = rf"`{argument}` must have the names .* missing \['.*'\], unknown \['other'\]"
    with pytest.raises(ValueError, match=message):
        loss_fn(given["params"], X, model_state=given["model_state"])
    given[argument] = list(given[argument].values())
    with pytest.raises(ValueError, match=f"`{argument}` must be a dict of arrays by name"):
        loss_fn(given["params"], X, model_state=given["model_state"])


def test_tied_weights_are_one_parameter_with_both_gradients():
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    module[1].weight = module[0].weight
    loss_fn, params, _ = on_jax.as_loss(module, lambda m, x: (m(x) ** 2).mean())
    assert list(params) == ["0.weight"]
    gradients, _ = jax.grad(loss_fn, has_aux=True)(params, X)
    (module(torch.from_numpy(X)) ** 2).mean().backward()
    np.testing.assert_allclose(gradients["0.weight"], module[0].weight.grad, rtol=1e-5)


def test_the_arrays_are_copies():
    module = nn.BatchNorm1d(64)
    _, params, state = on_jax.as_loss(module, lambda m, x: m(x).mean())
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            tensor.add_(7)
    assert float(params["weight"].max()) == 1.0
    assert float(state["running_var"].max()) == 1.0
