"""Random numbers in place, which torchax draws from other intervals, or equal in every call."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch


def define(env: Any) -> None:
    """Define the operations of this module in an environment of torchax."""

    def drawn(draw: Callable[..., jax.Array]) -> Callable[..., Any]:
        def operation(x: Any, *arguments: Any, generator: Any = None, **named: Any) -> Any:
            key = env.get_and_rotate_prng_key(generator)
            old = x.jax()
            x.copy_(env.j2t_iso(draw(key, old, *arguments, **named).astype(old.dtype)))
            return x

        return operation

    aten: Any = torch.ops.aten
    for name, draw in {
        aten.cauchy_.default: _cauchy,
        aten.exponential_.default: _exponential,
        aten.normal_.default: _normal,
        aten.random_.default: _integers,
        aten.random_.to: lambda key, x, to: _integers(key, x, 0, to),
        getattr(aten.random_, "from"): _integers,
    }.items():
        env.override_op_definition(name, drawn(draw), is_view_op=True)


def _cauchy(key: jax.Array, x: jax.Array, median: float = 0, sigma: float = 1) -> jax.Array:
    return median + sigma * jax.random.cauchy(key, x.shape)


def _exponential(key: jax.Array, x: jax.Array, lambd: float = 1) -> jax.Array:
    return jax.random.exponential(key, x.shape) / lambd


def _normal(key: jax.Array, x: jax.Array, mean: float = 0, std: float = 1) -> jax.Array:
    return mean + std * jax.random.normal(key, x.shape)


def _integers(key: jax.Array, x: jax.Array, low: int = 0, high: int | None = None) -> jax.Array:
    return jax.random.randint(key, x.shape, low, _end(x) if high is None else high)


def _end(x: jax.Array) -> int:
    """Return the bound of torch's integers without `high`: those that the dtype holds exactly."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        return min(2 ** (jnp.finfo(x.dtype).nmant + 1), 2**31 - 1)
    return min(int(jnp.iinfo(x.dtype).max), 2**31 - 1)
