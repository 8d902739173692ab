"""What the constructor refuses, and what it only mentions."""

import warnings
from collections.abc import Mapping
from typing import Any

OVERLAP = (
    "`overlap`=True is not available (FairScale's is disabled as well): the exchange would have to "
    "run beside the next step, and a torch_xla program runs one graph after the other. In JAX, "
    "jaxslowmo.sgp(..., overlap=1) does it."
)


def check_numbers(**options: Any) -> None:
    """Frequencies are ints >= 1, momentum lies in [0, 1), the slow learning rate is >= 0.

    Raises:
      ValueError: naming the argument, the rule and the value.
    """
    for name in ("slowmo_frequency", "localsgd_frequency", "slowmo_num_shards"):
        value = options[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"`{name}` must be an int >= 1, got {value!r}.")
    momentum, slow_lr = options["slowmo_momentum"], options["slowmo_lr"]
    if not (_is_number(momentum) and 0 <= momentum < 1):
        raise ValueError(f"`slowmo_momentum` must lie in [0, 1), got {momentum!r}.")
    if not (_is_number(slow_lr) and 0 <= slow_lr < float("inf")):
        raise ValueError(f"`slowmo_lr` must be a finite number >= 0, got {slow_lr!r}.")


def check_place(name: str, given: int | None, actual: int) -> None:
    """A rank or world size that the caller states is the one that torch_xla has.

    Raises:
      ValueError: it is another.
    """
    if given is not None and given != actual:
        raise ValueError(
            f"`{name}` comes from torch_xla, where it is {actual}; leave it None or pass that, got "
            f"{given!r}."
        )


def mention_unused(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """One warning that names the arguments without meaning on XLA that are not at their default."""
    names = [f"`{name}`" for name, value in given.items() if value is not defaults[name]]
    if names:
        warnings.warn(
            f"SlowMoDistributedDataParallel: {', '.join(names)} without effect on XLA: torch_xla "
            "has neither process groups nor streams, gossip is part of the step, and slow momentum "
            "is sharded over all processes.",
            UserWarning,
            stacklevel=3,
        )


def mention_alone() -> None:
    """A warning that there is nobody to exchange anything with."""
    warnings.warn(
        "SlowMoDistributedDataParallel: there is one process, so nothing is exchanged.",
        UserWarning,
        stacklevel=3,
    )


def mention_schedule(slowmo_frequency: int, localsgd_frequency: int) -> None:
    """A warning where slow steps and averages are out of step."""
    if slowmo_frequency % localsgd_frequency:
        warnings.warn(
            f"`slowmo_frequency`={slowmo_frequency} is not a multiple of "
            f"`localsgd_frequency`={localsgd_frequency}: parameters are averaged more often than "
            "needed, or slow steps start from parameters that are not averaged.",
            UserWarning,
            stacklevel=3,
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
