"""Every dtype of torch goes to jax and comes back as it was."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from torch_compat import on_jax
from torch_compat.on_jax._arrays import jax_dtype, keeps_values, to_jax, to_torch

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16),
    *(torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64),
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_there_and_back(dtype):
    for shape in [(), (0,), (2, 3)]:
        size = int(np.prod(shape))
        tensor = (torch.arange(6.0) - 1).to(dtype)[:size].reshape(shape)
        for given in (tensor, tensor.permute(tuple(reversed(range(tensor.ndim))))):
            array = to_jax(given)
            assert (array.shape, array.dtype) == (given.shape, jax_dtype(dtype))
            back = to_torch(array, given)
            assert back.dtype == dtype
            wide = torch.complex64 if dtype.is_complex else torch.float32
            assert torch.equal(back.to(wide), given.to(wide))


def test_what_32_bits_hold_and_64_do():
    for kept in ([2**31 - 1, -(2**31)], [], torch.ones(1, dtype=torch.float16)):
        assert keeps_values(torch.as_tensor(kept, dtype=None if len(kept) else torch.int64))
    for lost in ([2**31], [-(2**31) - 1], torch.ones(1, dtype=torch.float64)):
        assert not keeps_values(torch.as_tensor(lost))
    assert jax_dtype(torch.bfloat16) == jnp.bfloat16
    module = nn.Linear(2, 2)
    module.register_buffer("extra", torch.tensor([2**40]))
    with jax.enable_x64(True):
        _, params, state = on_jax.as_loss(module.to(torch.float64), lambda m, x: m(x).mean())
    assert params["weight"].dtype == "float64"
    assert state["extra"].tolist() == [2**40]
