"""Parameter transforms: the optax pair of an algorithm, the checks of its arguments, and its state.

Inside mapped axes `init` makes the state, and in a training step `first_states`.
"""

import dataclasses
import math
import typing
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import PartitionSpec as P

from .._support.checks import ArgumentError, Settings, as_number, warn_once
from .._support.types import AxisName, Phase, PyTree, checks_varying, varying_axes
from ..mesh import (
    AnyMesh,
    Shares,
    axis_names,
    axis_size,
    is_bound,
    leaf_specs,
    placement,
    specs_key,
    typed_specs,
)
from ..tree import (
    at_least_float32,
    check_floating,
    leaf_names,
    matching_suffix,
    params_after_update,
    updates_to,
    zero_unless,
)
from ._algorithm import Algorithm, Carry, UpdateContext
from ._due import Communicate, increment, instants
from ._inner_state import check_fields
from ._optax_states import TypedTransform, moving_states, register_state
from ._replica_group import ReplicaGroup, check_axis_argument
from ._stacked import StackedReplicas, cut_spec

_MUCH = 0.1  # share of a sharded state's bytes that may stay whole without a warning
_WHOLE_ANYWHERE = "Or with `shard_state=False` each replica has all of the state."


class ExchangeState(NamedTuple):
    """The state of a parameter transform."""

    count: jax.Array  # () int32, updates so far; equal on all replicas
    local: PyTree  # what this replica has for itself
    shared: PyTree  # what all replicas have together; this replica's blocks, if it is sharded


register_state(ExchangeState, "parameters", needs_owner=True)


class ParameterTransform(TypedTransform):
    """An optax transform that comes last in a chain and sets the parameters themselves.

    Let y = params + updates. `update` returns the difference of the new parameters and `params`; if
    no exchange is due, the new parameters are y. Its signature is
    `update(updates, state, params, communicate=True, weight=None, phase=None)`:

    * `communicate`: False, or an array that is False on all replicas, skips a due exchange.
    * `weight`: () number >= 0, this replica's share in averages, such as its number of samples. Use
      0 for a replica that has run out of data: its updates are dropped and averages leave it out
      (gossip passes on what it holds), so it follows the others. None weighs all replicas equally.
    * `phase`: the events of this update, a static tuple; the program then holds the collectives of
      these events only. With None the program decides (`lax.cond` on the counter in the state).

    Args:
      algorithm: what it does, a `js.Algorithm`.
      axis_name: mapped axis of the replicas, or several, for an algorithm that names no `groups`.

    Attributes:
      algorithm: the algorithm.
      exchange: `exchange(updates, statistics, state, params, *, moments=None, init=None, **extra)`:
        like `update`, with a list of other floating arrays, such as batch statistics, and the state
        of the inner optimizer with its `init`: copies of parameters in it follow the exchange, and
        moments are reset or averaged if the algorithm does so. It returns
        `(updates, statistics, state, moments)`. An update that averages the parameters averages the
        statistics, too, over the same axes and with the same weights.
      param_specs: `PartitionSpec` per leaf over automatic axes inside a replica, from `with_specs`.

    Raises:
      ValueError: `algorithm` that is no `js.Algorithm`, or that names neither groups nor axes.
    """

    algorithm: Algorithm
    exchange: Callable[..., tuple[PyTree, list[Any], ExchangeState, PyTree]]
    anchor: Callable[[ExchangeState, PyTree], PyTree]
    note_whole_leaves: Callable[..., None]
    param_specs: PyTree | None

    def __new__(
        cls,
        algorithm: Algorithm,
        axis_name: AxisName | None = None,
        *,
        settings: Settings | None = None,
        param_specs: PyTree | None = None,
    ) -> "ParameterTransform":
        """Make the transform of an algorithm."""
        if not isinstance(algorithm, Algorithm):
            raise ValueError(
                f"ParameterTransform: `algorithm` must be a js.Algorithm, got {algorithm!r}."
            )
        if axis_name is not None:
            check_axis_argument("ParameterTransform", "axis_name", axis_name)
            groups = (*algorithm.groups, ReplicaGroup(axis_name))
            algorithm = dataclasses.replace(algorithm, groups=groups)
        if not algorithm.groups and (algorithm.events or algorithm.needs):
            raise ValueError(
                "ParameterTransform: `axis_name` must name the mapped axis of the replicas, since "
                "the algorithm has no `groups`."
            )
        pair = _Pair(algorithm, param_specs)
        self = super().__new__(cls, typing.cast("optax.TransformInitFn", pair.init), pair.update)
        self.algorithm, self.exchange, self.settings = algorithm, pair.exchange, settings
        self.param_specs, self.note_whole_leaves = param_specs, pair.note_whole_leaves
        self.anchor = pair.anchor  # one object, by which compiled programs are found again
        return self

    def __repr__(self) -> str:
        """Return the factory, the arguments that it was given, and how the state is stored."""
        settings = self.settings
        text = f"{self.algorithm.owner} of its own" if settings is None else str(settings)
        return f"<{text}; shared state: sharded>" if self.algorithm.is_sharded else f"<{text}>"

    def phase(self, t: int) -> Phase:
        """Return, on the host, the names of the events of update t = 1, 2, ...; () for none."""
        return self.algorithm.phase(t)

    def phases(self) -> list[Phase]:
        """Return all phases that occur, in order of first appearance."""
        return list(dict.fromkeys(map(self.phase, instants(self.algorithm.schedules))))

    def shares(self, state: Any) -> Shares:
        """Return, on the host, of what the consensus is the weighted mean, for `js.consensus`.

        `state` is a stacked `ExchangeState`, or `exchange` of a train state.

        They are pairs: a weight for each replica, and stacked parameters, or None for the replicas'
        current ones.
        """
        mass = self.algorithm.mass
        return [(1.0, None)] if mass is None else mass(state.local) or [(1.0, None)]

    def due(self, t: Any) -> Any:
        """Return whether update `t` exchanges anything, for an int or an array."""
        return self.algorithm.due(t)

    def bound(
        self, axis_sizes: Mapping[str, int] | None = None, params: PyTree | None = None
    ) -> "ParameterTransform":
        """Return the transform for axes of these sizes by name, and for these parameters.

        Phases of `js.sgp` depend on the number of replicas, and those of an algorithm whose
        `fragments` are a function on the parameters, of which only the types matter.
        """
        return self._replace_algorithm(self.algorithm.bound(axis_sizes, params))

    def with_specs(self, param_specs: PyTree) -> "ParameterTransform":
        """Return the transform for parameters with these layouts inside a replica."""
        if param_specs is None or self.param_specs is not None:
            return self
        return self._replace_algorithm(self.algorithm, param_specs)

    def _replace_algorithm(self, algorithm: Algorithm, param_specs: PyTree | None = None) -> Any:
        specs = self.param_specs if param_specs is None else param_specs
        return ParameterTransform(algorithm, settings=self.settings, param_specs=specs)

    def _replace(self, **changed: Any) -> optax.GradientTransformationExtraArgs:
        return optax.GradientTransformationExtraArgs(**{**self._asdict(), **changed})


