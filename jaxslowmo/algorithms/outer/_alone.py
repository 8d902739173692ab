"""The base of an outer step where replicas train alone between slow steps."""

from typing import Any

from ..._typing import PyTree
from ...transform import ExchangeSpec, Others, ParameterTransform, ScheduleSpec, TransformSpec
from ...tree import widen_updates


def _exchange(
    updates: PyTree, others: Others, state: PyTree, params: PyTree, **extra: Any
) -> tuple[PyTree, Others, PyTree]:
    del params, extra
    return widen_updates(updates), others, state


def _update(
    updates: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any
) -> tuple[PyTree, PyTree]:
    del params, extra
    return widen_updates(updates), state


ALONE = ParameterTransform(
    lambda params: (),
    _update,
    TransformSpec(
        schedule=ScheduleSpec(
            phase=lambda t, skipped=0: (), due=lambda t: False, schedules=(), events=()
        ),
        exchange=ExchangeSpec(exchange=_exchange),
    ),
)
"""Exchanges nothing."""
