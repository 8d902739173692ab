"""States whose parameters were a tree of another form: those of other stages, or of none."""

from typing import Any

import jax
import numpy as np

from .._typing import PyTree
from ..train import TrainState
from ..transform import SavedForm
from ..tree import leaf_names
from ._folder import CheckpointError


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
        raise CheckpointError(
            f"{path} was saved with parameters of another form, and holds what cannot be told "
            f"apart by parameter: {', '.join(wrong)} in the states of gradient transform and "
            "optimizer. Go on with the form, such as the stages, that it had."
        )

    def move(x: Any) -> Any:
        return form.convert(x) if is_like(x) else x

    return jax.tree.map(move, state, is_leaf=is_like)


def _is_like(params: PyTree, tree: PyTree) -> bool:
    """Whether a tree is one of stacked arrays, or their types, like the parameters."""
    leaves, structure = jax.tree.flatten(tree)
    return structure == jax.tree.structure(params) and all(
        x.shape[1:] == p.shape and x.shape
        for x, p in zip(leaves, jax.tree.leaves(params), strict=True)
    )
