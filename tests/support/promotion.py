"""Promotion as jax does it by default, for what relies on it: the suite forbids it elsewhere."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import optax
import pytest


@contextlib.contextmanager
def standard() -> Iterator[None]:
    """Allow promotion of ranks and dtypes, of ranks also in processes that start meanwhile."""
    with (
        pytest.MonkeyPatch.context() as patch,
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        patch.delenv("JAX_NUMPY_RANK_PROMOTION", raising=False)
        yield


def promoting(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Return a transform of a library that relies on promotion, which is allowed in it alone."""
    tx = optax.with_extra_args_support(tx)

    def init(params: Any) -> Any:
        with standard():
            return tx.init(params)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        with standard():
            return tx.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(init, update)


def apply_updates(params: Any, updates: Any) -> Any:
    """Do `optax.apply_updates`, which leaves the sum of half precision and float32 to promotion."""
    with standard():
        return optax.apply_updates(params, updates)
