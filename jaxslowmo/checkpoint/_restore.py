"""Restoring a stored state on the replicas of a training step."""

import copy
import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .._support.types import PyTree
from ..mesh import model_axes
from ..train import TrainState, TrainStep
from ..transform import SavedForm, StatePlacement, holds_state, spec_of
from ..tree import in_model_form, leaf_names
from ._arrays import check_prints, host_print, placed, prints_of, read_arrays
from ._convert import (
    check_movable,
    check_recorded,
    converted,
    one_copy,
    recorded_form,
    resized,
    structs_then,
)
from ._folder import ARRAYS, CheckpointError, epath
from ._record import LeafRecord, Record, as_stored, has_equal_layout, read_record, record_of
from ._stages import moved_note, parts_of, read_part, restaged

_OPTIMIZER = "opt_state/1/"
NUM_LISTED = 5  # differences in a message
RestoredParts = tuple[TrainState, dict[str, Any], bool, tuple[str, ...]]
"""The fields of `Restored` without the step: state, extra, whether it is exact, notes."""


SavedFormLike = SavedForm | Callable[[dict[str, Any]], SavedForm | None] | None
"""Form of the parameters when they were saved, or a function that returns it from `extra`."""


class Template:
    """The types and layouts of a fresh state of a training step.

    Attributes:
      train_step: the training step.
      seed: seed of PRNG keys that are made anew.
      structs: shapes, dtypes and shardings of the state.
      stored: shapes, dtypes and shardings of its leaves as they are stored.
      record: record of the state.
      placement: placement of the state.
    """

    def __init__(
        self, train_step: TrainStep, params: PyTree, model_state: PyTree | None, seed: int
    ) -> None:
        self.train_step, self.seed = train_step, seed
        fresh = train_step.init(params, model_state=model_state, seed=seed)
        self.record = record_of(fresh)
        self.structs: TrainState = jax.tree.map(_struct, fresh)
        self.stored = [_struct(x) for x in as_stored(fresh)]
        self.placement = StatePlacement(
            self.record.replicas,
            dict(train_step.mesh.shape),
            model_axes(fresh.params, train_step.mesh, train_step.axis_name),
            specs=self.record.shard_specs(),
        )
        assert fresh.known_layout is not None, "`init` knows it"
        self._layout = fresh.known_layout._replace()  # a copy: no step has returned the state
        for array in jax.tree.leaves(fresh):  # free memory, which the restored state needs
            array.delete()

    def state(self, stored: list[jax.Array]) -> TrainState:
        """Return the state from its leaves as they are stored."""
        state: TrainState = jax.tree.structure(self.structs).unflatten(
            [
                jax.random.wrap_key_data(x, impl=leaf.key_impl) if leaf.key_impl else x
                for x, leaf in zip(stored, self.record.leaves, strict=True)
            ]
        )
        state.known_layout = self._layout
        return state

    def structs_on(self, old: StatePlacement) -> TrainState:
        """Return `structs` with the parameter transform's state as it is on another placement.

        Only names, and the shapes of shards, differ.
        """
        *rest, sync_state = self.structs.opt_state
        sync, params = self.train_step.sync, one_copy(self.structs.params)
        if sync is None:
            return self.structs
        return self.structs._replace(opt_state=(*rest, sync.like_on(sync_state, params, old)))

    def with_dtypes_of(self, saved: Record) -> "Template":
        """Return the template with the optimizer's dtypes after its first update, as saved.

        That update may widen its state: `optax.inject_hyperparams(hyperparam_dtype=...)` multiplies
        moments in half precision by float32 hyperparameters.
        """
        new = copy.copy(self)
        new.record = _widened_like(self.record, saved)
        wide = {
            i: jnp.dtype(now.dtype)
            for i, (before, now) in enumerate(
                zip(self.record.leaves, new.record.leaves, strict=True)
            )
            if now != before
        }

        def like(structs: list[jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
            return [x.update(dtype=wide[i]) if i in wide else x for i, x in enumerate(structs)]

        new.stored = like(self.stored)
        leaves, structure = jax.tree.flatten(self.structs)
        new.structs = structure.unflatten(like(leaves))
        return new


def _widened_like(record: Record, saved: Record) -> Record:
    """Return the record with the wider dtypes of the optimizer's leaves in `saved`."""
    dtypes = {x.name: jnp.dtype(x.dtype) for x in saved.leaves if x.name.startswith(_OPTIMIZER)}

    def widened(leaf: LeafRecord) -> LeafRecord:
        before = jnp.dtype(leaf.dtype)
        now = dtypes.get(leaf.name, before)
        floating = all(jnp.issubdtype(x, jnp.floating) for x in (before, now))
        is_wider = floating and now.itemsize > before.itemsize
        return leaf._replace(dtype=now.name) if is_wider else leaf

    return dataclasses.replace(record, leaves=[widened(x) for x in record.leaves])


def _struct(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


@dataclass(frozen=True)
class Reading:
    """A checkpoint in memory.

    Attributes:
      path: path of the checkpoint.
      record: record of the checkpoint.
      arrays: the stored arrays, placed on devices, or whole NumPy arrays.
      is_placed: whether the arrays are on devices, with the layout of the new run.
      template: template of the state to restore.
      old: placement of the arrays when they were saved.
      types: types of the saved state, in whose structure the arrays are the leaves.
      convert: function that converts that state, of NumPy arrays, to the current form of the
        parameters.
      notes: sentences that say what `convert` does.
    """

    path: epath.Path
    record: Record
    arrays: list[Any]
    is_placed: bool
    template: Template
    old: StatePlacement
    types: TrainState
    convert: Callable[[TrainState], TrainState] = lambda state: state
    notes: tuple[str, ...] = ()


def read(path: epath.Path, template: Template, saved_form: SavedFormLike = None) -> Reading:
    """Read the part of a checkpoint that this process needs.

    Args:
      path: path of the checkpoint.
      template: template of the state to restore.
      saved_form: form of the parameters when it was saved, or a function that returns it from
        `extra`; None if it is the current form or the record describes it.

    Raises:
      CheckpointError: see `Checkpoints.restore`.

    Communication: none.
    """
    record = read_record(path)
    form = saved_form(record.extra) if callable(saved_form) else saved_form
    moves = form is None and record.layout != template.record.layout
    if form is not None:
        check_recorded(form, record, path)
    if moves:
        form = recorded_form(record, one_copy(template.structs.params))
    template = template.with_dtypes_of(record)
    old, new = record.placement(template.placement, form), template.placement
    names = [x.name for x in record.leaves]
    sync, sync_state = template.train_step.sync, template.structs.opt_state[-1]
    # A state that was saved without devices has no layout except the shapes of its shards.
    is_equal = [x.shape for x in record.leaves] == [x.shape for x in template.record.leaves]
    if old.is_certain or form is not None:
        is_equal = has_equal_layout(path, record, sync_state, template.stored, sync, old, new)
    is_equal &= record.division in (None, template.record.division)
    if old.replicas == new.replicas and is_equal:
        _check_leaves(path, record, template.record)
        arrays = _read(path, record, template.stored)
        return Reading(path, record, arrays, True, template, old, template.structs)
    if holds_state(template.structs.opt_state[:2], "parameters", needs_owner=True):
        raise CheckpointError(
            f"{path} is from {_mesh_text(old)}, this run has {_mesh_text(new)}, and `optimizer` "
            "or `gradients` of the training step hold a parameter transform: to move its state, "
            "pass it as `sync` of js.make_train_step, in both runs."
        )
    prepare = _by_names if moves else _by_form
    reading = prepare(Reading(path, record, [], False, template, old, template.structs))
    arrays = _read(path, record, [leaf.struct() for leaf in record.leaves])
    check_prints(path, names, [host_print(x) for x in arrays], record.prints)
    if moves:
        parts = parts_of(record.layout, names)
        arrays = [read_part(part, arrays) for part in parts]
    return dataclasses.replace(reading, arrays=arrays)


def _by_form(reading: Reading) -> Reading:
    """Check leaves before arrays are read, and convert them by the caller's form, if any.

    Raises:
      CheckpointError: leaves of another model, optimizer or algorithm.
    """
    path, record, template, old = reading.path, reading.record, reading.template, reading.old
    # Check the parameters first: the conversion of types needs those of the right model.
    params = _params_record(template, old.form)
    _check_leaves(path, record.only("params"), params.only("params"))
    types, convert = template.structs_on(old), reading.convert
    if old.form is not None:
        types = structs_then(old.form, types, one_copy(template.structs.params))
        convert = functools.partial(converted, old.form, path=path)
    # Shapes of anchor and momentum depend on the mesh: they are checked when shards are joined.
    _check_leaves(path, record, record_of(types), skip=_names_of_sync(template.structs))
    return dataclasses.replace(reading, types=types, convert=convert)


def _by_names(reading: Reading) -> Reading:
    """Check leaves before arrays are read, and convert them by their names in the model's tree.

    Raises:
      CheckpointError: leaves of another model, optimizer or algorithm, or leaves that belong to no
        parameter.
    """
    path, record, template, old = reading.path, reading.record, reading.template, reading.old
    whole, structs = record.whole(), template.structs
    params = record_of(in_model_form(structs))
    _check_leaves(path, whole.only("params"), params.only("params"))
    staged = template.structs_on(old)
    types = in_model_form(staged)
    wanted = _widened_like(record_of(types), whole)
    # The parameter transform converts the leaves that its `like_on` replaces. State of an optax
    # transform outside the trees of stages is equal on all stages, because of `over_stages`.
    kept = {id(x) for x in jax.tree.leaves(structs)}
    optax_states = spec_of(template.train_step.tx).unknown(structs.opt_state)
    shared = {id(x) for x in jax.tree.leaves(optax_states)}
    free = {
        name
        for name, x in zip(leaf_names(staged), jax.tree.leaves(staged), strict=True)
        if id(x) not in kept or (name.startswith(_OPTIMIZER) and id(x) in shared)
    }
    check_movable(path, record, template.record, wanted, free)
    _check_leaves(path, whole, wanted, skip=_names_of_sync(structs))
    return dataclasses.replace(
        reading,
        types=types,
        convert=functools.partial(restaged, staged),
        notes=(moved_note(record.layout, template.record.layout),),
    )


def _read(path: epath.Path, record: Record, like: list[Any]) -> list[Any]:
    keys = [leaf.key for leaf in record.leaves]
    return read_arrays(path / ARRAYS, dict(zip(keys, like, strict=True)))


def finished(reading: Reading) -> RestoredParts:
    """Make the state on the replicas of the training step, once all processes have read.

    Raises:
      CheckpointError: other values than were saved, or sharded state that does not fit; on all
        processes.

    Communication: where arrays are placed, that of `prints_of`.
    """
    path, record, template = reading.path, reading.record, reading.template
    if reading.is_placed:
        names = [leaf.name for leaf in record.leaves]
        check_prints(path, names, prints_of(reading.arrays), record.prints)
        return template.state(reading.arrays), record.extra, True, ()
    old, new = reading.old, template.placement
    state = reading.convert(jax.tree.structure(reading.types).unflatten(reading.arrays))
    template = template.with_dtypes_of(record_of(state))
    try:
        new_state, notes = resized(
            state, template.structs, template.train_step.sync, record.step, template.seed, old, new
        )
    except ValueError as error:
        raise CheckpointError(
            f"{path} is from {_mesh_text(old)} and does not fit: {error}. Was it made with the "
            "same `sync`, `bucket_bytes` and `local_axis_name` included?"
        ) from error
    leaves = zip(jax.tree.leaves(new_state), template.stored, strict=True)
    arrays = [_on_devices(x, struct) for x, struct in leaves]
    is_exact = old.replicas == new.replicas
    return template.state(arrays), record.extra, is_exact, (*reading.notes, *notes)


def _on_devices(x: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
    if x.shape != like.shape or x.dtype != like.dtype:
        raise CheckpointError(
            f"a leaf became {x.dtype}{list(x.shape)} instead of {like.dtype}{list(like.shape)}: "
            "was the checkpoint made with the same transforms?"
        )
    return placed(x, like)


def _check_leaves(
    path: epath.Path, saved: Record, wanted: Record, skip: tuple[str, ...] = ()
) -> None:
    """Raise unless both have the same leaves; only names count if they begin with one of `skip`."""

    def texts(record: Record) -> dict[str, str]:
        return {
            leaf.name: "" if leaf.name.startswith(skip) else leaf.text() for leaf in record.leaves
        }

    before, now = texts(saved), texts(wanted)
    wrong = [
        f"{name} is {before.get(name, 'missing') or 'there'} in the checkpoint and "
        f"{now.get(name, 'missing') or 'there'} in this run"
        for name in dict.fromkeys([*now, *before])
        if before.get(name) != now.get(name)
    ]
    if not wrong and [x.name for x in saved.leaves] != [x.name for x in wanted.leaves]:
        wrong = ["the same leaves in another order"]
    if wrong:
        more = f"; and {len(wrong) - NUM_LISTED} more" if len(wrong) > NUM_LISTED else ""
        raise CheckpointError(
            f"{path} is of another model, optimizer or algorithm: "
            f"{'; '.join(wrong[:NUM_LISTED])}{more}. Restore it with those that it was made with."
        )


def _params_record(template: Template, form: SavedForm | None) -> Record:
    """Return a record of the state whose parameters have the saved form; the rest is current."""
    params = template.structs.params
    if form is not None:
        replicas = template.placement.replicas
        params = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((replicas, *x.shape), x.dtype), form.params
        )
    return record_of(template.structs._replace(params=params))


def _names_of_sync(structs: TrainState) -> tuple[str, ...]:
    """Return the prefixes of leaf names in the parameter transform's state in a `TrainState`."""
    return (f"opt_state/{len(structs.opt_state) - 1}/",)


def _mesh_text(at: StatePlacement) -> str:
    axes = ", ".join(f"{name}: {size}" for name, size in at.axis_sizes.items())
    return f"{at.replicas} replicas ({axes})"
