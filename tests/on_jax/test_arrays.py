"""Every dtype of torch goes to jax and comes back as it was."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from torch_compat.on_jax._arrays import jax_dtype, keeps_values, to_jax, to_torch

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
]


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_there_and_back(dtype, shape):
    size = int(np.prod(shape))
    tensor = (torch.arange(6.0) - 1).to(dtype)[:size].reshape(shape)
    array = to_jax(tensor)
    assert (array.shape, array.dtype) == (shape, jax_dtype(dtype))
    back = to_torch(array, tensor)
    assert back.dtype == dtype
    wide = torch.complex64 if dtype.is_complex else torch.float32
    assert torch.equal(back.to(wide), tensor.to(wide))


def test_names_of_jax():
    assert jax_dtype(torch.bfloat16) == jnp.bfloat16
    assert jax_dtype(torch.int64) == np.int32
    with jax.enable_x64(True):
        assert jax_dtype(torch.int64) == np.int64
    assert jax_dtype(torch.float4_e2m1fn_x2) is None


@pytest.mark.parametrize(
    ("tensor", "kept"),
    [
        (torch.tensor([2**31 - 1, -(2**31)]), True),
        (torch.tensor([2**31]), False),
        (torch.tensor([-(2**31) - 1]), False),
        (torch.empty(0, dtype=torch.int64), True),
        (torch.ones(1, dtype=torch.float64), False),
        (torch.ones(1, dtype=torch.float16), True),
    ],
)
def test_what_32_bits_hold(tensor, kept):
    assert keeps_values(tensor) is kept


def test_tensors_that_are_not_contiguous():
    tensor = torch.arange(6.0).reshape(2, 3).T
    np.testing.assert_array_equal(to_jax(tensor), tensor)