def share_of_whole(shared: PyTree, params: PyTree) -> float:
    """Return the share of a sharded state's bytes that each replica has whole.

    Args:
      shared: its arrays or types; of the whole state stacked over replicas, or of one replica.
      params: the parameters, in the same form.
    """
    shapes = {n: x.shape for n, x in zip(leaf_names(params), jax.tree.leaves(params), strict=True)}
    whole = total = 0
    for name, x in zip(leaf_names(shared), jax.tree.leaves(shared), strict=True):
        size = x.size * x.dtype.itemsize
        total += size
        whole += size if x.shape == shapes.get(matching_suffix(name, shapes)) else 0
    return whole / max(1, total)


_Form = tuple[Any, tuple[tuple[tuple[int, ...], Any], ...]]
"""Structure of a tree, and shape and dtype of every leaf."""


class _Pair:
    """The functions of a parameter transform, which check their arguments."""

    def __init__(self, algorithm: Algorithm, param_specs: PyTree | None) -> None:
        self._algorithm, self._specs, self._warn = algorithm, param_specs, warn_once()
        self._owner = algorithm.owner
        # Types of the states that `init` makes, by the types of the parameters.
        self._forms: dict[Hashable, _Form] = {}

    def init(self, params: PyTree) -> ExchangeState:
        """Make the state of `params`."""
        algorithm = self._algorithm
        check_floating(self._owner, params)
        is_inside = all(map(is_bound, algorithm.bound_axes))
        if algorithm.is_sharded:  # whole state can be made outside of the axis
            for group in algorithm.groups:
                group.require_bound(self._owner, _WHOLE_ANYWHERE)
        state = self._first_state(params)
        # With bound axes this is the state that updates expect, so `_check_state` need not trace.
        if is_inside:
            self._forms[self._kind(params)] = _form(state)
        return state

    def _first_state(self, params: PyTree) -> ExchangeState:
        algorithm, start = self._bind_algorithm(params), params
        if algorithm.is_sharded:
            start = algorithm.groups[-1].with_layout(None, self._specs).block(params)
        zero = jnp.zeros([], jnp.int32)
        state = ExchangeState(zero, algorithm.local(params), algorithm.shared(start))
        if algorithm.is_sharded:
            more = " (Of leaves that are sharded inside a replica, `with_specs` must say how.)"
            share = share_of_whole(state.shared, params)
            self.note_whole_leaves(share, algorithm.groups[-1].size, more)
        return state

    def note_whole_leaves(self, share: float, count: int, more: str = "") -> None:
        """Warn, once, if much of a sharded state stays whole on each of `count` replicas."""
        if share > _MUCH and count > 1:
            self._warn(
                f"{self._owner}: of the shared state {share:.0%} of the bytes stay whole on each "
                f"replica, since {count} divides no dimension of these leaves.{more}"
            )

    def _bind_algorithm(self, params: PyTree, stacked: StackedReplicas | None = None) -> Algorithm:
        axes = self._algorithm.axes
        sizes = None
        if stacked is not None:
            sizes = dict(stacked.mesh.shape)
        elif all(map(is_bound, axes)):
            sizes = {a: axis_size(a) for a in axes}
        return self._algorithm.bound(sizes, params)

    def anchor(self, state: ExchangeState, params: PyTree) -> PyTree:
        """Return the anchor as a whole tree like `params`, inside of the mapped axes."""
        held, algorithm = state.shared, self._bind_algorithm(params)
        if "anchor" not in held:  # each replica has one of its own
            held = state.local if "anchor" in state.local else state.local["base"]
        if not algorithm.is_sharded:
            return held["anchor"]
        group = algorithm.groups[-1].with_layout(None, self._specs)
        return group.all_gather(held["anchor"], params)

    def update(
        self, updates: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        """Return new updates and the new state, with the signature of optax."""
        updates, _, state, _ = self.exchange(updates, [], state, params, **extra)
        return updates, state

    def exchange(
        self,
        updates: PyTree,
        statistics: list[Any],
        state: PyTree,
        params: PyTree | None,
        *,
        moments: PyTree = None,
        init: Callable[[PyTree], PyTree] | None = None,
        part: Callable[[PyTree], PyTree] = lambda params: params,
        communicate: Communicate = True,
        weight: Any = None,
        phase: Phase | None = None,
        learning_rate: Any = None,
        stacked: StackedReplicas | None = None,
        after: PyTree | None = None,
        sets_params: bool = False,
        **extra: Any,
    ) -> tuple[PyTree, list[Any], ExchangeState, PyTree]:
        """Return `(updates, statistics, state, moments)` after one update, like `update`.

        With `sets_params` the first result is the new parameters; a parameter whose update is None
        is moved by the exchange alone. With `after`, the parameters after the update, in place of
        `updates` the first result is the new parameters, too.
        """
        # Cheap checks come first, and checks that need an axis after the check that it is bound.
        del extra
        owner = self._owner
        if params is None:
            raise ValueError(
                f"{owner} moves parameters and needs them: call `update(updates, state, params)`."
            )
        check_floating(owner, params)
        if self._algorithm.inner_state != "keep" and init is None:
            raise ArgumentError(
                "inner_state",
                f"{owner}: `inner_state`={self._algorithm.inner_state!r} changes the state of "
                "the optimizer: use js.make_train_step or js.chain, not an optax.chain.",
            )
        algorithm = self._bind_algorithm(params, stacked)
        fields = [event.field for event in algorithm.events if event.field is not None]
        check_fields(owner, fields, moments, part(params))
        groups = [group.with_layout(stacked, self._specs) for group in algorithm.groups]
        self._check_axes(groups)
        share = check_weight(owner, weight)
        self._check_phase(algorithm, phase)
        if after is None:
            updates = unless_idle(updates, share)
        if stacked is None:
            self._check_state(state, params)
            for group in groups:
                check_varying(owner, params, updates, group.axis_name)
        count = increment(state.count)
        context = UpdateContext(count, communicate, share, learning_rate, phase, init, part)
        local, shared = state.local, state.shared
        if after is not None:
            y, updates, sets_params = after, updates_to(params, after), True
        else:
            updates = jax.tree.map(_widen_update, updates)
            y = params_after_update(params, updates) if sets_params else ()
        if algorithm.begin is not None:
            given = updates
            updates, local, shared = algorithm.begin(updates, local, shared, context)
            if sets_params and updates is not given:
                y = params_after_update(params, updates)
        is_changed = algorithm.inner_state != "keep" or moving_states(moments)
        kept = moments if is_changed else None
        carry = Carry(params, y, kept, list(statistics), local, shared)
        updates = None if sets_params else updates
        updates, carry = algorithm.run(
            updates, carry, context, lambda group: group.with_layout(stacked, self._specs)
        )
        state = ExchangeState(count, carry.local, carry.shared)
        updates = carry.params if sets_params else updates
        return updates, carry.statistics, state, moments if kept is None else carry.moments

    def _check_axes(self, groups: Sequence[ReplicaGroup]) -> None:
        """Raise `ValueError` for axes that are not bound; warn if there is nothing to send."""
        for group in groups:
            group.require_bound(self._owner)
            if group.size == 1:
                names = group.axes
                axis = repr(names[0] if len(names) == 1 else names)
                self._warn(
                    f"{self._owner}: axis {axis} has size 1, so there is nothing to communicate."
                )

    @staticmethod
    def _check_phase(algorithm: Algorithm, phase: object) -> None:
        """Raise `ValueError` for a phase that this algorithm does not have."""
        if phase is None:
            return
        names = phase if isinstance(phase, tuple) else ()
        found = [sum(map(event.matches, names)) for event in algorithm.events]
        if not isinstance(phase, tuple) or max(found, default=0) > 1 or sum(found) < len(names):
            raise ValueError(
                f"{algorithm.owner}: `phase` must come from `transform.phase(t)`, names out of "
                f"{[event.name_in_phase(0) for event in algorithm.events]}, got {phase!r}."
            )

    def _check_state(self, state: PyTree, params: PyTree) -> None:
        """Raise `ValueError` for the state of another transform or configuration, by its types."""
        kind = self._kind(params)
        if kind not in self._forms:
            # A state that was restored or made by another object: trace what it should be.
            self._forms[kind] = _form(jax.eval_shape(self._first_state, params))
        expected, actual = self._forms[kind], _form(state)
        if actual != expected:
            raise ValueError(
                f"{self._owner}: `state` must be what this transform's `init` makes for these "
                f"parameters, {_describe_form(expected)}, got {_describe_form(actual)}."
            )

    def _kind(self, params: PyTree) -> Hashable:
        # Blocks of leaves that are sharded inside a replica depend on the mesh, too, which under
        # vmap does not have the axes.
        mesh = jax.sharding.get_abstract_mesh()
        sizes = tuple(map(axis_size, self._algorithm.bound_axes))
        return _form(params), sizes, mesh, specs_key(typed_specs(params))


# Arguments of updates.


def unless_idle(updates: PyTree, weight: jax.Array | None) -> PyTree:
    """Return `updates`, or zeros on a replica of weight 0, whose batch may hold anything."""
    if weight is None:
        return updates
    # Select instead of multiplying: 0 * NaN is NaN.
    alive = weight > 0
    return jax.tree.map(lambda u: zero_unless(alive, jnp.asarray(u)), updates)


def check_varying(owner: str, params: PyTree, updates: PyTree, axis_name: AxisName) -> None:
    """Raise `ValueError` for new parameters whose types say that they are equal on all replicas.

    For parameters that are equal over an axis, `shard_map` with its default check sums gradients
    over that axis.
    """
    tracked = [a for a in axis_names(axis_name) if axis_size(a) > 1 and checks_varying(a)]
    if not tracked:
        return
    # If an update varies, so do the new parameters.
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(updates), strict=False)
    missing = {
        i: ", ".join(map(repr, axes))
        for i, (p, u) in enumerate(pairs)
        if (axes := [a for a in tracked if a not in varying_axes(p) | varying_axes(u)])
    }
    if missing:
        # Naming thousands of leaves is slow, so it is done for a message only.
        names = leaf_names(params)
        wrong = [f"{names[i]} (over {axes})" for i, axes in missing.items()]
        raise ValueError(
            f"{owner}: by their types equal on all replicas, so jax has summed their gradients: "
            f"{', '.join(wrong)}. Use `js.replicate`, or `jax.lax.pcast` before differentiating."
        )


