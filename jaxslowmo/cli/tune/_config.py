"""Configuration of `jaxslowmo tune`."""

import dataclasses

from ..config._fields import Checked, check_different, option, parse_size, parse_sizes
from ..config._train import TrainConfig

ORDERS = ("reverse", "forward", "ready")


@dataclasses.dataclass(frozen=True)
class TuneBucketsConfig(Checked):
    """Bucket limits to measure.

    Attributes:
      train: model, batch, optimizer and devices.
      limits: bytes at which a bucket closes; 0, one bucket per gradient, is measured besides.
      first: bytes of the first bucket, where the limit is not below.
      order: in which gradients go into buckets.
      rounds: measurements of each limit, in turn.
      steps: per measurement.
    """

    train: TrainConfig
    limits: tuple[int, ...] = option(
        "1MiB,5MiB,25MiB,100MiB",
        "Sizes at which a bucket closes, separated by commas; one bucket per gradient is "
        "measured besides.",
        parse=parse_sizes,
    )
    first: int = option(
        "1MiB", "Size of the first bucket, where the limit is not below.", parse=parse_size
    )
    order: str = option("reverse", "In which gradients go into buckets.", choices=ORDERS)
    rounds: int = option(9, "Measurements of each limit, in turn.", least=1)
    steps: int = option(5, "Training steps per measurement.", least=1)

    def __post_init__(self) -> None:
        check_different("--limits", self.limits, "sizes")
        super().__post_init__()
        if self.train.replicas * self.train.devices_per_replica < 2:
            raise ValueError("--replicas must be >= 2: one device has nothing to reduce")

    @property
    def candidates(self) -> tuple[int, ...]:
        """The limits to measure, 0 first."""
        return tuple(sorted({0, *self.limits}))

    def first_of(self, limit: int) -> int:
        """Size of the first bucket beside a limit."""
        return min(self.first, limit)
