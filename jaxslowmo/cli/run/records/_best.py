"""The best evaluation of a run, and how many came after it."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Best:
    """The evaluation with the smallest validation loss so far; an early one where two are equal.

    Attributes:
      step: after which it was; None before the first.
      validation_loss: what it found.
      since: evaluations after it.
    """

    step: int | None = None
    validation_loss: float | None = None
    since: int = 0

    def after(self, step: int, validation_loss: float) -> "Best":
        """With one more evaluation; a loss that is NaN is no better than any."""
        if self.validation_loss is None or validation_loss < self.validation_loss:
            return Best(step, validation_loss)
        return dataclasses.replace(self, since=self.since + 1)

    def has_lasted(self, patience: int) -> bool:
        """Whether to wait no longer; never with a patience of 0."""
        return 0 < patience <= self.since
