"""Random chains of views and writes end as torch's do."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from views.differentiated import in_jax, in_torch


@st.composite
def views_and_writes(draw):
    """Steps of a program: views of any tensor so far, and writes to any."""
    number = st.integers(0, 1000)
    kinds = st.sampled_from(["view", "view", "view", "write", "read"])
    return draw(st.lists(st.tuples(kinds, number, number, number), min_size=3, max_size=12))


def random_view(x, kind, number):
    dims, size = x.dim(), x.numel()
    dim = number % dims if dims else 0
    kind %= 12
    if dims == 0 or kind == 0:
        return x.unsqueeze(number % (dims + 1))
    length = x.shape[dim]
    if kind == 1:
        return x.reshape(-1)
    if kind == 2 and length:
        return x.select(dim, number % length)
    if kind == 3:
        return x.narrow(dim, number % (length + 1), (length - number % (length + 1) + 1) // 2)
    if kind == 4:
        return x.transpose(dim, (number // 7) % dims)
    if kind == 5:
        return x.permute(*np.roll(np.arange(dims), number).tolist())
    if kind == 6:
        return x.squeeze(dim)
    if kind == 7 and length:
        return x.unbind(dim)[number % length]
    if kind == 8:
        return x[(slice(None),) * dim + (slice(number % 2, None, 1 + number % 3),)]
    if kind == 9 and length:
        return x.split(1 + number % length, dim)[-1]
    if kind == 10 and dims > 1:
        return x.diagonal(number % 2, 0, dims - 1)
    if kind == 11 and size and size % 2 == 0:
        return x.reshape(2, size // 2)
    return x.detach()


def random_write(x, source, kind):
    kind %= 8
    if kind == 0:
        x.mul_(0.5)
    elif kind == 1:
        x.add_(source)
    elif kind == 2:
        x[...] = source * 0.5
    elif kind == 3:
        x.masked_fill_(x > 0.5, 0.3)
    elif kind == 4:
        x.data.add_(0.25)
    elif kind == 5:
        with torch.no_grad():
            x.copy_(source)
    elif kind == 6:
        x.detach().sin_()
    else:
        x.sin_()


def run(steps, x):
    tensors, total = [x], 0.0
    for kind, which, a, b in steps:
        tensor = tensors[which % len(tensors)]
        if kind == "view":
            tensors.append(random_view(tensor, a, b))
        elif kind == "write":
            random_write(tensor, x.mean().clone(), a)
        else:
            total = total + (tensor * 0.7).sum()
    for number, tensor in enumerate(tensors):
        total = total + (number + 1) * (torch.sin(tensor) * 0.3).sum()
    return total


@settings(max_examples=12, deadline=None, derandomize=True)
@given(views_and_writes())
def test_random_programs(steps):
    try:
        wanted, gradient = in_torch(lambda x: run(steps, x))
    except RuntimeError:  # torch refuses: a list's view in place, or what backward needs is gone
        return
    value, found = in_jax(lambda x: run(steps, x))
    np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found, gradient, rtol=1e-5, atol=1e-5)
