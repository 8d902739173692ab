"""Conversion of a saved state, on the host, to the form that a run has now.

A run may have another number of replicas, other stages, or another algorithm than the checkpoint.
Leaves are found by their names. What the algorithm remembers goes on where names, shapes and dtypes
are the same; the rest begins anew or is dropped.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._support.types import PyTree
from ..gradients.precision import DynamicLossScaleState
from ..mesh import Shares, fold_in_number
from ..train import ExchangingStep, ReplicaState, TrainState, TrainStep
from ..transform import Algorithm, ParameterTransform, is_state_of, shift_copies
from ..tree import in_model_form, matching_suffix
from ._record import (
    SHARED,
    CheckpointError,
    LeafRecord,
    Record,
    epath,
    host_fingerprint,
    is_key,
    leaves_by_name,
    make_record,
)
from ._stages import (
    moved_note,
    names_in_buffers,
    param_packings,
    read_stored_leaf,
    stored_leaves,
    to_stage_buffers,
)

Shapes = Mapping[str, tuple[int, ...]]
NUM_LISTED = 5  # differences in a message
_EXCHANGE = "exchange/local", SHARED.rstrip("/")  # begin the names of leaves of the algorithm
_OPTIMIZERS = "opt_state/", "exchange/gradients/"
FLIGHT = re.compile(r"exchange/local/(base/)*in_flight/")
_OUTER = re.compile(rf"{SHARED}(?:base/)*outer(?=/|$)")


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


def convert_state(
    path: epath.Path, record: Record, template: Template
) -> tuple[list[Any], bool, list[str]]:
    """Return a saved state in the form of this run.

    Args:
      path: path of the checkpoint.
      record: its record.
      template: template of the state to restore.

    Returns:
      The leaves of the state as NumPy arrays, keys as their data; whether every value is as it was
      saved; and sentences that say what was done.

    Raises:
      CheckpointError: leaves of another model or optimizer, before arrays are read; or leaves that
        belong to no parameter.

    Communication: none.
    """
    step, now = template.train_step, template.record
    structs: Any = template.structs
    of_library = isinstance(step, ExchangingStep)
    view: Callable[[Any], TrainState] = step.as_train_state if of_library else lambda state: state
    form, parts = in_model_form(structs), view(structs)
    wanted = {leaf.name: leaf for leaf in make_record(form).leaves}
    name_of = {id(x): name for name, x in zip(wanted, jax.tree.leaves(form), strict=True)}
    parameters = jax.tree.map(lambda x: name_of[id(x)], view(form).params)
    before = _leaves_by_new_name(record, wanted, template.names)
    _check_leaves(path, before, wanted)
    moves = record.layout != now.layout
    layouts = [x for x in (record.layout, now.layout) if x] if moves else []
    inside = [names_in_buffers(layout) for layout in layouts]
    if moves:
        _check_movable(path, layouts, inside, before.values(), _stage_independent_leaves(parts))
    arrays = record.read(path, [None] * len(record.leaves))
    record.check_fingerprints(path, [host_fingerprint(x) for x in arrays])
    stored = {
        x.name: x for x in stored_leaves(record.layout, [leaf.name for leaf in record.leaves])
    }
    values = {name: read_stored_leaf(stored[leaf.name], arrays) for name, leaf in before.items()}
    params = to_stage_buffers(parts.params, jax.tree.map(values.__getitem__, parameters))
    algorithm = None
    if step.sync is not None:
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), parts.params)
        algorithm = step.sync.bound(step.mesh.shape, one).algorithm
    exchange, notes = convert_exchange_state(
        _exchange_leaves(wanted),
        _exchange_leaves(values),
        {own: wanted[name].own_shape for own, name in leaves_by_name(parameters).items()},
        lambda: _init_exchange(algorithm, params, parts, record.replicas),
        keeps_flight=record.empty == now.empty and _has_same_exchange(before, wanted, inside),
    )
    values |= exchange
    state = to_stage_buffers(
        structs, jax.tree.structure(form).unflatten(values[name] for name in wanted)
    )
    if record.replicas != now.replicas:
        result, others = resize_replicas(
            view(state), parts, step.sync, algorithm, record.step, template.seed
        )
        state = step.from_train_state(result) if of_library else result
        kept = before.keys() & wanted.keys()
        for pattern, text in _EXCHANGE_NOTES.items():
            others += [text] * any(re.match(pattern, name) for name in kept)
        notes = [*others, *notes]
    is_exact = record.replicas == now.replicas and not notes
    notes = [moved_note(record.layout, now.layout), *notes] if moves else notes
    return jax.tree.leaves(state), is_exact, notes


def _leaves_by_new_name(
    record: Record, wanted: Mapping[str, LeafRecord], names: Mapping[str, str]
) -> dict[str, LeafRecord]:
    """Return the leaves of a checkpoint by the names that this run has for them."""
    saved = {leaf.name: leaf for leaf in record.without_stages().leaves}
    sources = {name: name for name in wanted}
    for name in wanted.keys() - saved.keys():
        if param := matching_suffix(name, names):
            sources[name] = f"{name.removesuffix(param)}{names[param]}"
    found = {name: saved[other] for name, other in sources.items() if other in saved}
    copies = {n for _, packing in param_packings(record.layout) for n in packing["copies"]}
    # A tied parameter has one name in one form of a model, and two in another.
    dropped = {name for name in saved if names and matching_suffix(name, copies)}
    dropped |= {leaf.name for leaf in found.values()}
    return found | {name: leaf for name, leaf in saved.items() if name not in dropped}


def _check_leaves(
    path: epath.Path, saved: Mapping[str, LeafRecord], wanted: Mapping[str, LeafRecord]
) -> None:
    """Raise `CheckpointError` unless both have the same leaves, those of exchanges left out."""
    wrong = []
    for name in dict.fromkeys([*wanted, *saved]):
        fresh, then = wanted.get(name), saved.get(name)
        then = widen_dtype(then, fresh) if then and fresh else then
        texts = ["missing" if x is None else x.text() for x in (then, fresh)]
        if texts[0] != texts[1] and not name.startswith(_EXCHANGE):
            wrong.append(f"{name} is {texts[0]} in the checkpoint and {texts[1]} in this run")
    # Another model explains all the rest.
    if wrong := [text for text in wrong if text.startswith("params/")] or wrong:
        raise CheckpointError(
            f"{path} is of another model, optimizer or gradient transform: "
            f"{_join_first(wrong, '; ')}."
        )


def _join_first(texts: Sequence[str], separator: str) -> str:
    more = [f"and {len(texts) - NUM_LISTED} more"] if len(texts) > NUM_LISTED else []
    return separator.join([*texts[:NUM_LISTED], *more])


def widen_dtype(leaf: LeafRecord, now: LeafRecord) -> LeafRecord:
    """Return a saved leaf with the dtype of a fresh one if that may widen.

    The first update may widen the state of an optimizer:
    `optax.inject_hyperparams(hyperparam_dtype=...)` multiplies moments in half precision by float32
    hyperparameters.
    """
    fresh, dtype = jnp.dtype(now.dtype), jnp.dtype(leaf.dtype)
    floating = all(jnp.issubdtype(x, jnp.floating) for x in (fresh, dtype))
    is_wider = floating and dtype.itemsize > fresh.itemsize and leaf.name.startswith("opt_state/")
    return leaf._replace(dtype=now.dtype) if is_wider else leaf


def _stage_independent_leaves(structs: TrainState) -> set[str]:
    """Return the names of leaves of optax transforms outside of trees of stages.

    They are equal on all stages, because of `over_stages`. States of transforms that exchange are
    not among them.
    """

    def exchanges(x: Any) -> bool:
        return is_state_of(x, "gradients") or is_state_of(x, "parameters")

    others = jax.tree.map(
        lambda x: None if exchanges(x) else x, structs.opt_state, is_leaf=exchanges
    )
    return set(leaves_by_name({"opt_state": others}))


def _check_movable(
    path: epath.Path,
    layouts: Sequence[Mapping[str, Any]],
    inside: Sequence[Mapping[str, bool]],
    leaves: Collection[LeafRecord],
    free: Collection[str],
) -> None:
    """Raise `CheckpointError` for leaves that cannot be moved to another layout by their names.

    Args:
      path: path of the checkpoint, for the message.
      layouts: the layouts of checkpoint and run, of those that have stages.
      inside: for each of them the names in its stages, and whether they belong to a parameter.
      leaves: the leaves of the checkpoint in the model's tree.
      free: names of leaves that depend on no stage.
    """
    copies = [{n for _, packing in param_packings(x) for n in packing["copies"]} for x in layouts]
    if copies[0] != copies[-1]:
        raise CheckpointError(
            f"{path} has other tied parameters than this run: {sorted(copies[0] ^ copies[-1])} are "
            "copies of others in one of the two."
        )
    wrong = [
        f"{leaf.name} {list(leaf.own_shape)}"
        for leaf in leaves
        if leaf.name.startswith(_OPTIMIZERS) and leaf.name not in free and not leaf.key_impl
        # Outside of the trees of stages counters are allowed, and larger leaves are not.
        if not all(names.get(leaf.name, math.prod(leaf.own_shape) < 2) for names in inside)
    ]
    if wrong:
        raise CheckpointError(
            f"{path} is from other stages, and holds what cannot be distinguished by parameter: "
            f"{', '.join(wrong)}. Go on with the stages that it had."
        )


# The state of another algorithm.


def _exchange_leaves(leaves: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in leaves.items() if name.startswith(_EXCHANGE)}


def _has_same_exchange(
    saved: Mapping[str, LeafRecord],
    wanted: Mapping[str, LeafRecord],
    inside: Sequence[Mapping[str, bool]],
) -> bool:
    """Return whether what each replica has for its exchanges is of one form, also in stages."""
    forms = [
        {name: x.text() for name, x in leaves.items() if name.startswith(_EXCHANGE[0])}
        for leaves in (saved, wanted)
    ]
    # Parts of a stage's buffer are of no parameter.
    is_moved = any(
        FLIGHT.match(name) and leaf.own_shape and name not in names
        for name, leaf in saved.items()
        for names in inside
    )
    return forms[0] == forms[1] and not is_moved


def _init_exchange(
    algorithm: Algorithm | None, params: PyTree, structs: TrainState, replicas: int
) -> dict[str, Any]:
    """Return the first arrays of exchanges of saved parameters by name, in the model's trees."""
    assert algorithm is not None, "without one there are no leaves"
    with jax.transfer_guard("allow"):
        one = jax.tree.map(lambda x: jnp.asarray(replica_average(x)), params)
        local = jax.tree.map(lambda x: broadcast_to_replicas(x, replicas), algorithm.local(one))
        shared = jax.tree.map(np.asarray, algorithm.shared(one))
    exchange = structs.exchange._replace(local=local, shared=shared, gradients=())
    return leaves_by_name({"exchange": in_model_form(exchange)})


