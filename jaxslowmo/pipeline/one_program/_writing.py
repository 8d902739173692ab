"""How what operations leave gets into the rows of buffers that the scan carries."""

from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ._rings import Buffers, Ring, Values, row_set


class Writing(Protocol):
    """What a branch gives for the buffers, and what they are after it."""

    def idle(self, buffers: Buffers) -> Values:
        """Of a branch that leaves nothing."""
        ...

    def left(self, buffers: Buffers, kind: int, row: jax.Array, values: Values) -> Values:
        """Of one that leaves the values of a stage of this kind in a row."""
        ...

    def taken(self, buffers: Buffers, left: Values, row: jax.Array, branch: jax.Array) -> Buffers:
        """The buffers after branch number `branch` has given `left`."""
        ...


class InBranches:
    """Branches hand the buffers on, with a row written.

    TPU's compiler does it where they stand; others copy the whole of what a branch hands on.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring

    def idle(self, buffers: Buffers) -> Values:
        return buffers

    def left(self, buffers: Buffers, kind: int, row: jax.Array, values: Values) -> Values:
        return self._ring.written(buffers, kind, row, values)

    def taken(self, buffers: Buffers, left: Values, row: jax.Array, branch: jax.Array) -> Buffers:
        del buffers, row, branch
        return list(left)


class BehindBranches:
    """Branches give a row, which is written behind them: no compiler copies more than that.

    It takes the memory of some more rows.

    Args:
      ring: of the buffers.
      kinds: per branch the kind of stage that leaves something; None where nothing is left.
    """

    def __init__(self, ring: Ring, kinds: Sequence[int | None]) -> None:
        self._ring = ring
        self._used = np.stack([ring.used(kind) for kind in kinds])

    def idle(self, buffers: Buffers) -> Values:
        del buffers
        return self._ring.nothing()

    def left(self, buffers: Buffers, kind: int, row: jax.Array, values: Values) -> Values:
        del buffers, row
        return self._ring.spread(kind, values)

    def taken(self, buffers: Buffers, left: Values, row: jax.Array, branch: jax.Array) -> Buffers:
        is_set = jnp.asarray(self._used)[branch]
        pairs = zip(buffers, left, strict=True)
        return [row_set(*pair, row, is_set[i]) for i, pair in enumerate(pairs)]


def writing_to(ring: Ring, kinds: Sequence[int | None], *, in_branches: bool) -> Writing:
    """The one or the other; `kinds` per branch, None where nothing is left."""
    return InBranches(ring) if in_branches else BehindBranches(ring, kinds)


def writes_in_branches(mesh: Mesh) -> bool:
    """Whether the compiler for these devices lets branches write where buffers stand."""
    return mesh.devices.flat[0].platform == "tpu"
