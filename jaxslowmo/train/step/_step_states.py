"""How the states lie that a step is given, and what it refuses of them and of windows."""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ..._support.types import AxisName, PyTree
from ...gradients.precision import loss_scale_of
from ...mesh import AnyMesh, VirtualMesh, axis_names, inner_specs, model_axes, specs_key, specs_over
from ...transform import NoExchangeState, ParameterTransform, has_origin
from ...tree import leaf_names, not_floating
from .._train_state import KnownLayout, StateLayout, TrainState
from ._probe import check_remembered
from ._transforms import check_transforms
from .update import AnyLookup, GradientWindow, StepParts


def check_state(
    state: TrainState,
    parts: StepParts,
    mesh: AnyMesh,
    mode: str,
    warn: Callable[[str], None],
    *,
    is_first: bool,
) -> None:
    """Refuse what can be said of a step's transforms only when there is a state, and warn of it.

    Args:
      state: of the step.
      parts: of the step.
      mesh: of the step.
      mode: of the step.
      warn: issues each message once.
      is_first: whether this is the first state of the step; what follows from its types is not
        asked again.

    Communication: none.
    """
    sync, lookup = parts.sync, parts.lookup
    refuse_untrainable(lookup.dense(state.params))
    check_transforms(state, parts, mesh, mode, is_first=is_first)
    computes = None if parts.policy is None else parts.policy.compute
    if computes == "float16" and loss_scale_of(state.opt_state) is None:
        warn(
            '`policy` is js.Policy("float16"), and `optimizer` has no loss scale, so that '
            "gradients below 6e-8 become 0: put js.dynamic_loss_scale(...) around `optimizer`, "
            'or use js.Policy("bfloat16"). If the loss function scales its loss by itself, '
            "nothing is wrong."
        )
    if sync is not None and is_first:
        params, own = lookup.dense(state.params), lookup.dense(state.opt_state[1])
        kinds = _classes_in(own) - _classes_in(params)
        unknown = sorted(kind.__name__ for kind in kinds if _is_foreign(kind))
        if not all(map(_has_class, jax.tree.leaves(own, is_leaf=_has_class))):
            unknown = unknown or ["arrays without a class"]
        has_sam = any(kind.__name__ == "SAMState" for kind in kinds)
        if unknown or has_sam:
            tried = parts.optimizer, params, sync, warn
            check_remembered(*tried, unknown=unknown, has_sam=has_sam)


def _has_class(x: Any) -> bool:
    """Return whether `x` is a NamedTuple, by whose class an optimizer's state is known."""
    return hasattr(type(x), "_fields")


def _classes_in(tree: PyTree) -> set[type]:
    """Return the classes of all NamedTuples in a tree, those inside of others too."""
    classes: set[type] = set()

    def note(x: Any) -> bool:
        if _has_class(x):
            classes.add(type(x))
        return False

    jax.tree.leaves(tree, is_leaf=note)
    return classes


def _is_foreign(kind: type) -> bool:
    """Return whether nothing is known of copies of the parameters in states of this class."""
    known = kind.__module__.partition(".")[0] in ("optax", "jaxslowmo")
    return not known and not has_origin(kind)


def check_shards(shards: list[Any]) -> None:
    """Raise `ValueError` for shards of which each replica has the same one.

    Another library's `unreplicate` takes replica 0's, and the rest of the anchor is lost. The first
    elements are compared of what this process holds: a glance, not a proof.

    Args:
      shards: stacked arrays (replicas, rows, lanes), on devices; others are not looked at.

    Communication: device to host, a few elements per replica; none between replicas.
    """
    known = [x for x in shards if isinstance(x, jax.Array) and not isinstance(x, Tracer)]
    parts = [_glance(x) for x in known]
    # Parameters that start as one number have such shards, too.
    telling = any(len(x) > 1 and x.size and np.ptp(x[0]) for x in parts)
    if telling and all(np.all(x == x[:1]) for x in parts):
        raise ValueError(
            "`state`: every replica keeps another part of the anchor and of what goes with it, and "
            "here all have replica 0's: the state was made from one replica's, as "
            "`flax.jax_utils.unreplicate` and `x[0]` give it, and the rest is lost. Save all of "
            "it, by jaxslowmo.checkpoint or stacked as it is; for one copy of the parameters take "
            "`js.consensus`."
        )


_GLANCE = 64


def _glance(x: jax.Array) -> np.ndarray:
    """(replicas here, n) first elements of (replicas, rows, lanes), as this process holds them."""
    parts = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
    rows = math.ceil(_GLANCE / max(x.shape[-1], 1))
    found = [np.asarray(parts[start][:, :rows]) for start in sorted(parts)]
    return np.concatenate([part.reshape(len(part), -1) for part in found])


def refuse_others(state: TrainState) -> None:
    """Raise `ValueError` for what is no state."""
    if not all(hasattr(state, name) for name in TrainState._fields):
        raise ValueError(
            "`state` must be a js.TrainState, as `step.init(params)` makes it and the step returns "
            f"it, got {type(state).__name__}."
        )