def checked_rate(argument: str, value: Any, below: float = math.inf) -> float | jax.Array:
    """Return a rate or a momentum as a checked float; a traced one has only its type checked."""
    if isinstance(value, Tracer) and not value.shape and jnp.issubdtype(value.dtype, jnp.floating):
        return value.astype(jnp.float32)
    # A plain float is weakly typed: NumPy scalars would widen the state under x64.
    number = as_number(value)
    if number is None or not 0 <= number < below:
        rule = "a finite number >= 0" if below == math.inf else f"a number in [0, {below})"
        raise ArgumentError(argument, f"`{argument}` must be {rule}, got {value!r}.")
    return number


def check_weight(owner: str, weight: Any) -> jax.Array | None:
    """Return `weight` as a () float32 array, or None.

    Raises:
      ValueError: not a real scalar, or a number of Python or NumPy that is below 0 or not finite.
    """
    if weight is None:
        return None
    # Arrays of jax are checked by type, since their values may be traced.
    shape, dtype = jnp.shape(weight), jnp.result_type(weight)
    if shape != () or not (jnp.issubdtype(dtype, jnp.floating) or dtype.kind in "biu"):
        raise ValueError(
            f"{owner}: `weight` must be a real scalar, this replica's share in the mean, got "
            f"{dtype}{list(shape)}."
        )
    if not isinstance(weight, jax.Array) and not 0 <= float(weight) < math.inf:
        raise ValueError(f"{owner}: `weight` must be >= 0 and finite, got {weight}.")
    return jnp.asarray(weight).astype(jnp.float32)


