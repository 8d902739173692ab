"""Checkpoints of a run in a folder."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp

from .._support.checks import as_int, warn_user
from .._support.files import MAX_STEP, complete_steps, io_errno
from .._support.types import PyTree
from ..train import TrainState, TrainStep
from ._arrays import first_line, prints_of
from ._folder import (
    CheckpointError,
    UnansweredError,
    UnreadableError,
    quiet_orbax,
    remove,
    remove_unfinished,
    resolved,
    set_aside,
)
from ._record import as_stored, checked_json, read_record, record_of
from ._restore import FormThen, Found, Reading, Template, finished, read
from ._writing import FolderWrite, gather, of_first_process


@dataclass(frozen=True)
class Restored:
    """What a checkpoint gave back.

    Attributes:
      step: of the checkpoint.
      state: to go on with.
      extra: what was saved beside it.
      is_exact: every value is as it was saved, so the run goes on as if nothing had happened.
      notes: what was averaged, kept, made new and moved to other stages, in sentences; () where
        nothing was.
    """

    step: int
    state: TrainState
    extra: dict[str, Any]
    is_exact: bool
    notes: tuple[str, ...]


class Checkpoints:
    """The checkpoints of one run: a folder on a file system that all processes share.

        with Checkpoints("runs/one", keep=3) as checkpoints:
            checkpoints.save(100, state, extra={"position": 100})

    A checkpoint becomes visible when all of it is written: one that was interrupted is never
    restored. All processes of a run call the same methods in the same order. Where one of them
    cannot write or read, all get the same error, with its reason, and may go on.

    Args:
      folder: path, or an address that orbax can write to (`gs://`); made at the first save.
      keep: so many of the newest are kept, older ones are deleted.
      asynchronous: `save` returns when the state is copied to the host, and files are written
        meanwhile.
      patience: seconds that a process waits for the others while nothing is being written; whoever
        has waited in vain gets an error. It is no limit for exchanges between devices.

    Raises:
      ValueError: keep < 1, patience <= 0.
    """

    def __init__(
        self,
        folder: str | PathLike[str],
        keep: int = 3,
        asynchronous: bool = True,
        patience: float = 600,
    ) -> None:
        number = as_int(keep, 1)
        if number is None:
            raise ValueError(f"Checkpoints: `keep` must be an int >= 1, got {keep!r}.")
        if not patience > 0:
            raise ValueError(f"Checkpoints: `patience` must be > 0 seconds, got {patience!r}.")
        quiet_orbax()
        self._folder = resolved(folder)
        self._keep, self._asynchronous, self._patience = number, asynchronous, patience
        self._writing: tuple[int, FolderWrite] | None = None
        self._unreadable: set[int] = set()

    def __enter__(self) -> "Checkpoints":
        """Itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Wait for what is being written, and close."""
        self.close()

    @property
    def folder(self) -> str:
        """Where the checkpoints are."""
        return str(self._folder)

    def save(
        self,
        step: int,
        state: TrainState,
        extra: Mapping[str, Any] | None = None,
        wait: bool = False,
    ) -> None:
        """Save everything that a run is; a checkpoint of the same step is replaced.

        The state may be donated as soon as this returns. Waits for the save before; where that has
        failed, raises its error and saves nothing. Checkpoints of later steps, of a run that was
        taken back to an earlier one, are set aside: renamed, so that they are neither restored nor
        deleted. So are those that `restore` could not read.

        Args:
          step: updates so far.
          state: the whole state.
          extra: plain JSON to save with it: data position, configuration. Process 0's is kept.
          wait: return when the checkpoint is complete.

        Raises:
          ValueError: step < 0 or >= 2**31, no `TrainState`, `extra` that is no JSON.
          CheckpointError: it cannot be written, or the save before could not; on all processes.

        Communication: one all-reduce of 8 bytes per array, over all devices, for fingerprints;
          with several processes three messages of each through the coordinator.
        """
        number = as_int(step, 0)
        if number is None:
            raise ValueError(f"Checkpoints.save: `step` must be an int >= 0, got {step!r}.")
        if number > MAX_STEP:
            raise ValueError(f"Checkpoints.save: `step` must be < 2**31, got {number}.")
        if not isinstance(state, TrainState):
            raise ValueError(
                "Checkpoints.save: `state` must be of a step of `js.make_train_step`, got "
                f"{type(state).__name__}; orbax saves other trees."
            )
        step = number
        record = record_of(step, state, checked_json("Checkpoints.save", extra))
        self.wait()
        stored = _own_copies(as_stored(state))
        record = replace(record, prints=prints_of(stored))
        keys = [leaf.key for leaf in record.leaves]
        try:
            writing = FolderWrite(
                self._folder / str(step),
                # What holds nothing has no file: its shape stands in the record.
                {key: x for key, x in zip(keys, stored, strict=True) if x.size},
                record.to_json(),
                seconds=self._patience,
                before=lambda: self._make_way(step),
                after=self._remove_old,
            )
        except Exception as error:
            raise self._not_written(step, error) from error
        self._unreadable.clear()
        self._writing = step, writing
        if wait or not self._asynchronous:
            self.wait()

    def steps(self) -> tuple[int, ...]:
        """Steps of the complete checkpoints, ascending.

        Raises:
          CheckpointError: the folder is a file.
        """
        if self._folder.exists() and not self._folder.is_dir():
            raise CheckpointError(f"{self._folder} is a file: give the folder of a run.")
        return complete_steps(self._folder)

    @property
    def failure(self) -> CheckpointError | None:
        """Why the save in progress has failed, as far as is known; `wait` raises it."""
        if self._writing is None or not self._writing[1].is_done:
            return None
        step, writing = self._writing
        return None if writing.failure is None else self._not_written(step, writing.failure)

    def written(self) -> int:
        """Bytes of the save in progress that are in its folder; 0 where there is none."""
        writing = self._writing  # another thread may ask, just when it ends
        return 0 if writing is None else writing[1].written()

    def wait(self) -> None:
        """Wait until what was saved is complete.

        Raises:
          CheckpointError: it could not be written; once, and on all processes.
        """
        if self._writing is None:
            return
        step, writing = self._writing
        try:
            writing.result()
        except Exception as error:
            raise self._not_written(step, error) from error
        finally:
            self._writing = None

    def close(self) -> None:
        """Wait for what is being written.

        Raises:
          CheckpointError: what was saved could not be written.
        """
        self.wait()

    def restore(
        self,
        train_step: TrainStep,
        params: PyTree,
        *,
        model_state: PyTree | None = None,
        seed: int = 0,
        step: int | None = None,
        fallback: bool = False,
        saved_form: FormThen = None,
    ) -> Restored:
        """The state of a checkpoint, on the replicas of `train_step`.

        On the same number of replicas, wherever they are, it is the saved one bit for bit. On
        another number every replica starts from the consensus of the parameters (with push-sum
        weights, and with what was in flight), the anchor and the state of the outer optimizer are
        kept exactly, floats of the optimizers' states are averaged, counters go on, and PRNG keys
        are made anew; each process then reads the whole checkpoint into its memory.

        Parameters that a pipeline kept in other stages, or in none, are moved by their names in the
        model, and with them what the optimizer and the parameter transform keep for each. No value
        changes, and a note says so.

        Args:
          train_step: with the model, optimizer and transforms that the checkpoint was made with.
          params: one copy, as for `train_step.init`; values do not matter.
          model_state: one copy, as for `train_step.init`.
          seed: of new PRNG keys, where the number of replicas is another; the step is folded in.
          step: which one; None is the newest.
          fallback: where the newest cannot be read, warn and take the one before.
          saved_form: where parameters had other names in the model when it was saved: how they
            were, and what makes those of now of it; or a function that gives it, or None, of what
            was saved beside the state, where checkpoints differ.

        Returns:
          A `Restored`.

        Raises:
          CheckpointError: no such checkpoint; damaged files; another library's, or a newer format;
            one of another model, optimizer or algorithm; with `saved_form` or from other stages, a
            state that depends on the parameters and does not tell of which.
          UserWarning: for each checkpoint that cannot be read, with `fallback`.

        Communication: on as many replicas one all-reduce of 8 bytes per array, over all devices, to
          compare fingerprints; with several processes some messages through the coordinator.
        """
        self.wait()
        found = of_first_process(self.steps(), self._patience)
        chosen = self._chosen(found, step, fallback)
        template = Template(train_step, params, model_state, seed)
        for i, candidate in enumerate(chosen):
            try:
                return Restored(candidate, *self._read(candidate, template, saved_form))
            except UnreadableError as error:
                if i + 1 == len(chosen):
                    raise _with_hint(error, candidate, found, fallback) from error
                self._unreadable.add(candidate)
                warn_user(f"{error} Using the checkpoint of step {chosen[i + 1]} instead.")
        raise AssertionError("there is a candidate, and the last one returns or raises")

    def extra(self, *, step: int | None = None, fallback: bool = False) -> dict[str, Any]:
        """What was saved beside the state of a checkpoint, without reading that.

        Args:
          step: which one; None is the newest.
          fallback: where that cannot be read, take the one before; `restore` warns of it.

        Returns:
          The `extra` of `save`.

        Raises:
          CheckpointError: as `restore`, of the record alone.

        Communication: none; each process reads for itself.
        """
        found = list(self.steps())
        chosen = self._chosen(found, step, fallback)
        for candidate in chosen[:-1]:
            with contextlib.suppress(UnreadableError):
                return read_record(self._folder / str(candidate)).extra
        try:
            return read_record(self._folder / str(chosen[-1])).extra
        except UnreadableError as error:
            raise _with_hint(error, chosen[-1], found, fallback) from error

    def _read(self, step: int, template: Template, form: FormThen) -> Found:
        """The state of a checkpoint; where that fails on one process, it fails on all."""
        path = self._folder / str(step)
        found: Reading | None = None
        error: Exception | None = None
        try:
            found = read(path, template, form)
        except Exception as own:  # the others must hear of it, whatever it is
            error = own
        is_unreadable = isinstance(error, UnreadableError)
        own = None if error is None else [is_unreadable, io_errno(error)]
        failures = [f for f in gather(own, self._patience) if f is not None]
        all_unreadable = all(one for one, _ in failures)
        if error is not None and (all_unreadable or not is_unreadable):
            raise error
        if failures or found is None:
            kind = UnreadableError if all_unreadable else CheckpointError
            number = next((n for _, n in failures if n is not None), None)
            raise kind(f"{path} could not be read on another process.", number) from error
        return finished(found)

    def _chosen(self, found: list[int], step: int | None, fallback: bool) -> list[int]:
        """Which checkpoints to try, in order."""
        if not found:
            raise CheckpointError(
                f"{self.folder} has no complete checkpoint: give the folder of a run that saved "
                "one, or start anew."
            )
        if step is None:
            return found[::-1] if fallback else found[-1:]
        number = as_int(step)
        if number is None or number not in found:
            raise CheckpointError(
                f"{self.folder} has no checkpoint of step {step}: it has those of steps "
                f"{', '.join(map(str, found))}."
            )
        return found[found.index(number) :: -1] if fallback else [number]

    def _make_way(self, step: int) -> None:
        """On process 0, before a save."""
        self._folder.mkdir(parents=True, exist_ok=True)
        remove_unfinished(self._folder)
        # Else they would count among the newest, and a resumed run would take them.
        later = {s for s in self.steps() if s > step}
        set_aside(self._folder, later | self._unreadable)

    def _remove_old(self) -> None:
        """On process 0, after a save."""
        for step in self.steps()[: -self._keep]:
            remove(self._folder / str(step))

    def _not_written(self, step: int, error: Exception) -> CheckpointError:
        said = str(error) if isinstance(error, CheckpointError) else ""
        said = said or f"{type(error).__name__}: {first_line(error)}"
        kind = UnansweredError if isinstance(error, UnansweredError) else CheckpointError
        return kind(
            f"{self.folder}: the checkpoint of step {step} could not be written ({said}); "
            "those before it are as they were. Is there space, and may this user write there?",
            io_errno(error),
            f"the checkpoint of step {step} could not be written: {said}",
        )


def _with_hint(
    error: UnreadableError, step: int, found: list[int], fallback: bool
) -> UnreadableError:
    """The error of the last checkpoint that was tried, and which other one could be."""
    older = max((n for n in found if n < step and not fallback), default=None)
    hint = "" if older is None else f" `fallback=True` takes that of step {older}."
    return UnreadableError(f"{error}{hint}", io_errno(error), str(error), older)


_copy = jax.jit(lambda arrays: [jnp.copy(x) for x in arrays])


def _own_copies(arrays: list[jax.Array]) -> list[jax.Array]:
    """Arrays that nobody donates: on CPU the host's view of an array is the array itself."""
    if next(iter(arrays[0].devices())).platform != "cpu":
        return arrays
    return _copy(arrays)
