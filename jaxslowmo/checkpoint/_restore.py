"""Restoring a stored state on the replicas of a training step."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from .._support.types import PyTree
from ..mesh import model_axes, only_over
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
from ._record import Record, read_record, record_of, specs_of
from ._stages import moved_note, parts_of, read_part, restaged

_OPTIMIZER = "opt_state/1/"
NUM_LISTED = 5  # differences in a message
RestoredParts = tuple[TrainState, dict[str, Any], bool, tuple[str, ...]]
"""The fields of `Restored` without the step: state, extra, whether it is exact, notes."""


SavedFormLike = SavedForm | Callable[[dict[str, Any]], SavedForm | None] | None
"""Form of the parameters when they were saved, or a function that returns it from `extra`."""


@dataclass(frozen=True)
class Template:
    """The types and layouts of a fresh state of a training step.

    Attributes:
      train_step: the training step.
      seed: seed of PRNG keys that are made anew.
      structs: shapes, dtypes and shardings of the state.
    """

    train_step: TrainStep
    seed: int
    structs: TrainState

    @classmethod
    def of(
        cls, train_step: TrainStep, params: PyTree, model_state: PyTree | None, seed: int
    ) -> "Template":
        """Return the template of a step, whose arguments are those of `train_step.init`."""
        fresh = train_step.init(params, model_state=model_state, seed=seed)
        structs: TrainState = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), fresh
        )
        assert fresh.known_layout is not None, "`init` knows it"
        structs.known_layout = fresh.known_layout._replace()  # a copy: no step has returned it
        for array in jax.tree.leaves(fresh):  # free memory, which the restored state needs
            array.delete()
        return cls(train_step, seed, structs)

    @functools.cached_property
    def record(self) -> Record:
        """The record of the state."""
        return record_of(self.structs)

    @property
    def stored(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes, dtypes and shardings of the leaves as they are stored."""
        leaves = zip(self.record.leaves, jax.tree.leaves(self.structs), strict=True)
        return [leaf.struct(x.sharding) for leaf, x in leaves]

    @property
    def placement(self) -> StatePlacement:
        """The placement of the state."""
        step = self.train_step
        inside = model_axes(self.structs.params, step.mesh, step.axis_name)
        specs = self.record.shard_specs()
        return StatePlacement(self.record.replicas, dict(step.mesh.shape), inside, specs=specs)

    def state(self, stored: list[jax.Array]) -> TrainState:
        """Return the state from its leaves as they are stored."""
        state: TrainState = jax.tree.structure(self.structs).unflatten(
            [
                jax.random.wrap_key_data(x, impl=leaf.key_impl) if leaf.key_impl else x
                for x, leaf in zip(stored, self.record.leaves, strict=True)
            ]
        )
        state.known_layout = self.structs.known_layout
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

    def widened_like(self, saved: Record) -> "Template":
        """Return the template with the optimizer's dtypes of a saved state."""
        return dataclasses.replace(self, structs=_widened_like(saved, self.structs))


def _widened_like(saved: Record, types: TrainState) -> TrainState:
    """Return types with the wider dtypes that floats of the optimizer have in `saved`.

    Its first update may widen its state: `optax.inject_hyperparams(hyperparam_dtype=...)`
    multiplies moments in half precision by float32 hyperparameters.
    """
    dtypes = {x.name: x.dtype for x in saved.leaves if x.name.startswith(_OPTIMIZER)}

    def widened(name: str, x: Any) -> Any:
        if name not in dtypes:
            return x
        dtype = jnp.dtype(dtypes[name])
        floating = all(jnp.issubdtype(each, jnp.floating) for each in (x.dtype, dtype))
        return x.update(dtype=dtype) if floating and dtype.itemsize > x.dtype.itemsize else x

    leaves, structure = jax.tree.flatten(types)
    new = structure.unflatten(map(widened, leaf_names(types), leaves))
    new.known_layout = types.known_layout
    return new


