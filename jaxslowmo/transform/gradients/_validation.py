"""What transforms are told where an update is validated after it was made, not before."""

from typing import Any, NamedTuple


class Validation(NamedTuple):
    """Passed on as `validation=` to all transforms of an optimizer; None where nothing is late.

    A transform that would hold up the update until something is known on all devices (the norm of
    all gradients, whether one is infinite) does not. It makes the update as if all were well, and
    its new state says what was found. The step then chooses.

    Attributes:
      clipped: the state of `js.clip_by_global_norm`, found by an earlier run of the same update,
        for it to clip by without looking again; None: it looks, and does not clip.
      skipped: () bool, whether that run found something that is not finite, for
        `js.dynamic_loss_scale`; None: it looks.
    """

    clipped: Any = None
    skipped: Any = None
