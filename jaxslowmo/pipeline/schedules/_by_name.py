"""Schedules by the name of their kind, as command lines and configurations give them."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from .kinds import gpipe, interleaved, lockstep, one_f_one_b, zbv, zero_bubble
from .table import Schedule

KINDS: Mapping[str, Callable[..., Schedule]] = MappingProxyType(
    {make.__name__: make for make in (gpipe, one_f_one_b, interleaved, zero_bubble, zbv, lockstep)}
)
"""What makes a schedule of each kind, by its name."""


def by_name(
    kind: str,
    num_stages: int,
    num_microbatches: int,
    num_chunks: int | None = None,
    **options: Any,
) -> Schedule:
    """A schedule by the name of its kind.

    Args:
      kind: a key of `KINDS`, such as "one_f_one_b".
      num_stages: device stages.
      num_microbatches: microbatches of a step.
      num_chunks: stages of the model per device stage; None: what the kind has by itself.
      **options: further arguments of the kind, such as `memory` or `forward_only`.

    Returns:
      `KINDS[kind](num_stages, num_microbatches, ...)`.

    Raises:
      ValueError: an unknown kind, an option that the kind lacks, or what it refuses itself.

    Example:
      >>> by_name("one_f_one_b", 2, 2).orders()
      ['0F0,0F1,0B0,0B1', '1F0,1B0,1F1,1B1']
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind of schedule {kind!r}; the kinds are {', '.join(KINDS)}.")
    if num_chunks is not None:
        options = {"num_chunks": num_chunks, **options}
    known = list(inspect.signature(KINDS[kind]).parameters)[2:]
    unknown = [option for option in options if option not in known]
    if unknown:
        raise ValueError(f"{kind} has no option {_listed(unknown)}; it has {_listed(known)}.")
    return KINDS[kind](num_stages, num_microbatches, **options)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
