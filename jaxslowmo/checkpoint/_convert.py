"""Conversion of a saved state to another form of the parameters and another number of replicas."""

import math
from collections.abc import Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._support.types import PyTree
from ..gradients.precision import DynamicLossScaleState
from ..mesh import Shares, numbered_key
from ..train import TrainState
from ..transform import ExchangeState, ParameterTransform, shifted_copies
from ..tree import in_model_form, leaf_names, mirrored, replaced
from ._folder import CheckpointError
from ._placement import SavedForm, StatePlacement, carry_leaf, stacked
from ._record import Record, is_key
from ._stages import layout_of, names_inside, of_params, parts_of, read_part, restaged


def recorded_form(record: Record, params: PyTree) -> SavedForm:
    """Return the form that parameters had when they were saved, according to the record.

    Its tree is the list of the arrays that were saved: buffers of stages, or the model's leaves.

    Args:
      record: the record of the checkpoint.
      params: types of one copy of the current parameters.
    """
    saved = record.only("params").leaves
    parts = parts_of(record.layout, [leaf.name for leaf in saved])

    def convert(arrays: list[Any]) -> PyTree:
        whole = [read_part(part, arrays) for part in parts]
        return restaged(params, jax.tree.structure(in_model_form(params)).unflatten(whole))

    types = [jax.ShapeDtypeStruct(leaf.shape[1:], jnp.dtype(leaf.dtype)) for leaf in saved]
    return SavedForm(types, convert)


def check_recorded(form: SavedForm, record: Record, path: object) -> None:
    """Raise `CheckpointError` for a form of other stages than those of the checkpoint."""
    if not (layout := of_params(layout_of({"params": form.params}))):
        return  # without stages, names and shapes are compared later
    if layout != of_params(record.layout):
        raise CheckpointError(
            f"{path} records other stages than those of `saved_form`: other layers are in their "
            "buffers. Leave `saved_form` out, so that the record decides."
        )


def check_movable(path: object, saved: Record, now: Record, wanted: Record, free: Set[str]) -> None:
    """Raise `CheckpointError` for leaves that cannot be moved to another layout by their names.

    Args:
      path: path of the checkpoint, for the message.
      saved: record of the checkpoint.
      now: record of a state of this run.
      wanted: record of the checkpoint's state as this run has it in the model's tree.
      free: names of leaves that depend on no stage, or that the parameter transform moves.
    """
    copies = [
        {n for _, packing in of_params(x.layout) for n in packing["copies"]} for x in (saved, now)
    ]
    if saved.layout and now.layout and copies[0] != copies[1]:
        raise CheckpointError(
            f"{path} has other tied parameters than this run: {sorted(copies[0] ^ copies[1])} are "
            "copies of others in one of the two. Restore it with those that it was made with."
        )
    staged = [names_inside(x.layout) for x in (saved, now) if x.layout]
    checked = {x.name for x in wanted.leaves} - free
    wrong = [
        f"{leaf.name} {list(leaf.shape[1:])}"
        for leaf in saved.whole().leaves
        if leaf.name.startswith("opt_state/") and leaf.name in checked and not leaf.key_impl
        # Outside of the trees of stages counters are allowed, and larger leaves are not.
        if not all(names.get(leaf.name, math.prod(leaf.shape[1:]) < 2) for names in staged)
    ]
    if wrong:
        raise _indistinct(path, "in other stages, or in none,", wrong)


def structs_then(form: SavedForm, now: TrainState) -> TrainState:
    """Return the types of a state as it was saved, from those of the current state.

    Args:
      form: form of the parameters when the state was saved.
      now: types of the current state, stacked.
    """

    def then(x: PyTree) -> PyTree:
        leaves = jax.tree.leaves(x)
        # Moments all have one dtype, or each has that of its parameter.
        dtype = leaves[0].dtype if len({leaf.dtype for leaf in leaves}) == 1 else None
        return jax.tree.map(
            lambda p: jax.ShapeDtypeStruct((leaves[0].shape[0], *p.shape), dtype or p.dtype),
            form.params,
        )

    return replaced(now.params, now, then)