def convert_exchange_state(
    wanted: Mapping[str, LeafRecord],
    saved: Mapping[str, Any],
    params: Shapes,
    init_arrays: Callable[[], Mapping[str, Any]],
    *,
    keeps_flight: bool,
) -> tuple[dict[str, Any], list[str]]:
    """Return the arrays of another algorithm, and sentences that say what was begun or dropped.

    Args:
      wanted: its leaves by name.
      saved: the arrays of a checkpoint by name, stacked for the replicas that it has.
      params: the shapes of the parameters by name.
      init_arrays: function that returns the first arrays of all leaves, for the saved parameters.
      keeps_flight: whether what is in flight can arrive: nothing but the replicas has changed.
    """
    remaining, notes = dict(saved), list[str]()
    drops_flight = not keeps_flight and any(map(FLIGHT.match, saved))
    if drops_flight:
        remaining = {name: x for name, x in saved.items() if not FLIGHT.match(name)}
        notes.append("What was in flight is dropped.")
    before, shapes = remaining.keys(), {name: leaf.own_shape for name, leaf in wanted.items()}
    remaining = _regroup_fragments(shapes, remaining, params)
    if remaining.keys() != before:
        notes.append(
            "The state of the outer optimizer goes on in other fragments; counts are the largest."
        )
    found, fresh_names = {}, []
    for name, leaf in wanted.items():
        x = remaining.get(name)
        first = 0 if name.startswith(SHARED) else 1  # the dimension after that of the replicas
        if x is not None and (x.shape[first:], x.dtype) == (leaf.own_shape, leaf.dtype):
            found[name] = remaining.pop(name)
        else:
            fresh_names.append(name)
    initial = init_arrays() if fresh_names else {}
    for name in fresh_names:
        found[name] = x = initial[name]
        anchor = found.get(_anchor_name(name, wanted)) if "/sent/reference" in name else None
        if anchor is not None:
            # Replicas measure from the anchor, so that the way since the last slow step counts.
            found[name] = np.broadcast_to(anchor, x.shape).astype(x.dtype)
    lost = [name for name in remaining if "/sent/residual" in name]
    if lost and not any("/sent/residual" in name for name in wanted):
        notes.append("What the codec had not sent is dropped.")
    dropped = [name for name in remaining if name not in lost]
    fresh_names = [name for name in fresh_names if not (drops_flight and FLIGHT.match(name))]
    states = ("its", dropped, "is dropped"), ("this run's", fresh_names, "begins anew")
    for whose, names, text in states:
        trees = [*dict.fromkeys(_tree_and_param(name, params)[0] for name in names)]
        if trees:
            listed = _join_first(trees, ", ")
            notes.append(f"The checkpoint has another algorithm: of {whose} state {listed} {text}.")
    return found, notes