def _widen_update(update: Any) -> jax.Array:
    """Return an update in at least float32, as the optimizer has rounded it."""
    dtype = jnp.result_type(update)
    wide = jnp.asarray(update).astype(at_least_float32(dtype))
    if wide.dtype == dtype:
        return wide
    # XLA leaves out a rounding that a widening follows. Not the exponent is reduced, since that
    # would make small numbers of float16 zero.
    return jax.lax.reduce_precision(wide, 8, jnp.finfo(dtype).nmant)


def _form(tree: PyTree) -> _Form:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((jnp.shape(x), jnp.result_type(x)) for x in leaves)


_NUM_LISTED = 6


def _describe_form(form: _Form) -> str:
    treedef, types = form
    leaves = [f"{dtype}{list(shape)}" for shape, dtype in types]
    tree = treedef.unflatten(leaves)
    lines = [f"{name}: {leaf}" for name, leaf in zip(leaf_names(tree), leaves, strict=True)]
    more = f", and {len(lines) - _NUM_LISTED} more" if len(lines) > _NUM_LISTED else ""
    return f"{type(tree).__name__}({', '.join(lines[:_NUM_LISTED])}{more})"


def phase_name(phase: Phase) -> str:
    """Return the name of a phase in reports: `"local"`, `"average"`, `"average+slow"`, ...

    Args:
      phase: events, as `transform.phase(t)` returns them.

    Returns:
      The events joined by "+"; "local" for none.

    Example:
      >>> phase_name(()), phase_name(("average", "slow"))
      ('local', 'average+slow')

    Communication: none.
    """
    return "+".join(phase) or "local"


