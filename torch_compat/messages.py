"""What a `TPUManager` and its device process say to each other."""

from typing import NamedTuple

from .settings import Changes


class Step(NamedTuple):
    """Ask for one step.

    Attributes:
      number: comes back with the outcome.
      load_parameters: whether the devices take the master's parameters and buffers first.
      changes: what a script has set on the model since the step before.
    """

    number: int
    load_parameters: bool
    changes: Changes


class Commit(NamedTuple):
    """Let a step that was `Computed` write into shared memory."""

    number: int


class Stop(NamedTuple):
    """Ask the device process to end."""


class Ready(NamedTuple):
    """The replicas are on their devices."""

    num_devices: int


class Loaded(NamedTuple):
    """The devices have the master's parameters, which may change again."""

    number: int


class Computed(NamedTuple):
    """The gradients of a step are there and wait for a `Commit` to be added to the master's."""

    number: int


class StepStatistics(NamedTuple):
    """What one step cost.

    Attributes:
      seconds: from the request to the gradients on the host, in the device process.
      data_seconds: device 0's wait for samples and their collation and transfer.
      barrier_seconds: device 0's wait for the other devices.
      compilations: XLA programs compiled in this step.
      bytes_to_device: host to devices, all devices together.
      bytes_to_host: devices to host.
    """

    seconds: float
    data_seconds: float
    barrier_seconds: float
    compilations: int
    bytes_to_device: int
    bytes_to_host: int


class StepDone(NamedTuple):
    """The outcome of a step: its gradients are in the master's."""

    number: int
    loss: float
    num_samples: int
    statistics: StepStatistics


class Failed(NamedTuple):
    """Nothing more will come."""

    message: str
    traceback: str | None = None