def _regroup_fragments(wanted: Shapes, saved: dict[str, Any], params: Shapes) -> dict[str, Any]:
    """Return saved arrays, states of outer optimizers by the names of other fragments.

    Trees like the parameters, such as momentum, have one order whatever the fragments are. Of other
    leaves, such as counts, each fragment has its own: all get the largest.
    """
    for prefix in dict.fromkeys(m[0] for name in wanted if (m := _OUTER.match(name))):
        old, new = (
            {name: x for name, x in shapes.items() if (m := _OUTER.match(name)) and m[0] == prefix}
            for shapes in ({name: x.shape for name, x in saved.items()}, wanted)
        )
        is_part = re.compile(rf"{prefix}/(moments/\d+|rest/\d+/\d+$)").match
        if old.keys() == new.keys() or not any(map(is_part, [*old, *new])):
            continue
        (trees, rest), (new_trees, new_rest) = (
            _group_by_tree(x, prefix, params) for x in (old, new)
        )
        if [*map(list, trees)] != [*map(list, new_trees)] or len(rest) != len(new_rest):
            continue  # another optimizer
        found = {name: x for name, x in saved.items() if name not in old}
        for tree, new_tree in zip(trees, new_trees, strict=True):
            found |= {new_tree[param]: saved[name] for param, name in tree.items()}
        for names, new_names in zip(rest, new_rest, strict=True):
            largest = np.max([saved[name] for name in names], axis=0)
            found |= dict.fromkeys(new_names, largest)
        saved = found
    return saved


