"""Restoring a stored state on the replicas of a training step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .._support.types import PyTree
from ..train import TrainState, TrainStep
from ..transform import holds_state, spec_of
from ..tree import in_model_form, leaf_names
from ._arrays import host_print, placed, prints_of, read_arrays
from ._convert import (
    check_movable,
    check_recorded,
    converted,
    joined_blocks,
    one_copy,
    recorded_form,
    resized,
    structs_then,
    with_whole_shared,
)
from ._folder import ARRAYS, CheckpointError, epath
from ._placement import SavedForm, StatePlacement
from ._record import LeafRecord, Record, read_record, record_of
from ._stages import moved_note, parts_of, read_part, restaged

# The first part of the names of leaves that the optimizer and the parameter transform keep.
_OPTIMIZER, _SYNC = "opt_state/1/", "opt_state/2/"
NUM_LISTED = 5  # differences in a message

SavedFormLike = SavedForm | Callable[[dict[str, Any]], SavedForm | None] | None
"""Form of the parameters when they were saved, or a function that returns it from `extra`."""


@dataclass(frozen=True)
class Restored:
    """The result of `Checkpoints.restore`.

    Attributes:
      step: step of the checkpoint.
      state: the state from which to continue.
      extra: the `extra` that was saved with it.
      is_exact: whether every value is as it was saved, so that the run continues as if it had not
        been interrupted.
      notes: sentences that say what was averaged, kept, made anew, or moved to other stages; () if
        nothing was.
    """

    step: int
    state: TrainState
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
    """

    train_step: TrainStep
    seed: int
    structs: TrainState
    record: Record

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
        return cls(train_step, seed, structs, record_of(structs))

    def stored(self, leaves: list[LeafRecord]) -> list[jax.ShapeDtypeStruct]:
        """Return the types of these leaves as they are stored, in the layout of the state."""
        structs = jax.tree.leaves(self.structs)
        return [leaf.struct(x.sharding) for leaf, x in zip(leaves, structs, strict=True)]

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


def read(
    path: epath.Path, template: Template, saved_form: SavedFormLike = None
) -> Callable[[], Restored]:
    """Read the part of a checkpoint that this process needs.

    Args:
      path: path of the checkpoint.
      template: template of the state to restore.
      saved_form: form of the parameters when it was saved, or a function that returns it from
        `extra`; None if it is the current form or the record describes it.

    Returns:
      A function that returns the result once all processes have read. If values are not those that
      were saved, it raises `UnreadableError` on all of them.

    Raises:
      CheckpointError: see `Checkpoints.restore`.

    Communication: none. The function has that of `prints_of` if nothing is converted.
    """
    record = read_record(path)
    form = saved_form(record.extra) if callable(saved_form) else saved_form
    moves = form is None and record.layout != template.record.layout
    if form is not None:
        check_recorded(form, record, path)
    if moves:
        form = recorded_form(record, one_copy(template.structs.params))
    if record.table_rows not in (None, rows := template.record.table_rows):
        raise CheckpointError(
            f"{path} has tables of other numbers of rows, {record.table_rows}, than this run, "
            f"{rows}. Restore it with those tables; `step.embeddings.read` and `write` carry rows "
            "to others."
        )
    sizes = template.train_step.mesh.shape
    old, new = record.placement(sizes, form), template.record.placement(sizes)
    if _is_as_saved(path, record, template, old, new):
        _check_leaves(path, record, template.record)
        arrays = _read(path, record, template.stored(record.leaves))

        def unchanged() -> Restored:
            record.check_prints(path, prints_of(arrays))
            return Restored(record.step, template.state(arrays), record.extra, True, ())

        return unchanged
    if holds_state(template.structs.opt_state[:2], "parameters", needs_owner=True):
        raise CheckpointError(
            f"{path} is from {_mesh_text(old)}, this run has {_mesh_text(new)}, and `optimizer` "
            "or `gradients` of the training step hold a parameter transform: to move its state, "
            "pass it as `sync` of js.make_train_step, in both runs."
        )
    state = _on_host(path, record, template, old, moves)
    try:
        state, notes = resized(
            state, template.structs, template.train_step.sync, record.step, template.seed, old, new
        )
    except ValueError as error:
        raise CheckpointError(
            f"{path} is from {_mesh_text(old)} and does not fit: {error}. Was it made with the "
            "same `sync`, `bucket_bytes` and `local_axis_name` included?"
        ) from error
    is_exact = old.replicas == new.replicas and not notes
    if moves:
        notes = (moved_note(record.layout, template.record.layout), *notes)
    leaves = template.record.leaves
    types = zip(leaves, jax.tree.leaves(state), template.stored(leaves), strict=True)
    state = template.state([_on_devices(*one) for one in types])
    return lambda: Restored(record.step, state, record.extra, is_exact, notes)


