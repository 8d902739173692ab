"""States whose parameters were a tree of another form: those of other stages, or of none."""

import math
from collections.abc import Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._support.types import PyTree
from ..train import TrainState
from ..transform import SavedForm
from ..tree import leaf_names
from ._folder import CheckpointError
from ._layout import layout_of, names_inside, of_params, parts_of, read_part, restaged, whole_types
from ._record import Record


def recorded_form(record: Record, params: PyTree) -> SavedForm:
    """Return the form that parameters had when they were saved, as the record says it.

    Its tree is the list of the arrays that were saved: buffers of stages, or the model's own.

    Args:
      record: the record of the checkpoint.
      params: types of the parameters of now.
    """
    saved = record.only("params").leaves
    parts = parts_of(record.layout, [leaf.name for leaf in saved])

    def convert(arrays: list[Any]) -> PyTree:
        whole = [read_part(part, arrays) for part in parts]
        return restaged(params, jax.tree.structure(whole_types(params)).unflatten(whole))

    types = [jax.ShapeDtypeStruct(leaf.shape[1:], jnp.dtype(leaf.dtype)) for leaf in saved]
    return SavedForm(types, convert)


def check_recorded(form: SavedForm, record: Record, path: object) -> None:
    """Raise `CheckpointError` for a form of other stages than those of the checkpoint."""
    if not (given := of_params(layout_of({"params": form.params}))):
        return  # names and shapes tell it apart
    if given != of_params(record.layout):
        raise CheckpointError(
            f"{path} records other stages than those of `saved_form`: other layers lie in their "
            "buffers. Leave `saved_form` out, so that the record decides."
        )


def check_movable(path: object, saved: Record, now: Record, wanted: Record, free: Set[str]) -> None:
    """Raise `CheckpointError` for what cannot go from one layout to another by its names.

    Args:
      path: path of the checkpoint, for the message.
      saved: record of the checkpoint.
      now: record of a state of this run.
      wanted: record of the checkpoint's state as this run would have it in the model's own tree.
      free: names of leaves of which it is known that they depend on no stage, or that the parameter
        transform moves.
    """
    copies = [{n for _, own in of_params(x.layout) for n in own["copies"]} for x in (saved, now)]
    if saved.layout and now.layout and copies[0] != copies[1]:
        raise CheckpointError(
            f"{path} has other tied parameters than this run: {sorted(copies[0] ^ copies[1])} are "
            "copies of others in one of the two. Restore it with those that it was made with."
        )
    staged = [names_inside(x.layout) for x in (saved, now) if x.layout]
    known = {x.name for x in wanted.leaves} - free
    wrong = [
        f"{leaf.name} {list(leaf.shape[1:])}"
        for leaf in saved.whole().leaves
        if leaf.name.startswith("opt_state/") and leaf.name in known and not leaf.key_impl
        # Outside of the trees of stages there may be counters, and nothing of the parameters.
        if not all(own.get(leaf.name, math.prod(leaf.shape[1:]) < 2) for own in staged)
    ]
    if wrong:
        raise _untold(path, "in other stages, or in none,", wrong)


def structs_then(form: SavedForm, now: PyTree, params: PyTree) -> PyTree:
    """Types of a saved state, of those of the state of now.

    Args:
      form: of the parameters when it was saved.
      now: stacked.
      params: one copy of the parameters of now.
    """

    def is_like(x: PyTree) -> bool:
        return _is_like(params, x)

    def then(x: PyTree) -> PyTree:
        if not is_like(x):
            return x
        leaves = jax.tree.leaves(x)
        # Moments have one dtype, or each that of its parameter.
        one = leaves[0].dtype if len({leaf.dtype for leaf in leaves}) == 1 else None
        return jax.tree.map(
            lambda p: jax.ShapeDtypeStruct((leaves[0].shape[0], *p.shape), one or p.dtype),
            form.params,
        )

    return jax.tree.map(then, now, is_leaf=is_like)


def converted(form: SavedForm, state: TrainState, path: object) -> TrainState:
    """A saved state with every tree of the form of its parameters as it is now.

    Shards stay: the parameter transform joins them first.

    Args:
      form: of the parameters when it was saved.
      state: NumPy arrays, stacked.
      path: of the checkpoint, for messages.

    Raises:
      CheckpointError: what depends on the parameters, and has not their form.
    """

    def is_like(x: PyTree) -> bool:
        return _is_like(form.params, x)

    # The parameter transform moves its own.
    others = state.opt_state[:-1]
    rest = jax.tree.map(lambda x: None if is_like(x) else x, others, is_leaf=is_like)
    named = zip(leaf_names(rest), jax.tree.leaves(rest), strict=True)
    # Buckets of error feedback, factors of moments: nobody knows which element is whose.
    wrong = [f"{name} {list(x.shape[1:])}" for name, x in named if np.size(x) > len(x)]
    if wrong:
        raise _untold(path, "of another form", wrong)

    def move(x: Any) -> Any:
        return form.convert(x) if is_like(x) else x

    return jax.tree.map(move, state, is_leaf=is_like)


def _untold(path: object, how: str, wrong: list[str]) -> CheckpointError:
    return CheckpointError(
        f"{path} was saved with parameters {how} and holds what cannot be told apart by "
        f"parameter: {', '.join(wrong)} in the states of gradient transform and optimizer. Go on "
        "with the form, such as the stages, that it had."
    )


def _is_like(params: PyTree, tree: PyTree) -> bool:
    """Whether a tree is one of stacked arrays, or their types, like the parameters."""
    leaves, structure = jax.tree.flatten(tree)
    return structure == jax.tree.structure(params) and all(
        x.shape[1:] == p.shape and x.shape
        for x, p in zip(leaves, jax.tree.leaves(params), strict=True)
    )
