"""Learning rates and momenta that are numbers, or traced scalars."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from .._support.checks import ArgumentError, as_number


def checked_rate(argument: str, value: Any, below: float = math.inf) -> float | jax.Array:
    """Return a rate or a momentum as a checked float; a traced one has only its type checked."""
    if isinstance(value, Tracer) and not value.shape and jnp.issubdtype(value.dtype, jnp.floating):
        return value.astype(jnp.float32)
    # A plain float is weakly typed: NumPy scalars would widen the state under x64.
    number = as_number(value)
    if number is None or not 0 <= number < below:
        rule = "a finite number >= 0" if below == math.inf else f"a number in [0, {below})"
        raise ArgumentError(argument, f"`{argument}` must be {rule}, got {value!r}.")
    return number


def times(factor: float | jax.Array, x: jax.Array) -> jax.Array:
    """Return `factor * x` in x's dtype."""
    return (factor if isinstance(factor, int | float) else factor.astype(x.dtype)) * x
