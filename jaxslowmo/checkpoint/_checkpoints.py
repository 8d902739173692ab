"""`Checkpoints`: the states of a run, saved in a folder and restored on any number of replicas."""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp

from .._support.checks import checked_int, checks_flags, warn_user
from .._support.files import MAX_STEP, complete_steps, io_errno
from .._support.types import PyTree
from ..embedding import Embeddings
from ..train import ExchangingStep, ReplicaState, TrainState, TrainStep, update_count
from ..transform import holds_state
from ._convert import Template, convert_state, widen_dtype
from ._record import (
    CheckpointError,
    Record,
    UnreadableError,
    checked_json,
    epath,
    fingerprints,
    make_record,
    place_array,
    quiet_orbax,
    read_record,
    storable_leaves,
)
from ._writing import (
    FolderWrite,
    Notes,
    remove,
    remove_partial_writes,
    rename_unique,
    resolve_path,
)


@dataclass(frozen=True)
class Restored:
    """The result of `Checkpoints.restore`.

    Attributes:
      step: step of the checkpoint.
      state: the state from which to continue: a `TrainState`, or what a step of `js.with_exchange`
        takes.
      extra: the `extra` that was saved with it.
      is_exact: whether every value is as it was saved, so that the run continues as if it had not
        been interrupted.
      notes: sentences that say what was averaged, kept, made anew, dropped, or moved to other
        stages; () if nothing was.
    """

    step: int
    state: Any
    extra: dict[str, Any]
    is_exact: bool
    notes: tuple[str, ...]


def read_checkpoint(path: epath.Path, template: Template) -> Callable[[], Restored]:
    """Read the part of a checkpoint that this process needs.

    Args:
      path: path of the checkpoint.
      template: template of the state to restore.

    Returns:
      A function that returns the result once all processes have read. If values are not those that
      were saved, it raises `UnreadableError` on all of them.

    Raises:
      CheckpointError: see `Checkpoints.restore`.

    Communication: none. The function has that of `fingerprints` if nothing is converted.
    """
    record, now, structs = read_record(path), template.record, template.structs
    shardings = [x.sharding for x in jax.tree.leaves(structs)]
    if record.table_rows not in (None, now.table_rows):
        raise CheckpointError(
            f"{path} has tables of {record.table_rows} rows, and this run of {now.table_rows}. "
            "Restore it with those tables; `step.embeddings.read` and `write` carry rows to others."
        )
    if record.made_by != now.made_by:
        raise CheckpointError(
            f"{path} is of a step of {record.made_by}, and `train_step` is one of {now.made_by}: "
            "restore it with a step of the former."
        )
    exchange = structs.exchange._replace(local=(), shared=())
    is_hidden = holds_state(structs._replace(exchange=exchange), "parameters", needs_owner=True)
    if is_hidden and (record.replicas, record.parts) != (now.replicas, now.parts):
        raise CheckpointError(
            f"{path} is from {record.replicas} replicas, or other layouts inside them, than the "
            f"{now.replicas} replicas of this run: pass the parameter transform in `optimizer` or "
            "`gradients` as `sync` in both."
        )
    if _has_same_leaves(record, now):
        arrays = record.read(path, shardings)

        def finish() -> Restored:
            record.check_fingerprints(path, fingerprints(arrays))
            return Restored(record.step, template.state(arrays), record.extra, True, ())

        return finish
    saved, is_exact, notes = convert_state(path, record, template)
    state = template.state([place_array(x, to) for x, to in zip(saved, shardings, strict=True)])
    return lambda: Restored(record.step, state, record.extra, is_exact, tuple(notes))


def _has_same_leaves(saved: Record, now: Record) -> bool:
    """Return whether the arrays are those of a state of this run, however they lie on devices."""
    if len(saved.leaves) != len(now.leaves) or saved.layout != now.layout:
        return False
    leaves = zip(saved.leaves, now.leaves, strict=True)
    return saved.empty == now.empty and all(widen_dtype(x, y)[1:] == y[1:] for x, y in leaves)


