"""What `jaxslowmo inspect schedule` is given."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config._fields import Checked, flag_of, option

if TYPE_CHECKING:
    from jaxslowmo.pipeline.schedules import Schedule

# `jaxslowmo.pipeline` loads jax, which help and wrong calls need not wait for.
KINDS = ("gpipe", "one_f_one_b", "interleaved", "zero_bubble", "zbv", "lockstep")
# A search for the lockstep of more operations takes minutes.
MOST = 2**14
_TIMES = ("forward", "backward_input", "backward_weight")


def _time(default: float, help: str) -> float:
    return option(default, help, least=0)


@dataclasses.dataclass(frozen=True)
class InspectScheduleConfig(Checked):
    """One schedule: by its kind and sizes, or by its table."""

    kind: str | None = None
    stages: int | None = option(None, "Device stages of the pipeline.", least=1)
    microbatches: int | None = option(None, "Microbatches of a step.", least=1)
    chunks: int | None = option(
        None, "Stages of the model per device stage (default: the kind's).", least=1
    )
    forward: float = _time(1.0, "Time of a forward pass (F) on a stage.")
    backward_input: float = _time(1.0, "Time of the gradient of the input (I).")
    backward_weight: float = _time(1.0, "Time of the gradient of the weights (W).")
    send: float = _time(0.0, "Time until what is sent has arrived.")
    lockstep: bool = option(
        False, "All stages begin each tick together, as in one program; else each runs free."
    )
    forward_only: bool = option(False, "No backward passes.")
    memory: int | None = option(None, "Of zero_bubble: 1 is ZB-H1, 2 is ZB-H2.", least=1)
    warm_up: str | None = option(None, "Of interleaved: few or all.", choices=("few", "all"))
    most_stash: int | None = option(
        None, "Of lockstep: most microbatches of a chunk that a stage holds.", least=1
    )
    table: Path | None = option(  # noqa: RUF009 - a field, as the others
        None, "File in torch's notation, instead of a kind: a line per stage."
    )
    whole: bool = option(False, "Show all ticks, however many.")
    orders: bool = option(False, "Print torch's notation, a line per stage, and nothing else.")
    as_json: bool = option(False, "Print JSON.", flag="--json")

    def __post_init__(self) -> None:
        if (self.kind is None) == (self.table is None):
            raise ValueError(
                f"give the KIND of a schedule or --table FILE; the kinds are {', '.join(KINDS)}"
            )
        if self.orders and self.as_json:
            raise ValueError("give one of --orders and --json")
        if self.table is not None:
            for name in ("stages", "microbatches", *self._of_kinds(), "forward_only"):
                if getattr(self, name):
                    raise ValueError(f"{flag_of(name)} does not go with --table")
        elif self.stages is None or self.microbatches is None:
            raise ValueError("--stages and --microbatches must be given with the kind")
        super().__post_init__()
        size = (self.stages or 1) * (self.microbatches or 1) * (self.chunks or 1)
        if size > MOST:
            raise ValueError(
                f"--stages times --microbatches times --chunks must be <= {MOST}, since more take "
                f"minutes; got {size}"
            )

    @staticmethod
    def _of_kinds() -> tuple[str, ...]:
        return "chunks", "memory", "warm_up", "most_stash"

    @property
    def times(self) -> dict[str, Any]:
        """As `Schedule.simulate` takes them."""
        return {name: getattr(self, name) for name in (*_TIMES, "send")}

    def schedule(self) -> "Schedule":
        """The schedule that was asked for.

        Raises:
          ValueError: what the library refuses, or a file that is no table.
        """
        from jaxslowmo.pipeline import schedules

        if self.table is not None:
            return schedules.from_table(_read(self.table), name=self.table.stem)
        options: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("memory", "warm_up", "most_stash", "forward_only")
            if getattr(self, name)
        }
        if self.kind == "lockstep":
            options |= self.times
        assert self.kind is not None
        assert self.stages is not None
        assert self.microbatches is not None
        return schedules.by_name(self.kind, self.stages, self.microbatches, self.chunks, **options)


def _read(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"--table: cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise ValueError(f"--table: {path} is no text") from None
