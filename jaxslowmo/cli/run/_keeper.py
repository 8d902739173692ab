"""The checkpoints of a run: when it is saved, and where it goes on."""

import dataclasses
from pathlib import Path
from types import TracebackType
from typing import Any

import jaxslowmo as js

from .._errors import CommandError
from ..config._fields import flag_of
from ..config._train import TrainConfig

# A run may go on with other values of these; of all others its trajectory depends.
_FREE = frozenset(
    {
        "replicas", "devices_per_replica", "execution", "mode", "eval_every", "eval_batches",
        "log_every", "statistics", "statistics_rate", "checkpoint", "cluster",
    }
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a run has come, beside its state.

    Attributes:
      step: steps done.
      next_batch: index of the next batch; more than `step` after batches were left out.
      bytes_sent: per replica.
    """

    step: int = 0
    next_batch: int = 0
    bytes_sent: int = 0


class Keeper:
    """Context around a run that saves it in OUT/checkpoints.

    orbax is imported with the first checkpoint: a run without any needs none of it.

    Args:
      config: of the run.
      folder: of the run.
      step: the step that the states are of.
      params: one copy of the initial parameters.

    Attributes:
      last: the step of the newest checkpoint of this run; None without any.
    """

    def __init__(self, config: TrainConfig, folder: Path, step: js.TrainStep, params: Any) -> None:
        self._config, self._options = config, config.checkpoint
        self._folder, self._step, self._params = folder / "checkpoints", step, params
        self._checkpoints: Any = None
        self.last: int | None = None

    def __enter__(self) -> "Keeper":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._checkpoints is not None:
            self._checkpoints.close()

    def is_due(self, step: int) -> bool:
        """Whether the run is to be saved after this step."""
        every = self._options.checkpoint_every
        return bool(every) and (step % every == 0 or step == self._config.steps)

    def save(self, state: js.TrainState, progress: Progress, *, wait: bool = False) -> None:
        """Saves the run; in the background, unless `wait`."""
        if progress.step == self.last:
            return
        extra = {
            "config": dataclasses.asdict(self._config),
            "progress": dataclasses.asdict(progress),
        }
        self._open().save(progress.step, state, extra=extra, wait=wait)
        self.last = progress.step

    def newest(self) -> tuple[js.TrainState, Progress, tuple[str, ...]] | None:
        """The newest checkpoint: state, progress, and what is not as it was, in sentences.

        None where there is none.

        Raises:
          CommandError: a damaged checkpoint, or one of a run with another configuration.
        """
        from jaxslowmo.checkpoint import CheckpointError

        if self._checkpoints is not None:
            self._checkpoints.wait()  # for what is being written
        if not self._folder.exists() or not self._open().steps():
            return None
        try:
            found = self._open().restore(
                self._step, self._params, seed=self._config.seed, fallback=self._options.fallback
            )
        except CheckpointError as error:
            words = str(error).replace("`fallback=True`", "--fallback")
            raise CommandError(f"--resume: {words}") from error
        self._check_config(found.extra["config"])
        self.last = found.step
        return found.state, Progress(**found.extra["progress"]), found.notes

    def _check_config(self, saved: dict[str, Any]) -> None:
        now = dataclasses.asdict(self._config)
        differing = [
            f"{flag_of(key)} was {was}, is {value}"
            for was, value, key in _pairs(saved, now)
            if was != value
        ]
        if differing:
            raise CommandError(
                f"--resume: the run in {self._folder.parent} had other options: "
                f"{'; '.join(differing)}"
            )

    def _open(self) -> Any:
        if self._checkpoints is None:
            from jaxslowmo.checkpoint import Checkpoints

            self._checkpoints = Checkpoints(self._folder, keep=self._options.keep)
        return self._checkpoints


def _pairs(saved: dict[str, Any], now: dict[str, Any]) -> list[tuple[Any, Any, str]]:
    """(saved value, value now, name) of the options that must not change."""
    found = []
    for name, value in now.items():
        if name in _FREE:
            continue
        was = saved.get(name)
        if isinstance(value, dict) and isinstance(was, dict):
            found += [(was.get(key), item, key) for key, item in value.items()]
        else:
            found.append((was, value, name))
    return found
