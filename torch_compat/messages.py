"""Messages between a `TPUManager` and its device process."""

from typing import NamedTuple

from .settings import Settings


class Step(NamedTuple):
    """A request for one step.

    Attributes:
      load_parameters: whether the devices load the master's parameters and buffers first.
      changes: settings of the model that a script has changed since the last step.
    """

    load_parameters: bool
    changes: Settings


class Commit(NamedTuple):
    """Permission for a step that was `Computed` to write into shared memory."""


class Stop(NamedTuple):
    """A request that the device process ends."""


class Ready(NamedTuple):
    """Notice that the replicas are on their devices."""

    num_devices: int


class Loaded(NamedTuple):
    """Notice that the devices have loaded the master's parameters, which may change again."""


class Computed(NamedTuple):
    """Notice that a step's gradients are computed and wait for a `Commit`."""


class StepStatistics(NamedTuple):
    """Times and transfers of one step.

    Attributes:
      seconds: time from the request to the gradients on the host, in the device process.
      data_seconds: device 0's wait for samples and their collation and transfer.
      barrier_seconds: device 0's wait for the other devices.
      compilations: number of XLA programs compiled in this step.
      bytes_to_device: bytes from the host to all devices together.
      bytes_to_host: bytes from all devices to the host.
    """

    seconds: float
    data_seconds: float
    barrier_seconds: float
    compilations: int
    bytes_to_device: int
    bytes_to_host: int


class StepDone(NamedTuple):
    """The outcome of a step: its gradients are in the master's."""

    loss: float
    num_samples: int
    statistics: StepStatistics


class Failed(NamedTuple):
    """Notice of a failure; it is the last message."""

    message: str
    traceback: str | None = None
