"""Configuration of `jaxslowmo tune`."""

import dataclasses
import re

from ._config import TrainConfig

ORDERS = ("reverse", "forward", "ready")
_UNITS = {
    "": 1,
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "kb": 1000,
    "mb": 10**6,
    "gb": 10**9,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


@dataclasses.dataclass(frozen=True)
class TuneBucketsConfig:
    """Bucket limits to measure.

    Attributes:
        train: model, batch, optimizer and devices.
        limits: bytes at which a bucket closes, increasing; 0, one bucket per gradient, is measured
            besides.
        first: bytes of the first bucket, where the limit is not below.
        order: in which gradients go into buckets.
        rounds: measurements of each limit, in turn.
        steps: per measurement.
    """

    train: TrainConfig
    limits: tuple[int, ...]
    first: int
    order: str
    rounds: int
    steps: int

    def __post_init__(self) -> None:
        if not self.limits or len(set(self.limits)) < len(self.limits):
            given = ",".join(map(str, self.limits)) or "nothing"
            raise ValueError(f"--limits must list one or more different sizes, got {given}")
        if self.order not in ORDERS:
            raise ValueError(f"--order must be one of {', '.join(ORDERS)}, got {self.order}")
        for name, value in (("--rounds", self.rounds), ("--steps", self.steps)):
            if value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        if self.train.replicas * self.train.devices_per_replica < 2:
            raise ValueError("--replicas must be >= 2: one device has nothing to reduce")

    @property
    def candidates(self) -> tuple[int, ...]:
        """The limits to measure, 0 first."""
        return tuple(sorted({0, *self.limits}))

    def first_of(self, limit: int) -> int:
        """Size of the first bucket beside a limit."""
        return min(self.first, limit)


def parse_sizes(option: str, text: str) -> tuple[int, ...]:
    """Bytes of "1MiB,25MB,4096".

    Raises:
        ValueError: naming `option`, for anything else.
    """
    return tuple(parse_size(option, part) for part in text.split(",") if part.strip())


def parse_size(option: str, text: str) -> int:
    """Bytes of "25MiB".

    Raises:
        ValueError: naming `option`, for anything else.
    """
    found = _SIZE.fullmatch(text)
    if found is None or found[2].lower() not in _UNITS:
        raise ValueError(
            f"{option} takes sizes such as 25MiB, 500kB or 4096, got {text.strip() or 'nothing'}"
        )
    return round(float(found[1]) * _UNITS[found[2].lower()])


def format_limit(limit: int) -> str:
    """A limit as users write it: 0, 1.5 MiB, 4,000 B."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if limit >= size and limit * 100 % size == 0:
            return f"{limit / size:g} {unit}"
    return f"{limit:,} B" if limit else "0"
