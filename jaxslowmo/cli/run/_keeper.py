"""The checkpoints of a run: when it is saved, and from where it resumes."""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import jaxslowmo as js

from .._errors import CommandError, code_of
from ..config._training import TrainConfig
from ..processes._peers import Cluster
from ..processes._watch import lost_a_peer
from ._agreement import refuse_to_resume
from ._recorder import Best
from ._run_folder import RunFolder


@dataclasses.dataclass(frozen=True)
class Progress:
    """The progress of a run, which a checkpoint holds next to the training state.

    Attributes:
      step: number of steps done.
      next_batch: index of the next batch; larger than `step` if a rollback skipped batches.
      bytes_sent: bytes that each replica has sent.
      best: best evaluation.
    """

    step: int = 0
    next_batch: int = 0
    bytes_sent: int = 0
    best: Best = dataclasses.field(default_factory=Best)

    @classmethod
    def of(cls, extra: dict[str, Any]) -> "Progress":
        """Return the progress in the extra data of a checkpoint."""
        return cls(**extra["progress"], best=Best(**extra["best"]))

    def extra(self) -> dict[str, Any]:
        """Return the progress as JSON values."""
        progress = dataclasses.asdict(self)
        best = progress.pop("best")
        return {"progress": progress, "best": best}


class Keeper:
    """A context that saves a run in OUT/checkpoints.

    A failed save is a warning, and the next one is tried. Several failures in a row end the run,
    and so does a failure of the last save. orbax is imported with the first checkpoint: a run
    without checkpoints does not need it.

    Args:
      config: configuration of the run.
      folder: folder of the run.
      step: training step whose states are saved.
      params: one copy of the initial parameters.
      cluster: the processes that run it.
      corpus: fingerprint of the corpus.
      saved_form: returns the form of the parameters in a checkpoint, from its extra data.

    Attributes:
      last: step of the newest complete checkpoint of this run; None without one.
    """

    def __init__(
        self,
        config: TrainConfig,
        folder: RunFolder,
        step: js.train.TrainStep,
        params: Any,
        *,
        cluster: Cluster,
        corpus: str,
        saved_form: Callable[[dict[str, Any]], Any],
    ) -> None:
        self._config, self._options, self._corpus = config, config, corpus
        self._folder, self._step, self._params = folder, step, params
        self._cluster, self._saved_form = cluster, saved_form
        self._checkpoints: Any = None
        self._begun: int | None = None
        self._has_warned = False
        self._failures = 0
        self.last: int | None = None

    def __enter__(self) -> "Keeper":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        # After an error in one process the others may never finish a save.
        if error is not None and self._cluster.count > 1:
            return
        try:
            self._settle(is_last=True)
        except CommandError as failed:
            if error is None:
                raise
            # The earlier error is raised; this one is only printed.
            print(f"warning: {failed}", file=sys.stderr, flush=True)

    def is_due(self, step: int, *, is_last: bool) -> bool:
        """Return whether a checkpoint is due after this step."""
        every = self._options.checkpoint_every
        return bool(every) and (step % every == 0 or is_last)

    def save(self, state: js.TrainState, progress: Progress, *, wait: bool = False) -> None:
        """Save the run, in the background unless `wait`.

        Raises:
          CommandError: too many saves in a row have failed; with `wait`, this one has.
        """
        if progress.step not in (self.last, self._begun):
            self._settle()  # raises or warns if the previous save failed
            extra = {
                "config": dataclasses.asdict(self._config),
                "corpus": self._corpus,
                **progress.extra(),
            }
            try:
                self._open().save(progress.step, state, extra=extra)
                self._begun = progress.step
            except Exception as error:
                self._failed(error, is_last=wait)
        if wait:
            self._settle(is_last=True)

    def look(self) -> None:
        """Warn now, and not at the next save, if the save in progress has failed."""
        if self._begun is None or self._has_warned or self._checkpoints.failure is None:
            return
        is_end = self._failures + 1 >= self._options.max_failed_saves
        if not is_end and self._begun != self._config.steps:
            self._has_warned = True
            self._warn(self._checkpoints.failure)

    def _settle(self, *, is_last: bool = False) -> None:
        """Wait for the save in progress.

        Raises:
          CommandError: it has failed, and it was the last save or too many failed before it.
        """
        if self._begun is None:
            return
        begun, self._begun = self._begun, None
        try:
            self._checkpoints.wait()
            self.last, self._failures = begun, 0
        except Exception as error:
            self._failed(error, is_last=is_last)
        finally:
            self._has_warned = False

    def _failed(self, error: Exception, *, is_last: bool) -> None:
        from jaxslowmo.checkpoint import CheckpointError, UnansweredError

        # If a file server does not answer, other processes may see another result of the save.
        is_alike = isinstance(error, CheckpointError) and not isinstance(error, UnansweredError)
        if not is_alike or lost_a_peer(error):
            raise error
        self._failures += 1
        if is_last or self._failures >= self._options.max_failed_saves:
            rows = f"; {self._failures} saves in a row have failed" if self._failures > 1 else ""
            raise CommandError(f"{self._describe(error)}{rows}", code_of(error)) from error
        if not self._has_warned:
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        if self._cluster.is_first:
            line = f"warning: {self._describe(error)}; training goes on, and the next save is tried"
            print(line, file=sys.stderr, flush=True)

    def _describe(self, error: Any) -> str:
        return f"{error.reason}; {self._folder.last_saved()}"

    def newest(self) -> tuple[js.TrainState, Progress, tuple[str, ...]] | None:
        """Return state and progress of the newest checkpoint, and notes on what has changed.

        Return None without a checkpoint.

        Raises:
          CommandError: the checkpoint is damaged, or does not fit.
        """
        from jaxslowmo.checkpoint import CheckpointError

        self._settle()
        if not self._folder.checkpoints.exists() or not self._open().steps():
            return None
        try:
            restored = self._open().restore(
                self._step,
                self._params,
                seed=self._config.seed,
                fallback=self._options.fallback,
                saved_form=self._saved_form,
            )
        except CheckpointError as error:
            refuse_to_resume(error)
        self.last = restored.step
        return restored.state, Progress.of(restored.extra), restored.notes

    def _open(self) -> Any:
        if self._checkpoints is None:
            from jaxslowmo.checkpoint import Checkpoints

            path = self._folder.checkpoints
            self._checkpoints = Checkpoints(path, keep=self._options.keep)
            if self._cluster.watch is not None:
                self._cluster.watch.follow(self._checkpoints.written)
        return self._checkpoints