def _on_host(
    path: epath.Path, record: Record, template: Template, old: StatePlacement, moves: bool
) -> TrainState:
    """Return the whole saved state in the present form of the parameters, of NumPy arrays.

    Args:
      path: path of the checkpoint.
      record: record of the checkpoint.
      template: template of the state to restore.
      old: placement of the arrays when they were saved.
      moves: whether leaves are moved by their names in the model's tree; else the caller's form
        converts them, if there is one.

    Raises:
      CheckpointError: leaves of another model, optimizer or algorithm, before arrays are read; or
        leaves that belong to no parameter.

    Communication: none.
    """
    structs, form = with_whole_shared(template.structs), old.form
    saved = record.whole() if moves else record

    def as_saved(types: TrainState) -> TrainState:
        if moves:
            return in_model_form(types)
        return types if form is None else structs_then(form, types)

    # Check the parameters first: the conversion of types needs those of the right model.
    alone = structs._replace(opt_state=())
    _check_leaves(path, saved, record_of(as_saved(alone)), only="params/")
    types = as_saved(structs)
    wanted = record_of(types)
    if moves:
        # State of an optax transform outside the trees of stages is equal on all stages, because of
        # `over_stages`.
        optax_states = spec_of(template.train_step.tx).unknown(structs.opt_state)
        shared = {id(x) for x in jax.tree.leaves(optax_states)}
        free = {
            name
            for name, x in zip(leaf_names(structs), jax.tree.leaves(structs), strict=True)
            if name.startswith(_OPTIMIZER) and id(x) in shared
        }
        check_movable(path, record, template.record, wanted, free)
    _check_leaves(path, saved, wanted, skip=_SYNC)
    arrays = _read(path, record, [leaf.struct() for leaf in record.leaves])
    record.check_prints(path, [host_print(x) for x in arrays])
    arrays = joined_blocks(record, arrays, old, f"{_SYNC}shared/")
    parts = parts_of(record.layout if moves else None, [leaf.name for leaf in record.leaves])
    state = jax.tree.structure(types).unflatten([read_part(part, arrays) for part in parts])
    if moves:
        return restaged(structs, state)
    return state if form is None else converted(form, state, path)


def _read(path: epath.Path, record: Record, like: list[Any]) -> list[Any]:
    keys = [leaf.key for leaf in record.leaves]
    return read_arrays(path / ARRAYS, dict(zip(keys, like, strict=True)))


def _on_devices(leaf: LeafRecord, x: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Return a converted leaf on the devices of `like`; raise if it is none of that type."""
    if x.shape != like.shape or not (x.dtype == like.dtype or _is_wider(leaf, x.dtype)):
        raise CheckpointError(
            f"a leaf became {x.dtype}{list(x.shape)} instead of {like.dtype}{list(like.shape)}: "
            "was the checkpoint made with the same transforms?"
        )
    return placed(x, like)


def _is_wider(leaf: LeafRecord, dtype: Any) -> bool:
    """Return whether a float of the optimizer has a wider dtype than a fresh one.

    Its first update may widen its state: `optax.inject_hyperparams(hyperparam_dtype=...)`
    multiplies moments in half precision by float32 hyperparameters.
    """
    fresh, dtype = jnp.dtype(leaf.dtype), jnp.dtype(dtype)
    floating = all(jnp.issubdtype(x, jnp.floating) for x in (fresh, dtype))
    is_wider = floating and dtype.itemsize > fresh.itemsize
    return leaf.name.startswith(_OPTIMIZER) and is_wider


def _check_leaves(
    path: epath.Path, saved: Record, wanted: Record, *, only: str = "", skip: str | None = None
) -> None:
    """Raise unless both have the same leaves, of those whose names begin with `only`.

    Only names count where they begin with `skip`.
    """
    before, now = (
        {leaf.name: leaf for leaf in record.leaves if leaf.name.startswith(only)}
        for record in (saved, wanted)
    )

    def texts(name: str) -> list[str]:
        then, fresh = before.get(name), now.get(name)
        if then and fresh and _is_wider(fresh, then.dtype):
            then = then._replace(dtype=fresh.dtype)
        found = "there" if skip and name.startswith(skip) else ""
        return ["missing" if x is None else found or x.text() for x in (then, fresh)]

    pairs = {name: texts(name) for name in now | before}
    wrong = [
        f"{name} is {then} in the checkpoint and {fresh} in this run"
        for name, (then, fresh) in pairs.items()
        if then != fresh
    ]
    if not wrong and list(before) != list(now):
        wrong = ["the same leaves in another order"]
    if wrong:
        more = f"; and {len(wrong) - NUM_LISTED} more" if len(wrong) > NUM_LISTED else ""
        raise CheckpointError(
            f"{path} is of another model, optimizer or algorithm: "
            f"{'; '.join(wrong[:NUM_LISTED])}{more}. Restore it with those that it was made with."
        )


def _is_as_saved(
    path: epath.Path, record: Record, template: Template, old: StatePlacement, new: StatePlacement
) -> bool:
    """Return whether the arrays are those of a state of the new run, including state in blocks."""
    shapes = [[leaf.shape for leaf in x.leaves] for x in (record, template.record)]
    sync = template.train_step.sync
    keeps_blocks = sync is not None and sync.algorithm.is_sharded
    return (
        old.form is None
        and old.replicas == new.replicas
        and _large_axes(old) == _large_axes(new)
        and old.automatic == new.automatic
        and shapes[0] == shapes[1]
        and not (keeps_blocks and old.specs != new.specs)
    )


def _large_axes(at: StatePlacement) -> dict[str, int]:
    return {name: size for name, size in at.axis_sizes.items() if size > 1}


def _mesh_text(at: StatePlacement) -> str:
    axes = ", ".join(f"{name}: {size}" for name, size in at.axis_sizes.items())
    return f"{at.replicas} replicas ({axes})"