def _group_by_tree(
    shapes: Shapes, prefix: str, params: Shapes
) -> tuple[Sequence[dict[str, str]], Sequence[list[str]]]:
    """Return the names in each tree like the parameters, and those of each other leaf.

    A tree maps names of parameters; another leaf has a name for each fragment.
    """
    trees: dict[str, dict[str, str]] = {}
    rest: dict[str, list[str]] = {}
    for name, shape in shapes.items():
        tree, param = _tree_and_param(name, params)
        if params.get(param) == shape:
            trees.setdefault(tree, {})[param] = name
        else:
            of_fragment = re.fullmatch(rf"{prefix}/rest/\d+/(\d+)", name)
            rest.setdefault(of_fragment[1] if of_fragment else name, []).append(name)
    return [*trees.values()], [*rest.values()]


def _tree_and_param(name: str, params: Shapes) -> tuple[str, str]:
    """Return the name of the tree in which a leaf mirrors a parameter, and of that; "" if none."""
    if [*params] == ["(root)"]:  # the parameters are one array, without a name
        return name, "(root)"
    param = matching_suffix(name, params)
    return (name.removesuffix(f"/{param}"), param) if param else (name, "")


def _anchor_name(reference: str, names: Mapping[str, Any]) -> str:
    """Return the name of the anchor whose algorithm has this reference."""
    before, _, leaf = reference.partition("sent/reference")
    levels = before.count("base/")
    # A guard counts what it has refused, and has no shared state of its own.
    guards = sum(f"exchange/local/{'base/' * i}refused" in names for i in range(levels))
    return f"{SHARED}{'base/' * (levels - guards)}anchor{leaf}"


