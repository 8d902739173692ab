"""What pipelines of both kinds refuse: models and schedules that are none."""

from collections.abc import Sequence
from typing import Any

from ..schedules import Schedule
from ._layered import LayeredModel


def check_pipeline(model: Any, schedule: Any) -> None:
    """Raise `ValueError` unless these are a `LayeredModel` and a `Schedule`."""
    if not isinstance(model, LayeredModel):
        raise ValueError(
            "`model` must be a js.LayeredModel, of functions of (params, x) and a loss, got "
            f"{type(model).__name__}."
        )
    if not isinstance(schedule, Schedule):
        raise ValueError(
            "`schedule` must be a js.Schedule such as js.schedules.one_f_one_b(4, 16), got "
            f"{schedule!r}."
        )


def as_axes(axes: str | Sequence[str]) -> tuple[str, ...]:
    """The names of `data_axes`, of which one may stand for itself."""
    return (axes,) if isinstance(axes, str) else tuple(axes)