@dataclass(frozen=True)
class Reading:
    """A checkpoint in memory.

    Attributes:
      path: path of the checkpoint.
      record: record of the checkpoint.
      template: template of the state to restore.
      arrays: the stored arrays on devices, in the layout of the new run; or NumPy arrays, the
        leaves of a saved state of these `types`.
      types: types of the saved state; None if the arrays are on devices.
      convert: function that converts that state to the current form of the parameters.
      old: placement of the arrays when they were saved.
      notes: sentences that say what `convert` does.
    """

    path: epath.Path
    record: Record
    template: Template
    arrays: list[Any]
    types: TrainState | None = None
    convert: Callable[[TrainState], TrainState] = lambda state: state
    old: StatePlacement | None = None
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
    template = template.widened_like(record)
    old, new = record.placement(template.placement, form), template.placement
    # A state that was saved without devices has no layout except the shapes of its shards.
    is_equal = [x.shape for x in record.leaves] == [x.shape for x in template.record.leaves]
    if old.is_certain or form is not None:
        is_equal = _has_equal_layout(path, record, template, old, new)
    is_equal &= record.division in (None, template.record.division)
    if old.replicas == new.replicas and is_equal:
        _check_leaves(path, record, template.record)
        return Reading(path, record, template, _read(path, record, template.stored))
    if holds_state(template.structs.opt_state[:2], "parameters", needs_owner=True):
        raise CheckpointError(
            f"{path} is from {_mesh_text(old)}, this run has {_mesh_text(new)}, and `optimizer` "
            "or `gradients` of the training step hold a parameter transform: to move its state, "
            "pass it as `sync` of js.make_train_step, in both runs."
        )
    prepare = _by_names if moves else _by_form
    types, convert = prepare(path, record, template, old)
    arrays = _read(path, record, [leaf.struct() for leaf in record.leaves])
    names = [x.name for x in record.leaves]
    check_prints(path, names, [host_print(x) for x in arrays], record.prints)
    notes: tuple[str, ...] = ()
    if moves:
        arrays = [read_part(part, arrays) for part in parts_of(record.layout, names)]
        notes = (moved_note(record.layout, template.record.layout),)
    return Reading(path, record, template, arrays, types, convert, old, notes)


Prepared = tuple[TrainState, Callable[[TrainState], TrainState]]
"""`types` and `convert` of a `Reading`."""


def _by_form(path: Any, record: Record, template: Template, old: StatePlacement) -> Prepared:
    """Check leaves before arrays are read, and convert them by the caller's form, if any.

    Raises:
      CheckpointError: leaves of another model, optimizer or algorithm.
    """
    structs, form, replicas = template.structs, old.form, template.record.replicas
    params = structs.params
    if form is not None:
        params = jax.tree.map(lambda x: x.update(shape=(replicas, *x.shape)), form.params)
    # Check the parameters first: the conversion of types needs those of the right model.
    _check_leaves(path, record, record_of(structs._replace(params=params)), only="params/")
    types = template.structs_on(old)
    if form is not None:
        types = structs_then(form, types, one_copy(structs.params))
    # Shapes of anchor and momentum depend on the mesh: they are checked when shards are joined.
    _check_leaves(path, record, record_of(types), skip=_names_of_sync(structs))
    return types, (lambda x: x) if form is None else functools.partial(converted, form, path=path)


