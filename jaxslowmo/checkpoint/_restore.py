"""A stored state on the replicas of a training step."""

import copy
import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._support.types import PyTree
from ..mesh import model_axes
from ..train import TrainState, TrainStep
from ..transform import SavedForm, StatePlacement, holds_state, spec_of
from ..tree import leaf_names
from ._arrays import check_prints, host_print, prints_of, read_arrays
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
from ._record import LeafRecord, Record, as_stored, lies_alike, read_record, record_of
from ._stages import moved_note, parts_of, read_part, restaged, whole_types

_OPTIMIZER = "opt_state/1/"
NUM_LISTED = 5  # differences in a message
Found = tuple[TrainState, dict[str, Any], bool, tuple[str, ...]]
"""State, extra, whether it is exact, notes."""


FormThen = SavedForm | Callable[[dict[str, Any]], SavedForm | None] | None
"""Of parameters when they were saved; a function finds it from what was saved beside them."""


class Template:
    """What a fresh state of a training step looks like.

    Attributes:
      train_step: whose state it is.
      seed: of PRNG keys that are made anew.
      structs: the whole state: shapes, dtypes and shardings.
      stored: its leaves as they are stored, likewise.
      record: its record.
      placement: the mesh.
    """

    def __init__(
        self, train_step: TrainStep, params: PyTree, model_state: PyTree | None, seed: int
    ) -> None:
        self.train_step, self.seed = train_step, seed
        fresh = train_step.init(params, model_state=model_state, seed=seed)
        self.record = record_of(0, fresh, {})
        self.structs: TrainState = jax.tree.map(_struct, fresh)
        self.stored = [_struct(x) for x in as_stored(fresh)]
        self.placement = StatePlacement(
            self.record.replicas,
            dict(train_step.mesh.shape),
            model_axes(fresh.params, train_step.mesh, train_step.axis_name),
            specs=self.record.shards,
        )
        self._known_layout = fresh.known_layout
        for array in jax.tree.leaves(fresh):  # copies, whose memory the restored state needs
            array.delete()

    def state(self, stored: list[jax.Array]) -> TrainState:
        """The state whose leaves, as they are stored, these are."""
        state: TrainState = jax.tree.structure(self.structs).unflatten(
            [
                jax.random.wrap_key_data(x, impl=leaf.key_impl) if leaf.key_impl else x
                for x, leaf in zip(stored, self.record.leaves, strict=True)
            ]
        )
        state.known_layout = self._known_layout
        return state

    def structs_on(self, old: StatePlacement) -> TrainState:
        """Return `structs` with what the parameter transform keeps on another placement.

        Only names, and the shapes of shards, are other ones.
        """
        *rest, own = self.structs.opt_state
        sync, params = self.train_step.sync, one_copy(self.structs.params)
        if sync is None:
            return self.structs
        return self.structs._replace(opt_state=(*rest, sync.like_on(own, params, old)))

    def with_dtypes_of(self, saved: Record) -> "Template":
        """The template of a state whose optimizer has been at work.

        Its first update may widen what it keeps: `optax.inject_hyperparams(hyperparam_dtype=...)`
        multiplies moments of half precision by hyperparameters of float32.
        """
        leaves = _as_wide_as(self.record, saved).leaves

        def like(structs: list[jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
            return [
                struct if now == before else struct.update(dtype=jnp.dtype(now.dtype))
                for struct, before, now in zip(structs, self.record.leaves, leaves, strict=True)
            ]

        new = copy.copy(self)
        new.record = dataclasses.replace(self.record, leaves=leaves)
        new.stored = like(self.stored)
        new.structs = jax.tree.structure(self.structs).unflatten(
            like(jax.tree.leaves(self.structs))
        )
        return new


def _as_wide_as(record: Record, saved: Record) -> Record:
    """The record with leaves of the optimizer as wide as they were saved."""
    dtypes = {x.name: x.dtype for x in saved.leaves}
    leaves = tuple(_widened(x, dtypes.get(x.name)) for x in record.leaves)
    return dataclasses.replace(record, leaves=leaves)


def _widened(leaf: LeafRecord, dtype: str | None) -> LeafRecord:
    """A leaf as it may have been saved: one of the optimizer in a wider floating dtype."""
    if dtype in (None, leaf.dtype) or not leaf.name.startswith(_OPTIMIZER):
        return leaf
    before, now = jnp.dtype(leaf.dtype), jnp.dtype(dtype)
    wider = (
        all(jnp.issubdtype(x, jnp.floating) for x in (before, now))
        and now.itemsize > before.itemsize
    )
    return dataclasses.replace(leaf, dtype=now.name) if wider else leaf


def _struct(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


@dataclass(frozen=True)
class Reading:
    """A checkpoint in memory.

    Attributes:
      path: where it was.
      record: its record.
      arrays: as they are stored; on the devices where they shall be, or whole on the host.
      is_placed: whether they are on the devices.
      template: of the state that they make.
      old: where the arrays come from.
      types: types of the state that the arrays are, in its structure.
      convert: makes of that state, of NumPy arrays, one with the parameters' form of now.
      notes: what `convert` does, in sentences.
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


def read(path: epath.Path, template: Template, saved_form: FormThen = None) -> Reading:
    """What this process needs of a checkpoint.

    Args:
      path: of it.
      template: of the state that it shall make.
      saved_form: of the parameters when it was saved, where that was another one.

    Raises:
      CheckpointError: see `Checkpoints.restore`.

    Communication: none.
    """
    record = read_record(path).with_names_of(template.record)
    form = saved_form(record.extra) if callable(saved_form) else saved_form
    moves = form is None and record.layout != template.record.layout
    if form is not None:
        check_recorded(form, record, path)
    if moves:
        form = recorded_form(record, one_copy(template.structs.params))
    template = template.with_dtypes_of(record)
    old, new = record.placement(template.placement, form), template.placement
    names = [x.name for x in record.leaves]
    sync, own = template.train_step.sync, template.structs.opt_state[-1]
    # What was saved without devices has no layout but the shapes of its shards.
    alike = [x.shape for x in record.leaves] == [x.shape for x in template.record.leaves]
    if old.is_certain or form is not None:
        alike = lies_alike(path, record, own, template.stored, sync, old, new)
    if old.replicas == new.replicas and alike:
        _check_leaves(path, record, template.record)
        arrays = _read(path, record, template.stored)
        return Reading(path, record, arrays, True, template, old, template.structs)
    if holds_state(template.structs.opt_state[:2], "parameters", needs_owner=True):
        raise CheckpointError(
            f"{path} is from {_mesh_text(old)}, this run has {_mesh_text(new)}, and `optimizer` "
            "or `gradients` of the training step hold a parameter transform: to move its state, "
            "pass it as `sync` of js.make_train_step, in both runs."
        )
    make = _by_names if moves else _by_form
    reading = make(Reading(path, record, [], False, template, old, template.structs))
    arrays = _read(path, record, None)
    check_prints(path, names, [host_print(x) for x in arrays], record.prints)
    if moves:
        parts = parts_of(record.layout, names)
        arrays = [read_part(part, arrays) for part in parts]
    return dataclasses.replace(reading, arrays=arrays)


def _by_form(reading: Reading) -> Reading:
    """What is known before arrays are read, where the caller says the form of parameters, if any.

    Raises:
      CheckpointError: leaves of another model, optimizer or algorithm.
    """
    path, record, template, old = reading.path, reading.record, reading.template, reading.old
    # Before anything is made of it: of which parameters it is.
    params = _params_record(template, old.form)
    _check_leaves(path, record.only("params"), params.only("params"))
    types, convert = template.structs_on(old), reading.convert
    if old.form is not None:
        types = structs_then(old.form, types, one_copy(template.structs.params))
        convert = functools.partial(converted, old.form, path=path)
    # Where anchor and momentum lie depends on the mesh: their shapes are checked when joined.
    _check_leaves(path, record, record_of(0, types, {}), skip=_names_of_sync(template.structs))
    return dataclasses.replace(reading, types=types, convert=convert)


def _by_names(reading: Reading) -> Reading:
    """What is known before arrays are read, where the state goes through the model's own tree.

    Raises:
      CheckpointError: leaves of another model, optimizer or algorithm, or what is of no parameter.
    """
    path, record, template, old = reading.path, reading.record, reading.template, reading.old
    whole, structs = record.whole(), template.structs
    params = record_of(0, whole_types(structs), {})
    _check_leaves(path, whole.only("params"), params.only("params"))
    staged = template.structs_on(old)
    types = whole_types(staged)
    wanted = _as_wide_as(record_of(0, types, {}), whole)
    # The parameter transform moves what its `like_on` makes anew. What an optax transform keeps
    # beside the trees of stages is equal on all of them: `over_stages` sees to it.
    kept = {id(x) for x in jax.tree.leaves(structs)}
    alike = spec_of(template.train_step.tx).unknown(structs.opt_state)
    shared = {id(x) for x in jax.tree.leaves(alike)}
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


def _read(path: epath.Path, record: Record, like: list[jax.ShapeDtypeStruct] | None) -> list[Any]:
    """`read_arrays` of what is in files, and what holds nothing, of which none were written."""
    full = [i for i, leaf in enumerate(record.leaves) if math.prod(leaf.shape)]
    keys = [record.leaves[i].key for i in full]
    found = read_arrays(path / ARRAYS, keys, None if like is None else [like[i] for i in full])
    files = dict(zip(full, found, strict=True))

    def array(i: int, leaf: LeafRecord) -> Any:
        if i in files:
            return files[i]
        nothing = np.zeros(leaf.shape, jnp.dtype(leaf.dtype))
        return nothing if like is None else _placed(nothing, like[i])

    return [array(i, leaf) for i, leaf in enumerate(record.leaves)]


def finished(reading: Reading) -> Found:
    """The state on the replicas of the training step, from what all processes have read.

    Raises:
      CheckpointError: other values than were saved, or sharded state that does not fit; alike on
        all processes.

    Communication: where arrays are placed, that of `prints_of`.
    """
    path, record, template = reading.path, reading.record, reading.template
    if reading.is_placed:
        names = [leaf.name for leaf in record.leaves]
        check_prints(path, names, prints_of(reading.arrays), record.prints)
        return template.state(reading.arrays), record.extra, True, ()
    old, new = reading.old, template.placement
    state = reading.convert(jax.tree.structure(reading.types).unflatten(reading.arrays))
    template = template.with_dtypes_of(record_of(0, state, {}))
    try:
        moved, notes = resized(
            state, template.structs, template.train_step.sync, record.step, template.seed, old, new
        )
    except ValueError as error:
        raise CheckpointError(
            f"{path} is from {_mesh_text(old)} and does not fit: {error}. Was it made with the "
            "same `sync`, `bucket_bytes` and `local_axis_name` included?"
        ) from error
    arrays = [_placed(x, s) for x, s in zip(jax.tree.leaves(moved), template.stored, strict=True)]
    is_exact = old.replicas == new.replicas
    return template.state(arrays), record.extra, is_exact, (*reading.notes, *notes)


def _placed(x: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
    if x.shape != like.shape or x.dtype != like.dtype:
        raise CheckpointError(
            f"a leaf became {x.dtype}{list(x.shape)} instead of {like.dtype}{list(like.shape)}: "
            "was the checkpoint made with the same transforms?"
        )
    return jax.make_array_from_callback(like.shape, like.sharding, lambda index: x[index])


def _check_leaves(
    path: epath.Path, saved: Record, wanted: Record, skip: tuple[str, ...] = ()
) -> None:
    """Both have the same leaves; of those whose names begin with one of `skip` only the names."""

    def texts(record: Record) -> dict[str, str]:
        return {
            leaf.name: "" if leaf.name.startswith(skip) else leaf.text() for leaf in record.leaves
        }

    before, now = texts(saved), texts(wanted)
    found = [
        f"{name} is {before.get(name, 'missing') or 'there'} in the checkpoint and "
        f"{now.get(name, 'missing') or 'there'} in this run"
        for name in dict.fromkeys([*now, *before])
        if before.get(name) != now.get(name)
    ]
    if not found and [x.name for x in saved.leaves] != [x.name for x in wanted.leaves]:
        found = ["the same leaves in another order"]
    if found:
        more = f"; and {len(found) - NUM_LISTED} more" if len(found) > NUM_LISTED else ""
        raise CheckpointError(
            f"{path} is of another model, optimizer or algorithm: "
            f"{'; '.join(found[:NUM_LISTED])}{more}. Restore it with those that it was made with."
        )


def _params_record(template: Template, form: SavedForm | None) -> Record:
    """A record of the parameters, in the form that they had."""
    params = template.structs.params
    if form is not None:
        replicas = template.placement.replicas
        params = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((replicas, *x.shape), x.dtype), form.params
        )
    return record_of(0, template.structs._replace(params=params), {})


def _names_of_sync(structs: TrainState) -> tuple[str, ...]:
    """Of the parameter transform's state in a `TrainState`."""
    return (f"opt_state/{len(structs.opt_state) - 1}/",)


def _mesh_text(at: StatePlacement) -> str:
    axes = ", ".join(f"{name}: {size}" for name, size in at.axis_sizes.items())
    return f"{at.replicas} replicas ({axes})"
