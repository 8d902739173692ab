"""The state of an island that checkpoints hold: which anchor its parameters come from."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._support.types import PyTree
from ..collectives.codecs import Codec
from ..transform import Algorithm, ParameterTransform, wrap_algorithm


class IslandState(NamedTuple):
    """The `state.local["island"]` of `Island.transform`; equal on all replicas."""

    run: jax.Array  # () uint32, from the name of the run; 0 before the island has joined
    round: jax.Array  # () int32, the round from whose anchor the parameters come
    exchanged: jax.Array  # () int32, updates at the last exchange
    lost: PyTree  # float32, like the parameters: what the codec has not sent yet; () without one


def transform(
    base: ParameterTransform | None = None, codec: Codec | None = None
) -> ParameterTransform:
    """Return `Island.transform(base)` of an island with this codec, without asking a store.

    A program that reads the checkpoints of an island, and joins nothing, makes its step with it.

    Args:
      base: the algorithm between the island's replicas; None: nothing.
      codec: the codec of parts, as in `js.islands.join`.

    Returns:
      The `sync` of `js.make_train_step`, with the state of `base` in `state.local["base"]`.

    Raises:
      ValueError: a base that keeps an anchor of its own.

    Communication: that of `base`.
    """
    if base is not None and not isinstance(base, ParameterTransform):
        raise ValueError(f"islands: `base` must be None or one such as js.sgp(...), got {base!r}.")
    inner = Algorithm() if base is None else base.algorithm
    if inner.has_anchor:
        raise ValueError(
            f"islands: `base` must not keep an anchor, which an exchange would leave behind, "
            f"got {inner.owner}; take js.local_sgd or js.sgp."
        )
    error_feedback = codec is not None and codec.error_feedback
    return ParameterTransform(_with_island_state(inner, error_feedback=error_feedback))


def _with_island_state(base: Algorithm, *, error_feedback: bool) -> Algorithm:
    """Return the algorithm between an island's replicas, whose state also holds an `IslandState`.

    Programs leave that alone: `Island.exchange` changes it between two updates.
    """

    def local(params: PyTree) -> dict[str, Any]:
        zero, run = jnp.zeros([], jnp.int32), jnp.zeros([], jnp.uint32)
        lost = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
        island = IslandState(run, zero, zero, lost if error_feedback else ())
        return {**wrap_algorithm(base).local(params), "island": island}

    def bind(axis_sizes: Any, params: PyTree | None) -> Algorithm:
        return _with_island_state(base.bound(axis_sizes, params), error_feedback=error_feedback)

    return replace(wrap_algorithm(base), local=local, owner="islands", bind=base.bind and bind)