# Another number of replicas.


def resize_replicas(
    state: TrainState,
    structs: TrainState,
    sync: ParameterTransform | None,
    algorithm: Algorithm | None,
    step: int,
    seed: int,
) -> tuple[TrainState, list[str]]:
    """Convert a state to another number of replicas.

    Args:
      state: the state, NumPy arrays stacked as they were saved, PRNG keys as their data.
      structs: a fresh state of the new run; only its structure and types matter.
      sync: the parameter transform of the new run, or None.
      algorithm: its algorithm for the parameters and the mesh of the new run, or None.
      step: number of updates so far.
      seed: seed of new keys.

    Returns:
      The state, NumPy arrays stacked for the new replicas, and sentences that say what was done.
    """
    old, new = len(state.step), len(structs.step)
    shares: Shares = [(1.0, None)] if sync is None else sync.shares(state.exchange)  # pyright: ignore
    params = jax.tree.map(
        lambda x: broadcast_to_replicas(x, new), consensus(state.params, shares, old)
    )

    def resize(tree: PyTree) -> PyTree:
        return jax.tree.map(resize_leaf, tree, is_leaf=_is_scale)

    def resize_leaf(x: Any) -> Any:
        if not _is_scale(x):
            return broadcast_to_replicas(replica_average(x), new)
        # Take the smallest scale: a mean would be no power of two, and too large for that replica.
        # Of several replicas with that scale, take the one that is furthest from its next growth.
        replica = np.lexsort((x.growth_count, x.loss_scale))[0]
        values = [broadcast_to_replicas(leaf[replica], new) for leaf in x[:-1]]
        return DynamicLossScaleState._make([*values, resize(x.inner)])

    def renew_keys(x: Any, struct: Any, average: Any) -> Any:
        return _numbered_keys(x[0], struct, new) if is_key(struct) else average

    exchange = state.exchange
    local = resize(exchange.local)
    if algorithm is not None:
        with jax.transfer_guard("allow"):  # `reset` makes zeros and ones
            local = jax.tree.map(np.asarray, algorithm.reset(local))
    # Copies of parameters in an optimizer get their unweighted mean. If the consensus is weighted,
    # they are shifted by the difference of the parameters' consensus and their unweighted mean.
    shift = jax.tree.map(lambda a, b: a - b, params, resize(state.params))
    held = exchange.gradients, state.opt_state, state.model_state
    gradients, opt_state, model_state = shift_copies(resize(held), shift)
    result = TrainState(
        step=resize(state.step),
        params=params,
        opt_state=opt_state,
        model_state=jax.tree.map(renew_keys, state.model_state, structs.model_state, model_state),
        rng=_new_keys(step, seed, new),
        exchange=exchange._replace(local=local, gradients=gradients),
    )
    has_keys = any(map(is_key, jax.tree.leaves(structs.model_state))) or len(structs.rng) > 0
    return result, _resize_notes(state, shares, new, has_keys=has_keys)


