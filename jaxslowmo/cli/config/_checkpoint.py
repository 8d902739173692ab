"""Options of `jaxslowmo train` alone: checkpoints, and what to do about faults."""

import dataclasses

from ._fields import Checked, option

ON_NAN = ("stop", "rollback")
_CHECKPOINTS = "Checkpoints"


@dataclasses.dataclass(frozen=True)
class CheckpointConfig(Checked):
    """What a run keeps of itself, and what it does when its numbers are no longer finite."""

    checkpoint_every: int = option(
        0,
        "Steps between checkpoints in OUT/checkpoints; 0: only when SIGTERM or Ctrl-C ends the "
        "run early.",
        panel=_CHECKPOINTS,
        least=0,
    )
    keep: int = option(3, "Checkpoints to keep, the newest.", panel=_CHECKPOINTS, least=1)
    resume: bool = option(
        False,
        "Go on from the newest checkpoint in --out; from scratch where there is none.",
        panel=_CHECKPOINTS,
    )
    fallback: bool = option(
        False,
        "With --resume, also of a start that --restarts adds: where the newest checkpoint is "
        "damaged, take the one before.",
        panel=_CHECKPOINTS,
    )
    max_failed_saves: int = option(
        3,
        "Saves in a row that may fail, say on a full disk; after so many the run ends, as it does "
        "where the last one fails.",
        panel=_CHECKPOINTS,
        least=1,
    )
    export: bool = option(
        False, "Write the consensus model to OUT/model at the end.", panel=_CHECKPOINTS
    )
    check_parameters: bool = option(
        False,
        "Before every exchange of parameters ask all replicas whether theirs are finite (4 bytes), "
        "and do not exchange where one's are not, but do as --on-nan says.",
        panel=_CHECKPOINTS,
    )
    on_nan: str = option(
        "stop",
        "When the loss is not finite: stop, or go back to the last checkpoint and leave out the "
        "batches since then.",
        panel=_CHECKPOINTS,
        choices=ON_NAN,
    )
    max_rollbacks: int = option(
        3,
        "Of --on-nan rollback: after so many, stop.",
        panel=_CHECKPOINTS,
        least=1,
        goes_with=("on_nan", ("rollback",)),
    )
