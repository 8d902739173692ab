"""What goes into a loss and a module, what comes out, and what is written back."""

import dataclasses

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
import torch
from torch import nn
from views.differentiated import Function

from torch_compat import on_jax

X = np.ones((3, 2), np.float32)


def run(loss, batch=X, module=None):
    loss_fn, params, state = on_jax.as_loss(module or nn.Linear(2, 2), loss)
    return jax.jit(loss_fn)(params, batch, rng=jax.random.key(0), model_state=state)


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    hidden: torch.Tensor | None = None


class ReturnsOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)

    def forward(self, input_ids=None, mask=None):
        assert input_ids.dtype == torch.int64
        assert mask.dtype == torch.bool
        return Output(self.embed(input_ids) * mask[..., None])


def test_a_dict_of_tokens_a_dataclass_and_metrics():
    batch = {"input_ids": np.arange(4, dtype=np.int32).reshape(2, 2), "mask": np.eye(2) > 0}
    module = ReturnsOutput()
    loss, _ = run(lambda m, b: m(**b).logits.sum(), batch, module)
    assert loss == pytest.approx(module.embed.weight[[0, 3]].sum().item())
    _, params, _ = on_jax.as_loss(module, models.loss)
    output = jax.jit(on_jax.as_apply(module))(params, {}, **batch)
    loss, (metrics, state) = run(lambda m, x: (m(x).mean(), {"a": m(x).max(), "b": 2}))
    assert loss.dtype == metrics["a"].dtype == jnp.float32
    assert (metrics["b"], state) == (2, {})
    assert output["hidden"] is None
    assert output["logits"].shape == (2, 2, 3)


def test_results_and_arguments_of_a_module():
    apply = on_jax.as_apply(Function(lambda x: {"a": (x, [x.sum(), None]), "b": 3, "c": x > 1}))
    out = jax.jit(apply)({}, {}, X)
    np.testing.assert_array_equal(out["a"][0], X)
    assert out["a"][1] == [6.0, None]
    assert (out["b"], out["c"].dtype) == (3, bool)
    apply = on_jax.as_apply(Function(lambda x, scale, flag: x * scale if flag else x))
    np.testing.assert_array_equal(apply({}, {}, X, scale=2 * X, flag=True), 2 * X)
    np.testing.assert_array_equal(apply({}, {}, X, scale=X, flag=False), X)


def test_parts_keep_the_mode_of_the_time_and_hooks_run():
    module, seen = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2)), []
    module[1].eval()
    module.register_forward_hook(lambda m, args, out: (seen.append(type(out)), out * 2)[1])
    loss_fn, params, state = on_jax.as_loss(module, lambda m, x: m(x).mean() + module[0].bias.sum())
    module.train()
    _, (_, after) = jax.jit(loss_fn)(params, X, model_state=state)
    counts = [int(after[f"{i}.num_batches_tracked"]) for i in range(2)]
    assert counts == [1, 0]
    assert module[1].training
    # A closure over the module sees the same tensors.
    gradients, _ = jax.grad(loss_fn, has_aux=True)(params, X, model_state=state)
    np.testing.assert_allclose(gradients["0.bias"], 1.0 + 2 * 0.5, atol=1e-4)
    predict = jax.jit(on_jax.as_apply(module.eval()))
    found = predict(params, {name: x + 1 for name, x in state.items()}, X)
    wanted = ((X - 1) / np.sqrt(2 + 1e-5) - 1) / np.sqrt(2 + 1e-5)
    np.testing.assert_allclose(found, 2 * wanted, atol=1e-6)
    assert seen[0] is not torch.Tensor


class Holds(nn.Module):
    """With a tensor that is neither a parameter nor a buffer."""

    def __init__(self, change):
        super().__init__()
        self.inner = nn.Identity()
        self.inner.table = torch.tensor([2.0, 3.0])
        self.note = None
        self.change = change

    def forward(self, x):
        self.change(self.inner, self, x)
        return x * self.inner.table


CARRIED = {
    "in place": lambda inner, x: inner.table.add_(x),
    "through a view": lambda inner, x: inner.table.view(-1)[1:].fill_(3.5),
    "anew": lambda inner, x: setattr(inner, "table", 0.9 * inner.table + x),
}


@pytest.mark.parametrize("change", CARRIED)
def test_what_would_be_lost_is_named(change):
    module = Holds(lambda inner, module, x: CARRIED[change](inner, x))
    table = module.inner.table
    with pytest.raises(ValueError, match=r"inner\.table, .*register_buffer"):
        jax.jit(on_jax.as_apply(module))({}, {}, np.arange(2.0, dtype=np.float32))
    assert module.inner.table is table
    assert table.tolist() == [2.0, 3.0]


def test_other_tensors_are_constants_and_never_a_leak():
    def leave(inner, module, x):
        module.note, module.new = x.sum(), x[:1]
        inner.table = x + 1  # of what is given alone, as weight norm does

    module, x = Holds(leave), np.arange(2.0, dtype=np.float32)
    np.testing.assert_array_equal(jax.jit(on_jax.as_apply(module))({}, {}, x), x * (x + 1))
    assert module.inner.table.tolist() == [2.0, 3.0]
    assert module.note is None
    assert not hasattr(module, "new")


def of(module):
    return on_jax.as_loss(module, models.loss)[1:]


def test_everything_comes_back_in_place():
    module = models.Counting()
    module.linear.bias.requires_grad_(False)
    params, state = of(module)
    assert list(params) == ["linear.weight"]
    with torch.no_grad():
        module.linear.weight.add_(7)
    assert abs(params["linear.weight"]).max() < 1  # arrays are copies
    params, state = of(module)
    assert list(state) == ["linear.bias", "calls", "order", "mask", "bytes", "seen"]
    models.assert_close({**params, **state}, models.held(module), 0)
    state |= {"calls": jnp.int32(5), "mask": ~state["mask"], "bytes": state["bytes"][::-1]}
    params = {name: x + 1 for name, x in params.items()}
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    on_jax.load_arrays(module, params, state)
    models.assert_close(models.held(module), {**params, **state}, 0)
    for name, x in [*module.named_parameters(), *module.named_buffers()]:
        assert x is tensors[name]
    assert (module.calls.dtype, module.mask.dtype) == (torch.int64, torch.bool)


def test_all_misfits_are_named_and_nothing_is_written():
    module = models.Counting()
    params, state = of(module)
    state["seen"] += 1
    del params["linear.bias"]
    params["other"] = jnp.ones(2)
    params["linear.weight"] = params["linear.weight"][None]
    state["calls"] = state["calls"].astype(jnp.float32)
    before = models.held(module)
    with pytest.raises(ValueError, match="load_arrays") as error:
        on_jax.load_arrays(module, params, state)
    for said in (
        "linear.bias is missing",
        "other is not",
        "float32(1, 4, 8)",
        "calls is float32() and must be int32()",
    ):
        assert said in str(error.value)
    models.assert_close(models.held(module), before, 0)
