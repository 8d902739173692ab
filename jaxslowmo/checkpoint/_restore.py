"""Restoring a stored state on the replicas of a training step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from .._support.types import PyTree
from ..train import ExchangingStep, ReplicaState, TrainState, TrainStep
from ..transform import holds_state
from ._arrays import fingerprints, place_array
from ._convert import convert_state, widen_dtype
from ._folder import CheckpointError, epath
from ._record import Record, make_record, read_record


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


@dataclass(frozen=True)
class Template:
    """The types and layouts of a fresh state of a training step.

    Attributes:
      train_step: the training step.
      seed: seed of PRNG keys that are made anew.
      structs: shapes, dtypes and shardings of the state.
      record: the record of the state.
      names: maps a parameter to the name that it may have in a checkpoint.
    """

    train_step: TrainStep | ExchangingStep
    seed: int
    structs: TrainState | ReplicaState
    record: Record
    names: Mapping[str, str]

    @classmethod
    def from_step(
        cls,
        train_step: TrainStep | ExchangingStep,
        params: PyTree,
        seed: int,
        names: Any,
        **others: PyTree,
    ) -> "Template":
        """Return the template of a step, whose arguments are those of `train_step.init`."""
        if isinstance(train_step, ExchangingStep):
            fresh, tables = train_step.init(params), None
        else:
            fresh, tables = train_step.init(params, seed=seed, **others), train_step.embeddings
        structs: Any = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), fresh
        )
        record = make_record(fresh, tables)
        for array in jax.tree.leaves(fresh):  # free memory, which the restored state needs
            array.delete()
        return cls(train_step, seed, structs, record, names or {})

    def state(self, stored: list[jax.Array]) -> Any:
        """Return the state from its leaves as they are stored."""
        leaves = zip(stored, self.record.leaves, strict=True)
        return jax.tree.structure(self.structs).unflatten(
            jax.random.wrap_key_data(x, impl=leaf.key_impl) if leaf.key_impl else x
            for x, leaf in leaves
        )


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
            f"{path} has tables of other numbers of rows, {record.table_rows}, than this run, "
            f"{now.table_rows}. Restore it with those tables; `step.embeddings.read` and `write` "
            "carry rows to others."
        )
    if record.made_by != now.made_by:
        raise CheckpointError(
            f"{path} is of a step of {record.made_by}, and `train_step` is one of {now.made_by}: "
            "restore it with a step of the former; the parameters go over by `step.consensus`."
        )
    exchange = structs.exchange._replace(local=(), shared=())
    is_hidden = holds_state(structs._replace(exchange=exchange), "parameters", needs_owner=True)
    if is_hidden and (record.replicas, record.parts) != (now.replicas, now.parts):
        raise CheckpointError(
            f"{path} is from {record.replicas} replicas, this run has {now.replicas} replicas or "
            "other layouts inside them, and `optimizer` or `gradients` of the training step hold a "
            "parameter transform: to move its state, pass it as `sync` of js.make_train_step, in "
            "both runs."
        )
    if _has_same_leaves(record, now):
        arrays = record.read(path, shardings)

        def finish() -> Restored:
            record.check_fingerprints(path, fingerprints(arrays))
            return Restored(record.step, template.state(arrays), record.extra, True, ())

        return finish
    saved, is_exact, notes = convert_state(
        path, record, now, structs, template.train_step, template.seed, template.names
    )
    state = template.state([place_array(x, to) for x, to in zip(saved, shardings, strict=True)])
    return lambda: Restored(record.step, state, record.extra, is_exact, tuple(notes))


def _has_same_leaves(saved: Record, now: Record) -> bool:
    """Return whether the arrays are those of a state of this run, however they lie on devices."""
    if len(saved.leaves) != len(now.leaves) or saved.layout != now.layout:
        return False
    leaves = zip(saved.leaves, now.leaves, strict=True)
    return saved.empty == now.empty and all(widen_dtype(x, y)[1:] == y[1:] for x, y in leaves)
