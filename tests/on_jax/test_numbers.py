"""Python numbers of a module: what a compiled program would keep in silence is refused by name."""

import jax
import models
import numpy as np
import pytest
import torch
from torch import nn

import jaxslowmo as js
from torch_compat import on_jax

X = np.random.default_rng(0).normal(size=(4, 2)).astype(np.float32)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.inner.temperature, self.inner.window, self.auxiliary = 2.0, (1, 2), None
        self.calls, self.inner.flag, self.name = 0, True, "one"

    def forward(self, x):
        self.auxiliary = self.inner(x).mean()
        self.rows = x.shape[0]  # new in each call
        return self.inner(x) / self.inner.temperature + self.auxiliary


def loss(module, x):
    return (module(x) ** 2).mean()


def step_of(module):
    return models.step_of(module, loss, sync=js.local_sgd("replica"))


# What is set, and what a step says of it.
CHANGES = [
    (lambda m: vars(m.inner).update(temperature=0.5), "inner.temperature was 2.0 and is 0.5"),
    (lambda m: vars(m.inner).update(window=(1, 3)), "inner.window was (1, 2) and is (1, 3)"),
    (lambda m: vars(m).update(name="two", calls=3), "name was 'one' and is 'two'"),
]


def test_changes_are_named_and_a_new_step_takes_them():
    module = Scaled()
    step, state = step_of(module)
    state, _ = step(state, X)
    before = dict(vars(module)), dict(vars(module.inner))
    for change, message in CHANGES:
        change(module)
        with pytest.raises(ValueError, match="as_loss") as error:
            step(state, X)
        assert message in str(error.value)
        vars(module).update(before[0])
        vars(module.inner).update(before[1])
    module.inner.temperature = np.float32(2.0)  # as it was
    state, _ = step(state, X)
    module.inner.temperature = 4.0
    again, _ = step_of(module)  # for the changed module, from where the training is
    state, _ = again(state, X)
    for run in (step, step.evaluate, step.collect):
        with pytest.raises(ValueError, match=r"inner\.temperature was 2\.0 and is 4\.0"):
            run(state, X)


def test_what_is_no_number_may_change():
    module = Scaled()
    step, state = step_of(module)
    for _ in range(2):
        auxiliary = module.auxiliary
        state, _ = step(state, X)
        assert module.auxiliary is auxiliary
        assert hasattr(module, "rows") == (auxiliary is not None)  # as plain torch has left it
        module.eval()
        on_jax.load_back(module, state, step)
        on_jax.as_apply(module)(
            {name: p.detach().numpy() for name, p in module.named_parameters()}, {}, X
        )
        module(torch.from_numpy(X))
        module.train()
        module.inner.register_full_backward_hook(lambda *_: None).remove()
        module.other = 3  # new: no program can have seen it


def test_a_retrace_refuses_and_what_is_not_compiled_follows():
    module = Scaled()
    params = {name: p.detach().numpy() for name, p in module.named_parameters()}
    apply = on_jax.as_apply(module)
    for module.inner.temperature in (1.0, 3.0):
        wanted = module(torch.from_numpy(X)).detach()
        np.testing.assert_allclose(apply(params, {}, X), wanted, rtol=1e-5)
    compiled = jax.jit(apply)
    compiled(params, {}, X)
    module.inner.temperature = 2.0
    with pytest.raises(ValueError, match=r"as_apply: .*inner\.temperature was 3\.0 and is 2\.0"):
        compiled(params, {}, X[:2])


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.inner.calls, self.shape = 0, None

    def forward(self, x):
        self.inner.calls, self.shape = self.inner.calls + 1, tuple(x.shape)
        return self.inner(x)


def test_what_forward_changes_is_refused_by_name():
    """Shapes, and what was none, may be kept."""
    module = Counts()
    before = dict(vars(module))
    loss_fn, params, _ = on_jax.as_loss(module, loss)
    with pytest.raises(ValueError, match=r"^as_loss: the module changes inner\.calls in forward"):
        jax.jit(loss_fn)(params, X)
    assert vars(module) == before
    assert module.inner.calls == 0