def consensus(params: PyTree, shares: Shares, replicas: int) -> PyTree:
    """Return one copy of the weighted mean of parameters and of what is in flight."""
    weights = [np.broadcast_to(np.asarray(w, np.float64), replicas) for w, _ in shares]
    total = sum(float(w.sum()) for w in weights)

    def mean(leaf: np.ndarray, *others: np.ndarray) -> np.ndarray:
        if len(shares) == 1 and np.all(leaf == leaf[:1]):
            return leaf[0]  # exact if all replicas have the same values
        terms = zip(weights, (leaf, *others), strict=True)
        weighted_sum = sum(np.tensordot(w, x.astype(np.float64), axes=1) for w, x in terms)
        return np.asarray(weighted_sum / total).astype(leaf.dtype)

    return jax.tree.map(mean, params, *(values for _, values in shares[1:]))


def replica_average(x: np.ndarray) -> np.ndarray:
    """Return the mean over replicas of a floating leaf, or replica 0's values of other leaves."""
    # Counters are equal on all replicas; keys and flags have no mean. Equal floats stay exact.
    if not jnp.issubdtype(x.dtype, jnp.floating) or np.all(x == x[:1]):
        return x[0]
    # Half precision would lose digits in a sum of many replicas.
    return np.mean(x.astype(np.float64), axis=0).astype(x.dtype)


def broadcast_to_replicas(one: Any, replicas: int) -> Any:
    """Return a view that stacks the same array for every replica."""
    # A copy would multiply the memory of a large model, and each replica's part is read only once.
    one = np.asarray(one)
    return np.broadcast_to(one, (replicas, *one.shape))


def _is_scale(x: Any) -> bool:
    return isinstance(x, DynamicLossScaleState)


def _new_keys(step: int, seed: int, new: int) -> Any:
    """Return the data of a new key for each replica, which differs from the key of a new run."""

    def replica_key(replica: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), replica)
        return jax.random.key_data(jax.random.fold_in(key, step))

    with jax.transfer_guard("allow"):  # of a few numbers
        return np.asarray(jax.vmap(replica_key)(jnp.arange(new)))


def _numbered_keys(data: Any, struct: Any, new: int) -> Any:
    """Return the data of each replica's keys of the model, derived from replica 0's as at init."""
    with jax.transfer_guard("allow"):  # of a few numbers
        keys = jax.random.wrap_key_data(data, impl=jax.random.key_impl(jnp.empty((), struct.dtype)))
        numbered = jax.vmap(lambda replica: fold_in_number(keys, replica))(jnp.arange(new))
        return np.asarray(jax.random.key_data(numbered))


# Sentences about leaves of exchanges on other replicas.
_EXCHANGE_NOTES = {
    rf"{SHARED}(base/)*anchor": "The anchor and slow momentum are kept exactly.",
    "exchange/local/(base/)*anchor": "Anchor and slow momentum of its own, which each replica had, "
    "were averaged.",
    "exchange/local/(base/)*weight$": "Push-sum weights are 1 and nothing is in flight: both are "
    "part of the consensus.",
}


def _resize_notes(state: TrainState, shares: Shares, new: int, *, has_keys: bool) -> list[str]:
    """Return sentences that say what `resize_replicas` did for `new` replicas."""
    weighted = " weighted with the push-sum weights" if np.ndim(shares[0][0]) else ""
    flight = ", what was in flight included" if len(shares) > 1 else ""
    notes = [
        f"{new} replicas start from the consensus of {len(state.step)}: the mean of their "
        f"parameters{weighted}{flight}.",
        "Counters go on, and with them the phase of the period.",
    ]
    held = state.exchange.gradients, state.opt_state, state.model_state
    if any(jnp.issubdtype(x.dtype, jnp.floating) and x.size for x in jax.tree.leaves(held)):
        notes.append(
            "Floats of the gradient transform (error feedback), the optimizer and the model were "
            "averaged; integers are replica 0's."
        )
    if any(map(_is_scale, jax.tree.leaves(held, is_leaf=_is_scale))):
        notes.append("The loss scale and its counters are those of the replica with the least one.")
    if has_keys:
        notes.append("PRNG keys of the replicas were made anew.")
    return notes
