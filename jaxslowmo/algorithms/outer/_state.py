"""The state of an outer step, and the transform that stands for a base where there is none."""

from typing import Any, NamedTuple

import jax
import optax

from ..._support.types import PyTree
from ...transform import Others, ParameterTransform
from ...tree import widen_updates


class OuterState(NamedTuple):
    """State of `slowmo` and `diloco`."""

    count: jax.Array  # () int32, updates so far; equal on all replicas
    anchor: PyTree  # float32; sharded: tuple of (rows, lanes) shards, else like the parameters
    outer: PyTree  # state of the outer optimizer; `SlowMomentumState` for slowmo
    base: PyTree  # state of the base transform; () without one


def _exchange(
    updates: PyTree, others: Others, state: PyTree, params: PyTree, **extra: Any
) -> tuple[PyTree, Others, PyTree]:
    del params, extra
    return widen_updates(updates), others, state


# Outer steps call its `exchange` alone.
ALONE = ParameterTransform(
    lambda params: (),
    optax.with_extra_args_support(optax.identity()).update,
    phase=lambda t, skipped=0: (),
    due=lambda t: False,
    schedules=(),
    exchange=_exchange,
)
"""The base of replicas that train alone between slow steps: it exchanges nothing."""