def refuse_donated(state: TrainState) -> None:
    """Raise `ValueError` for a state whose buffers are gone, with which jax 0.10 may crash.

    Of parameters and optimizer the first array is looked at: what donates one donates all.
    """
    for x in (state.step, state.rng, first_array(state.params), first_array(state.opt_state)):
        if _is_gone(x):
            raise ValueError(
                "`state` was given to a step before, which reuses its buffers (donate=True): go on "
                "with the state that this step returned, or make the step with donate=False."
            )


def refuse_untrainable(params: PyTree) -> None:
    """Raise `ValueError` for parameters that have no gradient, or none that optimizers can follow.

    jax refuses to differentiate integers, and optimizers would move complex numbers to the wrong
    side: their gradients are conjugated.
    """
    if wrong := not_floating(params):
        raise ValueError(
            "`params`: a training step differentiates real floating-point leaves only, got "
            f"{', '.join(wrong)}. Pass other leaves to `step.init` as `model_state`, which the "
            "loss function is given and returns, or let it close over them. Instead of a complex "
            "leaf that shall be trained give real and imaginary part, and join them in the loss "
            "function by `jax.lax.complex`."
        )


def refuse_state_of_others(state: TrainState, parts: StepParts) -> None:
    """Raise `ValueError` for the state of a step with another `sync` or `gradients`, by its class.

    What the optimizer keeps is not looked at, nor what has no class of its own.
    """
    sync, gradients = parts.sync, parts.gradients
    members = isinstance(state.opt_state, tuple) and len(state.opt_state) == 3
    first, *_, last = state.opt_state if members else 2 * (state.opt_state,)
    wanted = [
        ("sync", last, NoExchangeState if sync is None else sync.state),
        ("gradients", first, optax.EmptyState if gradients is None else None),
    ]
    for argument, held, kind in wanted:
        if kind is not None and not isinstance(held, kind):
            raise ValueError(
                f"`state` must come from a step with the same `{argument}`: this step keeps "
                f"{kind.__name__} for it, and `state.opt_state` has {type(held).__name__}. Make "
                "the state by this step's `init`; `state.params` go over by `js.consensus`."
            )


def refuse_unusable_window(window: Any, state: TrainState, weight: Any = ...) -> None:
    """Raise `ValueError` for what is no window, one that was used, or one of other parameters.

    Also for one of batches unlike this: without a weight that is not looked at.
    """
    if window is None:
        return
    if not isinstance(window, GradientWindow):
        raise ValueError(
            "`window` must be what `step.collect(state, batch)` returns first, got "
            f"{type(window).__name__}."
        )
    if _is_gone(first_array(window.totals)):
        raise ValueError(
            "`window` was given to a step before, which reuses its buffers (donate=True): go on "
            "with the window that `step.collect` returned last, or begin another with None."
        )
    _refuse_others_gradients(window, state)
    if weight is not ... and (weight is None) != (window.weight is None):
        has = "none" if window.weight is None else "some"
        raise ValueError(
            f"`weight` must be given for all batches of a window or for none: those before had "
            f"{has}, and this one has {'none' if weight is None else 'one'}."
        )


def _refuse_others_gradients(window: GradientWindow, state: TrainState) -> None:
    """Raise `ValueError` for sums that are not those of the parameters in `state`."""
    replicas, others = state.step.shape, window.count.shape
    if replicas != others:
        raise ValueError(
            f"`window` must be of the replicas of `state`, {replicas}, got one of {others}."
        )
    params = state.params
    (leaves, structure), (totals, collected) = map(jax.tree.flatten, (params, window.totals))
    pairs = zip(leaves, totals, strict=False)
    if structure == collected and all(x.shape[1:] == total.shape[1:] for x, total in pairs):
        return
    own, given = (
        {name: x.shape[1:] for name, x in zip(leaf_names(tree), jax.tree.leaves(tree), strict=True)}
        for tree in (params, window.totals)
    )
    name = next((n for n in {**own, **given} if own.get(n) != given.get(n)), None)
    if name is None:  # nodes of other types, of which jax tells
        return
    has, holds = (
        f"shape {found[name]}" if name in found else "none of that name" for found in (own, given)
    )
    raise ValueError(
        "`window` must hold gradients of the parameters in `state`, of which it was collected: "
        f"of leaf {name!r} `state` has {has}, and the window {holds}."
    )


def forget(window: GradientWindow) -> None:
    """Let go of the gradients of a window that has become an update.

    No result of that has their shapes, so they cannot be donated; they live until it has run.
    """
    for x in jax.tree.leaves(window.totals):
        if not isinstance(x, Tracer):
            x.delete()


def tells_where_it_lies(state: TrainState) -> bool:
    """Whether all leaves have a place on a mesh: arrays do, shapes alone need not."""
    lies = (getattr(x, "sharding", None) for x in jax.tree.leaves(state))
    return all(isinstance(each, NamedSharding) for each in lies)


