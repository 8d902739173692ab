"""How much Python runs, for what must not take long: counted, so that no other work disturbs it."""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

FEW, MANY = 8, 24


def count_calls(fn: Callable[[], Any]) -> int:
    """Calls of functions, Python's and built-in ones, that `fn()` makes."""
    made = 0

    def seen(frame: Any, event: str, argument: Any) -> None:
        nonlocal made
        made += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        fn()
    finally:
        sys.setprofile(before)
    return made


def leaves_of(number: int) -> dict[str, dict[str, jax.Array]]:
    """Parameters of so many leaves, nested as those of a model."""
    return {f"layer_{i}": {"w": jnp.ones((2, 3)), "b": jnp.ones(3)} for i in range(number // 2)}


def calls_per_leaf(fn: Callable[[Any], Any]) -> float:
    """Calls that each further leaf adds to tracing `fn(tree)`, in calls of a traced `lax.add`.

    What every traced function costs, whatever it does with its arguments, is left out.
    """

    def rise(fn: Callable[[Any], Any]) -> float:
        counted = []
        for number in (FEW, MANY):
            tree = leaves_of(number)
            for _ in range(2):  # the first finds what jax and Python keep for good
                made = count_calls(lambda tree=tree: jax.make_jaxpr(lambda t: fn(t))(tree))
            counted.append(made)
        return (counted[1] - counted[0]) / (MANY - FEW)

    nothing = rise(lambda tree: tree)
    unit = rise(lambda tree: jax.tree.map(lambda x: lax.add(x, x), tree))
    return (rise(fn) - nothing) / (unit - nothing)
