"""The base of an outer step where replicas train alone between slow steps."""

from typing import Any

import optax

from ..._typing import PyTree
from ...transform import ExchangeSpec, Others, ParameterTransform, ScheduleSpec, TransformSpec


def _exchange(
    updates: PyTree, others: Others, state: PyTree, params: PyTree, **extra: Any
) -> tuple[PyTree, Others, PyTree]:
    del params, extra
    return updates, others, state


# Outer steps call its `exchange` alone.
_never = ScheduleSpec(phase=lambda t, skipped=0: (), due=lambda t: False, schedules=())
ALONE = ParameterTransform(
    lambda params: (),
    optax.with_extra_args_support(optax.identity()).update,
    TransformSpec(schedule=_never, exchange=ExchangeSpec(exchange=_exchange)),
)
"""Exchanges nothing."""
