"""What the stages have computed outside of a program that uses it."""

from typing import Any, NamedTuple

import jax


class Results(NamedTuple):
    """What `HostPipeline.dispatch` has computed, which the loss function takes in place of a batch.

    Every leaf has a leading dimension of positions, over replicas and the axes inside a replica
    between whose devices the batch was split.

    Attributes:
      value: the loss, or (loss, metrics).
      states: the buffers of the new model state; {} without any.
      grads: the buffers of the gradients of the floating parameters; None where they were not
        wanted.
    """

    value: Any
    states: dict[str, Any]
    grads: dict[str, Any] | None

    def of_this_position(self) -> "Results":
        """Return the results of one device, where the leading dimension is mapped."""
        return jax.tree.map(lambda x: x[0], self)