# The state in a training step, and where its arrays lie.


def replica_types(stacked: PyTree) -> PyTree:
    """Return the types of one replica's part of stacked arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stacked)


def first_states(
    sync: ParameterTransform,
    stacked_params: PyTree,
    *,
    mesh: AnyMesh,
    axis_name: AxisName,
    param_specs: PyTree | None,
) -> tuple[PyTree, PyTree]:
    """Return the first local and shared state of a transform, for parameters equal on all replicas.

    Args:
      sync: the transform.
      stacked_params: the parameters, leaves (replicas, *s).
      mesh: the mesh on which they lie.
      axis_name: the axis of the replicas, or several.
      param_specs: layout of the parameters inside a replica; None: they are whole there.

    Returns:
      What each replica has for itself, stacked, and what all have together, whose trees like the
      parameters are cut over the replicas. Leaves like the parameters are laid out as these are
      inside a replica.

    Communication: none.
    """
    params = replica_types(stacked_params)
    algorithm = sync.bound(dict(mesh.shape), params).algorithm
    replicas = StackedReplicas(mesh, axis_name)

    def make(stacked: PyTree) -> tuple[PyTree, PyTree]:
        shared = algorithm.shared(replicas.unreplicate(stacked, leaf_specs(param_specs, params)))
        # Each leaf has a buffer of its own, so that the whole state can be donated.
        return jax.tree.map(jnp.copy, (jax.vmap(algorithm.local)(stacked), shared))

    if algorithm.is_sharded is not False and algorithm.groups:
        types = jax.eval_shape(make, stacked_params)[1]
        placement: dict[str, Any] = {"mesh": mesh, "axis_name": axis_name}
        share = share_of_whole_leaves(sync, types, params, param_specs=param_specs, **placement)
        count = math.prod(mesh.shape[name] for name in algorithm.groups[-1].axes)
        sync.note_whole_leaves(share, count)
    group = algorithm.groups[-1] if algorithm.groups else ReplicaGroup(axis_name)
    local, shared = jax.eval_shape(make, stacked_params)
    where = shardings(replica_types(local), shared, params, group, mesh, axis_name, param_specs)
    return jax.jit(make, out_shardings=where)(stacked_params)


def share_of_whole_leaves(
    sync: ParameterTransform,
    shared: PyTree,
    params: PyTree,
    *,
    mesh: AnyMesh,
    axis_name: AxisName,
    param_specs: PyTree | None = None,
) -> float:
    """Return the share of a replica's bytes of shared state that all replicas have whole.

    Args:
      sync: the transform, sized for the mesh.
      shared: its shared state in a step, arrays or types.
      params: types of one copy of the parameters.
      mesh: the mesh of the step.
      axis_name: the axis of the replicas, or several.
      param_specs: layout of the parameters inside a replica.
    """
    group = (
        sync.bound(dict(mesh.shape), params)
        .algorithm.groups[-1]
        .with_layout(StackedReplicas(mesh, axis_name), param_specs)
    )
    shapes = [x.shape for x in jax.tree.leaves(params)]
    cuts = zip(shapes, group.dimensions(params), strict=True)
    known = dict(zip(leaf_names(params), cuts, strict=True))
    whole = total = 0.0
    for name, x in zip(leaf_names(shared), jax.tree.leaves(shared), strict=True):
        shape, cut = known.get(matching_suffix(name, known), (None, None))
        size = x.size * x.dtype.itemsize
        is_cut = shape == x.shape and cut is not None
        total += size / group.size if is_cut else size
        whole += size if shape == x.shape and not is_cut else 0
    return whole / max(1, total)


def shardings(
    local: PyTree,
    shared: PyTree,
    params: PyTree,
    group: ReplicaGroup,
    mesh: AnyMesh,
    axis_name: AxisName,
    param_specs: PyTree | None,
) -> tuple[PyTree, PyTree]:
    """Return the shardings of local state, of one replica, and of shared state, by their types."""
    replicas = StackedReplicas(mesh, axis_name)
    cuts = group.with_layout(replicas, param_specs).dimensions(params)
    names, specs = leaf_names(params), leaf_specs(param_specs, params)
    known = dict(zip(names, zip(jax.tree.leaves(params), specs, cuts, strict=True), strict=True))

    def local_spec(name: str, x: Any) -> P:
        like, spec, _ = _matching_param(name, known)
        is_alike = like is not None and x.ndim == like.ndim and _fits(x.shape, spec, mesh.shape)
        return P(axis_names(axis_name), *(spec if is_alike else ()))

    def shared_spec(name: str, x: Any) -> P:
        like, spec, cut = _matching_param(name, known)
        if like is None or x.shape != like.shape:
            return P()
        return cut_spec(spec, cut, group.axes)

    def to_shardings(tree: PyTree, spec_of: Any) -> PyTree:
        leaves, treedef = jax.tree.flatten(tree)
        pairs = zip(leaf_names(tree), leaves, strict=True)
        return treedef.unflatten([placement(mesh, spec_of(name, x)) for name, x in pairs])

    return to_shardings(local, local_spec), to_shardings(shared, shared_spec)


def _matching_param(name: str, known: Mapping[str, Any]) -> Any:
    if [*known] == ["(root)"]:  # the parameters are one array, without a name
        name = "(root)"
    return known.get(matching_suffix(name, known), (None, P(), None))


def _fits(shape: tuple[int, ...], spec: P, sizes: Mapping[str, int]) -> bool:
    for size, entry in zip(shape, spec, strict=False):
        for axis in axis_names(entry or ()):
            if size % sizes[axis]:
                return False
            size //= sizes[axis]
    return True