def _by_names(path: Any, record: Record, template: Template, old: StatePlacement) -> Prepared:
    """Check leaves before arrays are read, and convert them by their names in the model's tree.

    Raises:
      CheckpointError: leaves of another model, optimizer or algorithm, or leaves that belong to no
        parameter.
    """
    whole, structs = record.whole(), template.structs
    _check_leaves(path, whole, record_of(in_model_form(structs)), only="params/")
    staged = template.structs_on(old)
    types = in_model_form(staged)
    wanted = record_of(_widened_like(whole, types))
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
    return types, functools.partial(restaged, staged)


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
    path, record, template, old = reading.path, reading.record, reading.template, reading.old
    if reading.types is None or old is None:
        names = [leaf.name for leaf in record.leaves]
        check_prints(path, names, prints_of(reading.arrays), record.prints)
        return template.state(reading.arrays), record.extra, True, ()
    new = template.placement
    state = reading.convert(jax.tree.structure(reading.types).unflatten(reading.arrays))
    template = template.widened_like(record_of(state))
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
    is_exact = old.replicas == new.replicas and not notes
    return template.state(arrays), record.extra, is_exact, (*reading.notes, *notes)


def _on_devices(x: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
    if x.shape != like.shape or x.dtype != like.dtype:
        raise CheckpointError(
            f"a leaf became {x.dtype}{list(x.shape)} instead of {like.dtype}{list(like.shape)}: "
            "was the checkpoint made with the same transforms?"
        )
    return placed(x, like)


def _check_leaves(
    path: epath.Path, saved: Record, wanted: Record, *, only: str = "", skip: str | None = None
) -> None:
    """Raise unless both have the same leaves, of those whose names begin with `only`.

    Only names count where they begin with `skip`.
    """

    def texts(record: Record) -> dict[str, str]:
        return {
            leaf.name: "" if skip and leaf.name.startswith(skip) else leaf.text()
            for leaf in record.leaves
            if leaf.name.startswith(only)
        }

    before, now = texts(saved), texts(wanted)
    wrong = [
        f"{name} is {before.get(name, 'missing') or 'there'} in the checkpoint and "
        f"{now.get(name, 'missing') or 'there'} in this run"
        for name in now | before
        if before.get(name) != now.get(name)
    ]
    if not wrong and list(before) != list(now):
        wrong = ["the same leaves in another order"]
    if wrong:
        more = f"; and {len(wrong) - NUM_LISTED} more" if len(wrong) > NUM_LISTED else ""
        raise CheckpointError(
            f"{path} is of another model, optimizer or algorithm: "
            f"{'; '.join(wrong[:NUM_LISTED])}{more}. Restore it with those that it was made with."
        )


def _has_equal_layout(
    path: epath.Path, record: Record, template: Template, old: StatePlacement, new: StatePlacement
) -> bool:
    """Return whether the arrays have the layout of the new run, including state in shards.

    Raises:
      CheckpointError: the checkpoint does not record how shards were cut, and its arrays are not
        laid out as in the new run.
    """
    sync = template.train_step.sync
    same_mesh = _large_axes(old) == _large_axes(new) and old.automatic == new.automatic
    is_equal = same_mesh and old.form is None
    if sync is None or not sync.shards(template.structs.opt_state[-1]):
        return is_equal
    if old.specs is not None:
        return is_equal and _cuts(old) == _cuts(new)
    if is_equal and record.specs == specs_of(template.stored):
        return True
    raise CheckpointError(
        f"{path} does not record how the anchor and its related state were cut inside a replica "
        f"(over {', '.join(sorted(old.automatic))}), since the state was not the result of a step. "
        "Restore it with the same mesh and `param_specs`, and save it again after a step."
    )


def _large_axes(at: StatePlacement) -> dict[str, int]:
    return {name: size for name, size in at.axis_sizes.items() if size > 1}


def _cuts(at: StatePlacement) -> list[P]:
    return [only_over(spec, at.automatic) for spec in at.specs or ()]


def _names_of_sync(structs: TrainState) -> str:
    """Return the start of leaf names in the parameter transform's state in a `TrainState`."""
    return f"opt_state/{len(structs.opt_state) - 1}/"


def _mesh_text(at: StatePlacement) -> str:
    axes = ", ".join(f"{name}: {size}" for name, size in at.axis_sizes.items())
    return f"{at.replicas} replicas ({axes})"