def _is_gone(x: Any) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.is_deleted()


def first_array(tree: PyTree) -> Any:
    """Some leaf of `tree`, found without looking at the others; None if it has none."""
    # Every step asks this. Built-in types are told apart ten times faster than abstract ones are.
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, tuple | list):
        return tree if isinstance(tree, jax.Array) else next(iter(jax.tree.leaves(tree)), None)
    for child in tree:
        if (found := first_array(child)) is not None:
            return found
    return None


class Layouts:
    """The layout of one state after the other.

    Args:
      mesh: of the step.
      axis_name: the replica axis.
      lookup: of the step; how what is looked up lies is known.
      sync: its parameter transform.
    """

    def __init__(
        self,
        mesh: AnyMesh,
        axis_name: AxisName,
        lookup: AnyLookup,
        sync: ParameterTransform | None = None,
    ) -> None:
        self._mesh, self._axis_name, self._lookup, self._sync = mesh, axis_name, lookup, sync
        self.last = self._layout(frozenset(), None, None)
        self._noted: KnownLayout | None = None  # of the last state that a program has returned

    def of(self, state: TrainState) -> StateLayout:
        """How parameters lie inside a replica; of a traced state, as those of the last one did.

        Raises:
          ValueError: optimizer or model state that is sharded over axes over which no parameter is.
        """
        known = getattr(state, "known_layout", None)
        if known is self._noted and known is not None:
            return known.layout
        if known is not None and known[:2] == (self._mesh, self._axis_name):
            self.last = known.layout
            return known.layout
        first = first_array(state.params)
        if isinstance(first, Tracer):  # does not tell where it will lie
            return self.last
        axes = model_axes(state.params, self._mesh, self._axis_name)
        specs = inner_specs(state.params, self._mesh, self._axis_name) if axes else None
        found = self._layout(axes, specs, state.params)
        self._refuse_beyond(found, state)
        if isinstance(first, jax.Array):
            self.last = found
        return found

    def note(self, state: TrainState, layout: StateLayout) -> None:
        """Let a state that a program has returned know how it lies.

        It lies where the old one did: on all mapped axes as the program says, else pinned.
        """
        if self._noted is None or self._noted.layout is not layout:
            shards = self._shards(layout)
            self._noted = KnownLayout(self._mesh, self._axis_name, layout, shards)
        state.known_layout = self._noted

    def _shards(self, layout: StateLayout) -> PyTree | None:
        """How `sync` cuts what it keeps in shards: by axes that the compiler handles alone."""
        if self._sync is None or not layout.axes or isinstance(self._mesh, VirtualMesh):
            return None
        if self._sync.shard_specs is not None:
            return specs_over(self._sync.shard_specs, layout.axes)
        # Of Explicit axes the types tell a transform that was given no specs.
        types = zip(self._mesh.axis_names, self._mesh.axis_types, strict=True)
        explicit = layout.axes & {name for name, kind in types if kind == AxisType.Explicit}
        return specs_over(layout.specs, explicit) if explicit else None

    def _refuse_beyond(self, layout: StateLayout, state: TrainState) -> None:
        """Raise `ValueError` for state that is sharded where parameters are not.

        A program holds it whole on all devices along those axes, and would return it so.
        """
        for part in ("opt_state", "model_state"):
            tree = getattr(state, part)
            beyond = sorted(model_axes(tree, self._mesh, self._axis_name) - layout.axes)
            if not beyond:
                continue
            leaves = zip(leaf_names(tree), jax.tree.leaves(tree), strict=True)
            name, leaf = next(
                (name, leaf)
                for name, leaf in leaves
                if model_axes(leaf, self._mesh, self._axis_name) - layout.axes
            )
            raise ValueError(
                f"`state`: `{part}` must not be sharded over axes inside a replica over which no "
                f"parameter is, got {name!r} as {leaf.sharding.spec} and no parameter over "
                f"{beyond}: a step would make it whole on every device. Shard parameters over "
                "these axes too (FSDP; state that mirrors them follows), or leave it whole. "
                "js.slowmo and js.diloco shard what they keep by themselves."
            )

    def _layout(self, axes: frozenset[str], specs: PyTree | None, params: PyTree) -> StateLayout:
        """A layout in which stored parameters lie as they are made, however their arrays do."""
        lookup, replicas = self._lookup, axis_names(self._axis_name)
        inner = tuple(
            a for a in self._mesh.axis_names if a not in {*replicas, *axes, lookup.nested}
        )
        if lookup.nested is not None:
            # The last one: parts along it are dealt out inside of those along the others.
            axes, inner = axes | {lookup.nested}, (*inner, lookup.nested)
            dense = P() if params is None else jax.tree.map(lambda _: P(), lookup.dense(params))
            dense = dense if specs is None else lookup.dense(specs)
            specs = lookup.joined(dense, lookup.specs)
        key = None if specs is None else specs_key(specs)
        return StateLayout(axes, specs, key, inner, (*replicas, *inner))
