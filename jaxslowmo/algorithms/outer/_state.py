"""What an outer step keeps."""

from typing import NamedTuple

import jax

from ..._typing import PyTree


class OuterState(NamedTuple):
    """State of `slowmo` and `diloco`."""

    count: jax.Array  # () int32, updates so far; equal on all replicas
    anchor: PyTree  # float32; sharded: tuple of (rows, lanes) shards, else like the parameters
    outer: PyTree  # state of the outer optimizer; `SlowMomentumState` for slowmo
    base: PyTree  # state of the base transform; () without one