def converted(form: SavedForm, state: TrainState, path: object) -> TrainState:
    """Convert every tree of a saved state that has the form of its parameters to the current form.

    Args:
      form: form of the parameters when the state was saved.
      state: the saved state, stacked NumPy arrays.
      path: path of the checkpoint, for messages.

    Raises:
      CheckpointError: leaves that depend on parameters and are in no tree of the saved form.
    """
    # The state of the parameter transform, the last, has trees like the parameters and counters.
    rest = replaced(state.params, state.opt_state[:-1], lambda x: None)
    named = zip(leaf_names(rest), jax.tree.leaves(rest), strict=True)
    # In buckets of error feedback and factors of moments no element belongs to a known parameter.
    wrong = [f"{name} {list(x.shape[1:])}" for name, x in named if np.size(x) > len(x)]
    if wrong:
        raise _indistinct(path, "of another form", wrong)
    return replaced(state.params, state, form.convert)


def _indistinct(path: object, how: str, wrong: list[str]) -> CheckpointError:
    return CheckpointError(
        f"{path} was saved with parameters {how} and holds what cannot be distinguished by "
        f"parameter: {', '.join(wrong)} in the states of gradient transform and optimizer. Go on "
        "with the form, such as the stages, that it had."
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
    """Convert a state from placement `old` to placement `new`.

    Args:
      state: the state, NumPy arrays stacked as they were saved, PRNG keys as their data.
      structs: a fresh state on `new`; only its structure and types matter.
      sync: the parameter transform of the new run, or None.
      step: number of updates so far.
      seed: seed of new keys.
      old: placement on which the state was saved.
      new: placement of the new run.

    Returns:
      The state, NumPy arrays stacked for `new`, and sentences that say what was done. If only the
      layout of sharded state changes, there are none.

    Raises:
      ValueError: sharded state that does not fit the parameters.
    """
    *rest, sync_state = state.opt_state
    shares = [(1.0, None)] if sync is None else sync.shares(sync_state)
    params = _consensus(state.params, shares, old)
    carried, notes = sync_state, []
    if sync is not None:
        like = structs.opt_state[-1]
        carried, notes = _exchange_state(sync, sync_state, like, params, old, new)

    def move(tree: PyTree) -> PyTree:
        return jax.tree.map(move_one, tree, is_leaf=_is_scale)

    def move_one(x: Any) -> Any:
        if not _is_scale(x):
            return carry_leaf(x, old, new)
        # Take the smallest scale: a mean would be no power of two, and too large for that replica.
        # Of several replicas with that scale, take the one that is furthest from its next growth.
        replica = np.lexsort((x.growth_count, x.loss_scale))[0]
        values = [stacked(leaf[replica], new) for leaf in x[:-1]]
        return DynamicLossScaleState._make([*values, move(x.inner)])

    def move_statistics(x: Any, struct: Any) -> Any:
        return _numbered_keys(x[0], struct, new) if is_key(struct) else carry_leaf(x, old, new)

    if old.replicas == new.replicas:
        return state._replace(opt_state=(*rest, carried)), tuple(notes)
    new_params = jax.tree.map(lambda x: stacked(x, new), params)
    # Copies of parameters in an optimizer get their unweighted mean. If the consensus is weighted,
    # they are shifted by the difference of the parameters' consensus and their unweighted mean.
    shift = jax.tree.map(lambda a, b: a - b, new_params, move(state.params))
    new_state = TrainState(
        step=move(state.step),
        params=new_params,
        opt_state=(*shifted_copies(move(tuple(rest)), shift), carried),
        model_state=jax.tree.map(move_statistics, state.model_state, structs.model_state),
        rng=_keys(step, seed, new),
    )
    return new_state, (*_notes(state, shares, old.replicas, new.replicas), *notes)


def _exchange_state(
    sync: ParameterTransform,
    state: ExchangeState,
    like: ExchangeState,
    params: PyTree,
    old: StatePlacement,
    new: StatePlacement,
) -> tuple[ExchangeState, list[str]]:
    """Return the state of a parameter transform on placement `new`, and what was done with it.

    What all replicas have together is kept, and cut anew. What each has for itself is kept on as
    many replicas; on others it becomes the mean, as after an exchange that set all to one mean.
    """
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    algorithm = sync.bound(new.axis_sizes, types).algorithm
    shared, local, notes = state.shared, state.local, []
    if algorithm.is_sharded:
        shared = _split_blocks(shared, like.shared, types, new)
    if old.replicas == new.replicas:
        return state._replace(shared=shared), notes
    if not algorithm.is_sharded:
        shared = jax.tree.map(lambda x: carry_leaf(x, old, new), shared)
    with jax.transfer_guard("allow"):  # `reset` makes zeros and ones
        local = algorithm.reset(jax.tree.map(lambda x: carry_leaf(x, old, new), local))
        local = jax.tree.map(np.asarray, local)
    if algorithm.has_anchor:
        is_shared = bool(jax.tree.leaves(shared))
        notes.append(
            "The anchor and the state of the outer optimizer (slow momentum) are kept exactly."
            if is_shared
            else "Each replica had an anchor and slow momentum of its own (`exact_average=False`): "
            "they were averaged."
        )
    if algorithm.mass is not None:
        notes.append(
            "Push-sum weights are 1 and nothing is in flight: both are part of the consensus. The "
            "rotation of the graph goes on."
        )
    return ExchangeState(carry_leaf(state.count, old, new), local, shared), notes


def with_whole_shared(structs: TrainState) -> TrainState:
    """Return the types of a state whose shared state is whole on each replica."""
    *rest, last = structs.opt_state
    if not isinstance(last, ExchangeState):
        return structs
    params = dict(zip(leaf_names(structs.params), jax.tree.leaves(structs.params), strict=True))

    def whole(name: str, x: Any) -> Any:
        like = params.get(mirrored(name, params))
        if like is None or _cut(x.shape[1:], like.shape[1:]) is None:
            return x
        return jax.ShapeDtypeStruct(like.shape, x.dtype)

    leaves = map(whole, leaf_names(last.shared), jax.tree.leaves(last.shared))
    shared = jax.tree.structure(last.shared).unflatten(leaves)
    return structs._replace(opt_state=(*rest, last._replace(shared=shared)))


def joined_blocks(record: Record, arrays: list[Any], old: StatePlacement, prefix: str) -> list[Any]:
    """Return the arrays of a checkpoint, those of a shared state whole on each replica.

    Args:
      record: the record of the checkpoint.
      arrays: its arrays, in order.
      old: its placement.
      prefix: the first part of the names of leaves of a shared state.
    """
    saved = record.only("params").leaves
    places = {x.name.removeprefix("params/"): i for i, x in enumerate(saved)}

    def joined(name: str, x: Any) -> Any:
        i = places.get(mirrored(name, places))
        if not name.startswith(prefix) or i is None:
            return x
        whole = tuple(saved[i].shape[1:])
        if (d := _cut(x.shape[1:], whole)) is None:
            return x
        # Each device of a replica has a part of the dimension, of which replicas have blocks.
        shape = *x.shape[: d + 1], old.parts(i, d), -1, *x.shape[d + 2 :]
        one = np.moveaxis(x.reshape(shape), 0, d + 1).reshape(whole)
        return np.broadcast_to(one, (len(x), *whole))

    return [joined(leaf.name, x) for leaf, x in zip(record.leaves, arrays, strict=True)]


def _split_blocks(shared: PyTree, like: PyTree, params: PyTree, new: StatePlacement) -> PyTree:
    """Return the stacked blocks of a shared state, which is whole on each replica.

    Args:
      shared: stacked NumPy arrays of whole leaves.
      like: types of the stacked blocks.
      params: one copy of the parameters.
      new: the placement of the result.
    """
    places = {name: i for i, name in enumerate(leaf_names(params))}

    def split(name: str, x: np.ndarray, like: Any) -> np.ndarray:
        one = x[0]
        if (d := _cut(like.shape[1:], one.shape)) is None:
            return np.broadcast_to(one, like.shape)
        parts = new.parts(places[mirrored(name, places)], d)
        shape = *one.shape[:d], parts, like.shape[0], -1, *one.shape[d + 1 :]
        return np.moveaxis(one.reshape(shape), d + 1, 0).reshape(like.shape)

    leaves = map(split, leaf_names(shared), *map(jax.tree.leaves, (shared, like)))
    return jax.tree.structure(shared).unflatten(leaves)


def _cut(block: tuple[int, ...], whole: tuple[int, ...]) -> int | None:
    """Return the dimension along which blocks of this shape are parts of a whole array."""
    if len(block) != len(whole):
        return None
    pairs = enumerate(zip(block, whole, strict=True))
    return next((d for d, (a, b) in pairs if a != b), None)


def one_copy(stacked_params: PyTree) -> PyTree:
    """Return the types of one copy of stacked parameters."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stacked_params)


def _consensus(params: PyTree, shares: Shares, old: StatePlacement) -> PyTree:
    """Return one copy of the weighted mean of parameters and of what is in flight."""
    weights = [np.broadcast_to(np.asarray(w, np.float64), old.replicas) for w, _ in shares]
    total = sum(float(w.sum()) for w in weights)

    def mean(leaf: np.ndarray, *others: np.ndarray) -> np.ndarray:
        if len(shares) == 1 and np.all(leaf == leaf[:1]):
            return leaf[0]  # exact if all replicas have the same values
        terms = zip(weights, (leaf, *others), strict=True)
        weighted_sum = sum(np.tensordot(w, x.astype(np.float64), axes=1) for w, x in terms)
        return np.asarray(weighted_sum / total).astype(leaf.dtype)

    return jax.tree.map(mean, params, *(values for _, values in shares[1:]))


def _is_scale(x: Any) -> bool:
    return isinstance(x, DynamicLossScaleState)


def _keys(step: int, seed: int, new: StatePlacement) -> Any:
    """Return the data of a new key for each replica, which differs from the key of a new run."""

    def of_replica(replica: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), replica)
        return jax.random.key_data(jax.random.fold_in(key, step))

    with jax.transfer_guard("allow"):  # of a few numbers
        return np.asarray(jax.vmap(of_replica)(jnp.arange(new.replicas)))


def _numbered_keys(data: Any, struct: Any, new: StatePlacement) -> Any:
    """Return the data of each replica's keys of the model, derived from replica 0's as at init."""
    with jax.transfer_guard("allow"):  # of a few numbers
        keys = jax.random.wrap_key_data(data, impl=jax.random.key_impl(jnp.empty((), struct.dtype)))
        numbered = jax.vmap(lambda replica: numbered_key(keys, replica))(jnp.arange(new.replicas))
        return np.asarray(jax.random.key_data(numbered))


def _notes(state: TrainState, shares: Shares, old: int, new: int) -> list[str]:
    """Return sentences that say what `resized` did for `new` replicas from `old` ones."""
    weighted = " weighted with the push-sum weights" if np.ndim(shares[0][0]) else ""
    flight = ", what was in flight included" if len(shares) > 1 else ""
    notes = [
        f"{new} replicas start from the consensus of {old}: the mean of their parameters"
        f"{weighted}{flight}.",
        "Counters go on, and with them the phase of the period.",
    ]
    averaged = jax.tree.leaves((state.opt_state[:-1], state.model_state))
    if any(jnp.issubdtype(x.dtype, jnp.floating) and x.size for x in averaged):
        notes.append(
            "Floating-point state of the gradient transform (error feedback), the optimizer and "
            "the model was averaged over replicas; integers are replica 0's."
        )
    if any(map(_is_scale, jax.tree.leaves(state.opt_state[:-1], is_leaf=_is_scale))):
        notes.append("The loss scale and its counters are those of the replica with the least one.")
    notes.append("PRNG keys of the replicas were made anew from the seed and the step.")
    return notes
