"""A saved state made one of this run: its parameters in another form, on other replicas."""

import math
from collections.abc import Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._support.types import PyTree
from ..gradients.precision import DynamicLossScaleState
from ..mesh import numbered_key
from ..train import TrainState
from ..transform import (
    ParameterTransform,
    SavedForm,
    StatePlacement,
    carry_leaf,
    shifted_copies,
    stacked,
)
from ..tree import leaf_names
from ._folder import CheckpointError
from ._record import Record, is_key
from ._stages import layout_of, names_inside, of_params, parts_of, read_part, restaged, whole_types


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


def resized(
    state: TrainState,
    structs: TrainState,
    sync: ParameterTransform | None,
    step: int,
    seed: int,
    old: StatePlacement,
    new: StatePlacement,
) -> tuple[TrainState, tuple[str, ...]]:
    """The state of `old` on `new`.

    Args:
      state: NumPy arrays, stacked as they were saved, PRNG keys as their data.
      structs: a fresh state on `new`; only its structure and types matter.
      sync: the parameter transform of the new run.
      step: updates so far.
      seed: of new keys.
      old: where the state comes from.
      new: where it goes.

    Returns:
      The state, NumPy arrays stacked for `new`, and what was done, in sentences. With the same
      number of replicas only the layout of sharded state changes, and there is nothing to say.

    Raises:
      ValueError: sharded state that does not fit the parameters.
    """
    params = one_copy(structs.params)
    *rest, sync_state = state.opt_state
    notes: tuple[str, ...] = ()
    if sync is not None:
        carried, notes = sync.carry(sync_state, params, old, new)
    else:
        carried = sync_state

    def move(tree: PyTree) -> PyTree:
        return jax.tree.map(move_one, tree, is_leaf=_is_scale)

    def move_one(x: Any) -> Any:
        if not _is_scale(x):
            return carry_leaf(x, old, new)
        # A mean would be no power of two, and too large for the replica that needs the least; of
        # several with that one it is the replica that is furthest from the growth of its scale.
        replica = np.lexsort((x.growth_count, x.loss_scale))[0]
        own = [stacked(leaf[replica], new) for leaf in x[:-1]]
        return DynamicLossScaleState._make([*own, move(x.inner)])

    def move_statistics(x: Any, struct: Any) -> Any:
        return _numbered_keys(x[0], struct, new) if is_key(struct) else carry_leaf(x, old, new)

    if old.replicas == new.replicas:
        return state._replace(opt_state=(*rest, carried)), ()
    shares = [(1.0, None)] if sync is None else sync.shares(sync_state)
    params_then = _consensus(state.params, shares, old, new)
    # Copies of parameters that an optimizer keeps are averaged plainly, as the parameters are
    # unless replicas weigh: what those are apart from their plain mean, the copies must be too.
    weighed = jax.tree.map(lambda a, b: a - b, params_then, move(state.params))
    moved = TrainState(
        step=move(state.step),
        params=params_then,
        opt_state=(*shifted_copies(move(tuple(rest)), weighed), carried),
        model_state=jax.tree.map(move_statistics, state.model_state, structs.model_state),
        rng=_keys(step, seed, new),
    )
    return moved, (*_notes(state, shares, old, new), *notes)


def one_copy(stacked_params: PyTree) -> PyTree:
    """Types of one copy of stacked parameters."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stacked_params)


def _consensus(
    params: PyTree,
    shares: list[tuple[Any, PyTree | None]],
    old: StatePlacement,
    new: StatePlacement,
) -> PyTree:
    """The weighted mean of parameters and what is in flight, for every replica."""
    weights = [np.broadcast_to(np.asarray(w, np.float64), old.replicas) for w, _ in shares]
    total = sum(float(w.sum()) for w in weights)

    def mean(own: np.ndarray, *others: np.ndarray) -> np.ndarray:
        if len(shares) == 1 and np.all(own == own[:1]):
            return stacked(own[0], new)  # replicas that agree keep their value
        terms = zip(weights, (own, *others), strict=True)
        whole = sum(np.tensordot(w, x.astype(np.float64), axes=1) for w, x in terms)
        return stacked(np.asarray(whole / total).astype(own.dtype), new)

    return jax.tree.map(mean, params, *(values for _, values in shares[1:]))


def _is_scale(x: Any) -> bool:
    return isinstance(x, DynamicLossScaleState)


def _keys(step: int, seed: int, new: StatePlacement) -> Any:
    """Data of a fresh key per replica, unlike those of the start of any run."""
    key = jax.random.key(seed)

    def of_replica(replica: jax.Array) -> jax.Array:
        return jax.random.key_data(jax.random.fold_in(jax.random.fold_in(key, replica), step))

    return np.asarray(jax.vmap(of_replica)(jnp.arange(new.replicas)))


def _numbered_keys(data: Any, struct: Any, new: StatePlacement) -> Any:
    """Data of keys of the model, each replica's own as in a fresh state, from replica 0's."""
    keys = jax.random.wrap_key_data(data, impl=jax.random.key_impl(jnp.empty((), struct.dtype)))
    own = jax.vmap(lambda replica: numbered_key(keys, replica))(jnp.arange(new.replicas))
    return np.asarray(jax.random.key_data(own))


def _notes(
    state: TrainState,
    shares: list[tuple[Any, PyTree | None]],
    old: StatePlacement,
    new: StatePlacement,
) -> tuple[str, ...]:
    weighted = " weighted with the push-sum weights" if np.ndim(shares[0][0]) else ""
    flight = ", what was in flight included" if len(shares) > 1 else ""
    notes = [
        f"{new.replicas} replicas start from the consensus of {old.replicas}: the mean of their "
        f"parameters{weighted}{flight}.",
        "Counters go on, and with them the phase of the period.",
    ]
    floats = [
        x
        for x in jax.tree.leaves((state.opt_state[:-1], state.model_state))
        if jnp.issubdtype(x.dtype, jnp.floating) and x.size
    ]
    if floats:
        notes.append(
            "Floating-point state of the gradient transform (error feedback), the optimizer and "
            "the model was averaged over replicas; integers are replica 0's."
        )
    if any(map(_is_scale, jax.tree.leaves(state.opt_state[:-1], is_leaf=_is_scale))):
        notes.append("The loss scale and its counters are those of the replica with the least one.")
    notes.append("PRNG keys of the replicas were made anew from the seed and the step.")
    return tuple(notes)
