"""The state of an island that checkpoints hold: which anchor its parameters come from."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .._support.types import PyTree
from ..algorithms.outer import ALONE
from ..collectives.codecs import Codec
from ..transform import ParameterTransform, Sync, Wrapper


class IslandState(NamedTuple):
    """The state of `Island.transform`; equal on all replicas but for `inner`."""

    count: jax.Array  # () int32, updates so far
    inner: PyTree  # state of the algorithm between the island's replicas; () without one
    run: jax.Array  # () uint32, from the name of the run; 0 before the island has joined
    round: jax.Array  # () int32, the round from whose anchor the parameters come
    exchanged: jax.Array  # () int32, updates at the last exchange
    lost: PyTree  # float32, like the parameters: what the codec has not sent yet; () without one


@dataclass(frozen=True)
class Member(Wrapper):
    """The algorithm `base` between an island's replicas, beside which the island's round is kept.

    Programs leave that alone: `Island.exchange` changes it between two updates.

    Attributes:
      base: the algorithm between the replicas.
      keeps_lost: whether a codec's error is kept.
    """

    base: Sync
    keeps_lost: bool
    owner = "islands"
    state = IslandState

    def init(self, params: PyTree) -> IslandState:
        """Return the first state."""
        return self.first(params, self.base.init(params))

    def like_init(self, params: PyTree) -> IslandState:
        """See `Sync.like_init`."""
        return self.first(params, self.base.like_init(params))

    def first(self, params: PyTree, inner: PyTree) -> IslandState:
        """Return the first state around that of `base`."""
        zero = jnp.zeros([], jnp.int32)
        lost = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
        run = jnp.zeros([], jnp.uint32)
        return IslandState(zero, inner, run, zero, zero, lost if self.keeps_lost else ())


def transform(
    base: ParameterTransform | None = None, codec: Codec | None = None
) -> ParameterTransform:
    """Return `Island.transform(base)` of an island with this codec, without asking a store.

    A program that reads the checkpoints of an island, and joins nothing, makes its step with it.

    Args:
      base: the algorithm between the island's replicas; None: nothing.
      codec: the codec of parts, as in `js.islands.join`.

    Returns:
      The `sync` of `js.make_train_step`.

    Raises:
      ValueError: a base that keeps an anchor of its own.

    Communication: that of `base`.
    """
    if base is not None and not isinstance(base, ParameterTransform):
        raise ValueError(f"islands: `base` must be None or one such as js.sgp(...), got {base!r}.")
    inner = ALONE if base is None else base.sync
    if inner.has_anchor:
        raise ValueError(
            f"islands: `base` must not keep an anchor, which an exchange would leave behind, "
            f"got {inner.owner}; take js.local_sgd or js.sgp."
        )
    keeps_lost = codec is not None and codec.error_feedback
    return ParameterTransform(Member(inner, keeps_lost))
