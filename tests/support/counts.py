"""Counts of Python calls, which measure cost without the noise of a clock."""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

FEW, MANY = 8, 24


def count_calls(fn: Callable[[], Any]) -> int:
    """Return how many functions, of Python or built in, `fn()` calls."""
    num_calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        fn()
    finally:
        sys.setprofile(before)
    return num_calls


def leaves_of(number: int) -> dict[str, dict[str, jax.Array]]:
    """Return parameters with `number` leaves, nested as those of a model."""
    return {f"layer_{i}": {"w": jnp.ones((2, 3)), "b": jnp.ones(3)} for i in range(number // 2)}


def calls_per_leaf(fn: Callable[[Any], Any]) -> float:
    """Return the calls that each leaf adds to tracing `fn(tree)`, in units of a traced `lax.add`.

    The cost of tracing any function of as many arguments is subtracted.
    """

    def rise(fn: Callable[[Any], Any]) -> float:
        counted = []
        for number in (FEW, MANY):
            tree = leaves_of(number)
            for _ in range(2):  # the first finds what jax and Python keep for good
                num_calls = count_calls(lambda tree=tree: jax.make_jaxpr(lambda t: fn(t))(tree))
            counted.append(num_calls)
        return (counted[1] - counted[0]) / (MANY - FEW)

    nothing = rise(lambda tree: tree)
    unit = rise(lambda tree: jax.tree.map(lambda x: lax.add(x, x), tree))
    return (rise(fn) - nothing) / (unit - nothing)