class Checkpoints:
    """The checkpoints of one run, in a folder on a file system that all processes share.

        with Checkpoints("runs/one", keep=3) as checkpoints:
            checkpoints.save(100, state, extra={"position": 100})

    A checkpoint becomes visible when it is complete: a partial one is never restored. All processes
    of a run must call the same methods in the same order. If one of them cannot write or read, all
    raise the same error, with its reason, and can continue.

    Args:
      folder: path, or an address that orbax can write to (`gs://`); created by the first save.
      keep: number of the newest checkpoints that are kept; older ones are deleted. The default is
        3.
      asynchronous: whether `save` returns when the state is copied to the host, while files are
        written in the background. The default is True.
      patience: seconds that a process waits for the others while nothing is being written, before
        it raises an error; the default is 600. It does not limit exchanges between devices.
      keep_best: name of a metric and "min" or "max": the checkpoint with the least or the greatest
        value of all that were saved is kept, too. None: only the newest are.

    Raises:
      ValueError: keep < 1, patience <= 0, a `keep_best` of another form.
    """

    @checks_flags("Checkpoints")
    def __init__(
        self,
        folder: str | PathLike[str],
        keep: int = 3,
        asynchronous: bool = True,
        patience: float = 600,
        keep_best: tuple[str, str] | None = None,
    ) -> None:
        self._keep = checked_int("Checkpoints: `keep`", keep, 1)
        if keep_best is not None and (len(keep_best) != 2 or keep_best[1] not in ("min", "max")):
            raise ValueError(
                'Checkpoints: `keep_best` must be a metric and "min" or "max", such as '
                f'("loss", "min"), got {keep_best!r}.'
            )
        if not patience > 0:
            raise ValueError(f"Checkpoints: `patience` must be > 0 seconds, got {patience!r}.")
        quiet_orbax()
        self._folder = resolve_path(folder)
        self._keep_best, self._asynchronous, self._notes = keep_best, asynchronous, Notes(patience)
        self._writing: FolderWrite | None = None
        self._unreadable: set[int] = set()

    def __enter__(self) -> "Checkpoints":
        """Return these checkpoints."""
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for a save in progress, and close."""
        self.close()

    @property
    def folder(self) -> str:
        """The folder of the checkpoints, as an absolute path or an address."""
        return str(self._folder)

    def save(
        self,
        step: int,
        state: TrainState | ReplicaState,
        extra: Mapping[str, Any] | None = None,
        wait: bool = False,
        metrics: Mapping[str, Any] | None = None,
        embeddings: Embeddings | None = None,
    ) -> None:
        """Save the whole state of a run; a checkpoint of the same step is replaced.

        The state may be donated as soon as this returns. It waits for the previous save first; if
        that has failed, it raises its error and saves nothing. Two kinds of checkpoints are set
        aside, that is renamed, so that they are neither restored nor deleted: those of later steps,
        if the run was reset to an earlier one, and those that `restore` could not read.

        Args:
          step: number of updates so far, 0 <= step < 2**31: the state's own, or a warning says so.
          state: the whole state, of a step of `js.make_train_step` or `js.with_exchange`.
          extra: plain JSON to save with it, such as data position and configuration. Process 0's is
            saved.
          wait: whether to return only when the checkpoint is complete; the default is False.
          metrics: numbers by name, such as `{"loss": 0.3}`, to save with it: that of `keep_best`,
            and others. Process 0's are saved. A NaN is never the best.
          embeddings: the tables of the step, `step.embeddings`: a restore with other numbers of
            rows, which padded arrays need not show, is then refused.

        Raises:
          ValueError: step < 0 or >= 2**31, no state of a step, `extra` that is no JSON, `metrics`
            without that of `keep_best`, or that are no numbers.
          CheckpointError: it cannot be written, or the previous save could not; on all processes.
          UserWarning: the state counts another number of updates than `step`.

        Communication: one all-reduce of 8 bytes per array, over all devices, for fingerprints;
          with several processes five messages of each through the coordinator, or more.
        """
        step = checked_int("Checkpoints.save: `step`", step, 0)
        if step > MAX_STEP:
            raise ValueError(f"Checkpoints.save: `step` must be < 2**31, got {step}.")
        if not isinstance(state, TrainState | ReplicaState):
            raise ValueError(
                "Checkpoints.save: `state` must be of a step of `js.make_train_step` or "
                f"`js.with_exchange`, got {type(state).__name__}."
            )
        if step != (done := update_count(state)):
            warn_user(
                f"Checkpoints.save: `step` is {step} and the state counts {done} updates: pass "
                "`result.step` of js.train_loop, which is the state's own."
            )
        extra, metrics = checked_json("Checkpoints.save", extra), self._check_metrics(metrics)
        self.wait()
        stored = _safe_copies(storable_leaves(state))
        about = {"prints": fingerprints(stored), "extra": extra, "metrics": metrics}
        record = make_record(state, embeddings, step=step, **about)
        self._writing = FolderWrite(
            self._folder / str(step),
            # Arrays of size 0 are not written: the record has their shapes.
            {leaf.key: x for leaf, x in zip(record.leaves, stored, strict=True) if x.size},
            record.to_json(),
            self._notes,
            on_start=lambda: self._prepare_folder(step),
            on_complete=self._remove_old,
        )
        self._unreadable.clear()
        if wait or not self._asynchronous:
            self.wait()

    def steps(self) -> tuple[int, ...]:
        """Return the steps of the complete checkpoints in ascending order."""
        return complete_steps(self._folder)

    def best_step(self) -> int | None:
        """Return the step of the best checkpoint by the metric of `keep_best`; None without one.

        It is stored in the checkpoints, so it is known after a restart. Of equal ones it is the
        newest. Those whose record cannot be read do not count.

        Raises:
          ValueError: `keep_best` was not given.

        Communication: none; each process reads the records of the checkpoints.
        """
        if self._keep_best is None:
            raise ValueError("Checkpoints.best_step: needs `keep_best`, got None.")
        name, mode = self._keep_best
        values = []
        for step in self.steps():
            with contextlib.suppress(UnreadableError):
                metrics = read_record(self._folder / str(step)).metrics or {}
                value = metrics.get(name, math.nan)
                if not math.isnan(value):
                    values.append((-value if mode == "min" else value, step))
        return max(values)[1] if values else None

    @property
    def failure(self) -> CheckpointError | None:
        """The error of the last save if it has failed, which `wait` will raise; None otherwise."""
        return None if self._writing is None else self._writing.failure

    def written(self) -> int:
        """Return how many bytes of the save in progress are in its folder; 0 without a save."""
        writing = self._writing  # read once: another thread may call this just when the save ends
        return 0 if writing is None else writing.bytes_written()

    def wait(self) -> None:
        """Wait until the last save is complete.

        Raises:
          CheckpointError: it could not be written; raised once, and on all processes.
        """
        try:
            if self._writing is not None:
                self._writing.result()
        finally:
            self._writing = None

    def close(self) -> None:
        """Wait for a save in progress.

        Raises:
          CheckpointError: the checkpoint could not be written.
        """
        self.wait()

    def restore(
        self,
        train_step: TrainStep | ExchangingStep,
        params: PyTree,
        *,
        model_state: PyTree | None = None,
        seed: int = 0,
        step: int | None = None,
        fallback: bool = False,
        names: Mapping[str, str] | None = None,
    ) -> Restored:
        """Restore the state of a checkpoint on the replicas of `train_step`.

        On the same number of replicas, on any devices, it is the saved state bit for bit. On
        another number, every replica starts from the consensus of the parameters (with push-sum
        weights, and with messages in flight), the anchor and the state of the outer optimizer are
        kept exactly, floats of the optimizers' states are averaged, counters continue, and PRNG
        keys are made anew; each process then reads the whole checkpoint into its memory.

        With another `sync`, such as one of another codec, delay, base or number of fragments, what
        both remember goes on, by its name; the rest begins anew or is dropped, and notes say so.

        If a pipeline had the parameters in other stages, or in none, they are moved by their names
        in the model, together with the values that the optimizer and the parameter transform keep
        for each. No value changes, and a note describes the move.

        Args:
          train_step: a step with the model, optimizer and `gradients` of the checkpoint.
          params: one copy of the parameters, or of the library's state, as for `train_step.init`;
            values do not matter.
          model_state: one copy of the model state, as for `init` of a training step.
          seed: seed of new PRNG keys if the number of replicas differs; the step is folded in. The
            default is 0.
          step: step of the checkpoint; the default is the newest.
          fallback: whether to warn, and restore the checkpoint before, if one cannot be read. The
            default is False.
          names: maps parameters to the names that they had in the saved model, such as
            `{"head/kernel": "output/kernel"}`, used where the checkpoint has no leaf of their name.

        Returns:
          A `Restored`.

        Raises:
          CheckpointError: no such checkpoint; damaged files; another library's, or a newer format;
            a checkpoint of another model, optimizer or gradient transform; from other stages, a
            state that depends on parameters and does not show on which.
          UserWarning: for each checkpoint that cannot be read, with `fallback`.

        Communication: on the same number of replicas one all-reduce of 8 bytes per array, over all
          devices, to compare fingerprints; with several processes some messages through the
          coordinator.
        """
        self.wait()
        steps = self._notes.gather(self.steps())[0]
        step = self._resolve_step(steps, step)
        if not isinstance(train_step, TrainStep | ExchangingStep):
            raise ValueError(
                "Checkpoints.restore: `train_step` must be made by `js.make_train_step` or "
                f"`js.with_exchange`, got {type(train_step).__name__}."
            )
        if model_state is not None and isinstance(train_step, ExchangingStep):
            raise ValueError(
                "Checkpoints.restore: `model_state` must be None for a step of `js.with_exchange`, "
                f"got {type(model_state).__name__}."
            )
        template = Template.from_step(train_step, params, seed, names, model_state=model_state)
        while True:
            try:
                return self._read(step, template)
            except UnreadableError as error:
                older = _older_step(error, step, steps, fallback)
                self._unreadable.add(step)
                warn_user(f"{error} Using the checkpoint of step {older} instead.")
                step = older

    def extra(self, *, step: int | None = None, fallback: bool = False) -> dict[str, Any]:
        """Return the `extra` of a checkpoint, without reading the state.

        Args:
          step: step of the checkpoint; the default is the newest.
          fallback: whether to read the checkpoint before if one cannot be read; the default is
            False. `restore` also warns.

        Returns:
          The `extra` of `save`.

        Raises:
          CheckpointError: no such checkpoint, or its record cannot be read.

        Communication: none; each process reads independently.
        """
        steps = self.steps()
        step = self._resolve_step(steps, step)
        while True:
            try:
                return read_record(self._folder / str(step)).extra
            except UnreadableError as error:
                step = _older_step(error, step, steps, fallback)

    def _read(self, step: int, template: Template) -> Restored:
        """Read the state of a checkpoint; a failure on one process is raised on all."""
        finish, error, note = None, None, None
        try:
            finish = read_checkpoint(self._folder / str(step), template)
        except Exception as caught:  # any kind: the other processes must learn of it
            error = caught
            note = [isinstance(caught, UnreadableError), str(caught)[:2000], io_errno(caught)]
        failures = [failure for failure in self._notes.gather(note) if failure]
        if finish is not None and not failures:
            return finish()
        # An older checkpoint may be taken only if no process had another reason.
        is_unreadable, text, number = min(failures, key=lambda failure: failure[0])
        if error is not None and isinstance(error, UnreadableError) == is_unreadable:
            raise error
        raise (UnreadableError if is_unreadable else CheckpointError)(text, number) from error

    def _resolve_step(self, steps: Sequence[int], step: int | None) -> int:
        """Return `step`, of which there is a checkpoint; None: the newest."""
        step = None if step is None else checked_int("Checkpoints: `step`, if not None,", step, 0)
        if not steps:
            raise CheckpointError(f"{self.folder} has no complete checkpoint.")
        if step is not None and step not in steps:
            raise CheckpointError(
                f"{self.folder} has no checkpoint of step {step}: it has those of steps "
                f"{', '.join(map(str, steps))}."
            )
        return steps[-1] if step is None else step

    def _prepare_folder(self, step: int) -> None:
        """Prepare the folder for a save; process 0 calls it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        remove_partial_writes(self._folder)
        # Checkpoints of later steps would count as the newest, and a resumed run would use them.
        for other in self.steps():
            if other > step or other in self._unreadable:
                rename_unique(self._folder / str(other), "set-aside")

    def _remove_old(self) -> None:
        """Remove old checkpoints after a save; process 0 calls it."""
        best = None if self._keep_best is None else self.best_step()
        for step in self.steps()[: -self._keep]:
            if step != best:
                remove(self._folder / str(step))

    def _check_metrics(self, metrics: Mapping[str, Any] | None) -> dict[str, float]:
        numbers = {}
        for name, value in (metrics or {}).items():
            try:
                numbers[name] = float(value)
            except (TypeError, ValueError, OverflowError):
                raise ValueError(
                    f"Checkpoints.save: `metrics` must be numbers by name, got {name}: {value!r}."
                ) from None
        if self._keep_best is not None and self._keep_best[0] not in numbers:
            raise ValueError(
                f"Checkpoints.save: `metrics` must have {self._keep_best[0]!r}, that of "
                f"`keep_best`, got {metrics!r}."
            )
        return numbers


def _older_step(error: UnreadableError, step: int, steps: Sequence[int], fallback: bool) -> int:
    """Return the step of the checkpoint before one that cannot be read.

    Raises:
      UnreadableError: there is none; or, without `fallback`, with a hint at it.
    """
    older = max((n for n in steps if n < step), default=None)
    if fallback and older is not None:
        return older
    hint = "" if older is None else f" `fallback=True` takes that of step {older}."
    raise UnreadableError(f"{error}{hint}", io_errno(error), str(error), older) from error


_copy = jax.jit(lambda arrays: [jnp.copy(x) for x in arrays])


def _safe_copies(arrays: list[jax.Array]) -> list[jax.Array]:
    """Return arrays that the caller cannot donate: on CPU the host's view is the array itself."""
    if next(iter(arrays[0].devices())).platform != "cpu":
        return arrays
    return _copy(arrays)
