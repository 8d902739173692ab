"""The base of an outer step where replicas train alone between slow steps."""

from typing import Any

import optax

from ..._typing import PyTree
from ...transform import Others, ParameterTransform
from ...tree import widen_updates


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
"""Exchanges nothing."""
