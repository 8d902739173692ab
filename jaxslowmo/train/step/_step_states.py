"""The layouts of a step's states, and the checks of states and windows that a step receives."""

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
from ...transform import NoExchangeState, ParameterTransform, instants, known_states
from ...tree import leaf_names, not_floating
from .._train_state import KnownLayout, StateLayout, TrainState
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
    """Check a step's transforms with its state: raise `ValueError`, or warn.

    Args:
      state: a state of the step.
      parts: the parts of the step.
      mesh: the step's mesh.
      mode: the step's mode, `"traced"` or `"host"`.
      warn: a function that issues each message once.
      is_first: whether this is the first state of the step; checks of its types are done only then.

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
        exchanges = [t for t in instants(sync.schedules) if sync.phase(t)]
        for _, known in known_states(lookup.dense(state.opt_state[1])):
            # Its period is not known, but only 1 divides them all.
            if known.between and math.gcd(*exchanges) == 1:
                warn(
                    f"`optimizer` holds {known.name}, which updates in some of its calls only, and "
                    f"`sync` also exchanges in between, where {known.between}. Make `sync_every` a "
                    f"multiple of its period, or {known.instead}."
                )


def of_one_replica(x: Any) -> Any:
    """Return a counter, equal on all replicas, as a NumPy scalar; other leaves unchanged."""
    if np.ndim(x) != 1 or not np.issubdtype(x.dtype, np.integer):
        return x
    local = x.addressable_data(0) if isinstance(x, jax.Array) else x
    return np.asarray(local)[0]


def check_shards(shards: list[Any]) -> None:
    """Raise `ValueError` if all replicas hold the same shard of the sharded state.

    Another library's `unreplicate` keeps replica 0's shard, and the rest of the anchor is lost.
    Only the first elements on this process are compared, so the check can miss an error.

    Args:
      shards: stacked arrays (replicas, rows, lanes), on devices; other values are ignored.

    Communication: device to host, a few elements per replica; none between replicas.
    """
    arrays = [x for x in shards if isinstance(x, jax.Array) and not isinstance(x, Tracer)]
    parts = [_first_elements(x) for x in arrays]
    # Parameters that all start as one number have equal shards and are no error.
    are_varied = any(len(x) > 1 and x.size and np.ptp(x[0]) for x in parts)
    if are_varied and all(np.all(x == x[:1]) for x in parts):
        raise ValueError(
            "`state`: every replica keeps another part of the anchor and of what goes with it, and "
            "here all have replica 0's: the state was made from one replica's, as "
            "`flax.jax_utils.unreplicate` and `x[0]` give it, and the rest is lost. Save all of "
            "it, by jaxslowmo.checkpoint or stacked as it is; for one copy of the parameters take "
            "`js.consensus`."
        )


_NUM_COMPARED = 64  # elements of each shard that are compared


def _first_elements(x: jax.Array) -> np.ndarray:
    """Return the first elements (local replicas, n) of a stacked array (replicas, rows, lanes)."""
    parts = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
    rows = math.ceil(_NUM_COMPARED / max(x.shape[-1], 1))
    blocks = [np.asarray(parts[start][:, :rows]) for start in sorted(parts)]
    return np.concatenate([block.reshape(len(block), -1) for block in blocks])


def refuse_non_state(state: TrainState) -> None:
    """Raise `ValueError` unless `state` has the fields of a `TrainState`."""
    if not all(hasattr(state, name) for name in TrainState._fields):
        raise ValueError(
            "`state` must be a js.TrainState, as `step.init(params)` makes it and the step returns "
            f"it, got {type(state).__name__}."
        )


def refuse_donated(state: TrainState) -> None:
    """Raise `ValueError` for a state whose buffers were donated, with which jax 0.10 may crash.

    Only the first array of parameters and of optimizer state is checked: all are donated together.
    """
    for x in (state.step, state.rng, first_array(state.params), first_array(state.opt_state)):
        if _is_gone(x):
            raise ValueError(
                "`state` was given to a step before, which reuses its buffers (donate=True): go on "
                "with the state that this step returned, or make the step with donate=False."
            )


def refuse_untrainable(params: PyTree) -> None:
    """Raise `ValueError` unless all parameters are real floating-point arrays.

    jax does not differentiate integers. Its gradients of complex numbers are conjugated, and
    optimizers would step in the wrong direction.
    """
    if wrong := not_floating(params):
        raise ValueError(
            "`params`: a training step differentiates real floating-point leaves only, got "
            f"{', '.join(wrong)}. Pass other leaves to `step.init` as `model_state`, which the "
            "loss function is given and returns, or let it close over them. Instead of a complex "
            "leaf that shall be trained give real and imaginary part, and join them in the loss "
            "function by `jax.lax.complex`."
        )


def refuse_state_of_another_step(state: TrainState, parts: StepParts) -> None:
    """Raise `ValueError` if the state belongs to a step with another `sync` or `gradients`.

    Only the classes of their states are compared. The optimizer's state is not checked.
    """
    sync, gradients = parts.sync, parts.gradients
    members = isinstance(state.opt_state, tuple) and len(state.opt_state) == 3
    first, *_, last = state.opt_state if members else 2 * (state.opt_state,)
    expected = [
        ("sync", last, NoExchangeState if sync is None else sync.state),
        ("gradients", first, optax.EmptyState if gradients is None else None),
    ]
    for argument, held, kind in expected:
        if kind is not None and not isinstance(held, kind):
            raise ValueError(
                f"`state` must come from a step with the same `{argument}`: this step keeps "
                f"{kind.__name__} for it, and `state.opt_state` has {type(held).__name__}. Make "
                "the state by this step's `init`; `state.params` go over by `js.consensus`."
            )


def refuse_unusable_window(window: Any, state: TrainState, weight: Any = ...) -> None:
    """Raise `ValueError` unless `window` is None or an unused window of the parameters in `state`.

    Also raise it if only one of `weight` and the window has weights; `...` skips that check.
    """
    if window is None:
        return
    if _is_gone(first_array(window.totals)):
        raise ValueError(
            "`window` was given to a step before, which reuses its buffers (donate=True): go on "
            "with the window that `step.collect` returned last, or begin another with None."
        )
    _refuse_other_parameters(window, state)
    if weight is not ... and (weight is None) != (window.weight is None):
        has = "none" if window.weight is None else "some"
        raise ValueError(
            f"`weight` must be given for all batches of a window or for none: those before had "
            f"{has}, and this one has {'none' if weight is None else 'one'}."
        )


def _refuse_other_parameters(window: GradientWindow, state: TrainState) -> None:
    """Raise `ValueError` if the window's sums do not have the shapes of the parameters."""
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
    expected, sums = (
        {name: x.shape[1:] for name, x in zip(leaf_names(tree), jax.tree.leaves(tree), strict=True)}
        for tree in (params, window.totals)
    )
    name = next((n for n in {**expected, **sums} if expected.get(n) != sums.get(n)), None)
    if name is None:  # nodes of other types, for which jax raises an error
        return
    has, holds = (
        f"shape {shapes[name]}" if name in shapes else "none of that name"
        for shapes in (expected, sums)
    )
    raise ValueError(
        "`window` must hold gradients of the parameters in `state`, of which it was collected: "
        f"of leaf {name!r} `state` has {has}, and the window {holds}."
    )


def forget(window: GradientWindow) -> None:
    """Delete the gradients of a window that an update has used.

    They cannot be donated, since no result of the update has their shapes. Their memory is freed
    when the update has run.
    """
    for x in jax.tree.leaves(window.totals):
        if not isinstance(x, Tracer):
            x.delete()


def is_placed(state: TrainState) -> bool:
    """Return whether all leaves have a sharding over a mesh; a `ShapeDtypeStruct` may lack one."""
    shardings = (getattr(x, "sharding", None) for x in jax.tree.leaves(state))
    return all(isinstance(each, NamedSharding) for each in shardings)


def _is_gone(x: Any) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.is_deleted()


def first_array(tree: PyTree) -> Any:
    """Return the first leaf of `tree` without flattening it; None if it has no leaf."""
    # Every step calls this. isinstance is ten times faster for built-in than for abstract types.
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, tuple | list):
        return tree if isinstance(tree, jax.Array) else next(iter(jax.tree.leaves(tree)), None)
    for child in tree:
        if (array := first_array(child)) is not None:
            return array
    return None


class Layouts:
    """The layouts of a step's states, of which the last is kept.

    Args:
      mesh: the step's mesh.
      axis_name: the replica axis.
      lookup: the step's lookup, which knows the layout of the stored parameters.
      sync: the step's parameter transform.
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
        self._noted: KnownLayout | None = None  # layout of the last state that a program returned

    def of(self, state: TrainState) -> StateLayout:
        """Return the layout of the parameters inside a replica; for tracers, the last layout.

        Raises:
          ValueError: optimizer or model state that is sharded over axes over which no parameter is.
        """
        noted = getattr(state, "known_layout", None)
        if noted is self._noted and noted is not None:
            return noted.layout
        if noted is not None and noted[:2] == (self._mesh, self._axis_name):
            self.last = noted.layout
            return noted.layout
        first = first_array(state.params)
        if isinstance(first, Tracer):  # a tracer has no sharding yet
            return self.last
        axes = model_axes(state.params, self._mesh, self._axis_name)
        specs = inner_specs(state.params, self._mesh, self._axis_name) if axes else None
        layout = self._layout(axes, specs, state.params)
        self._refuse_beyond(layout, state)
        if isinstance(first, jax.Array):
            self.last = layout
        return layout

    def note(self, state: TrainState, layout: StateLayout) -> None:
        """Store the layout in a state that a program has returned, so that it need not be read.

        The layout is that of the old state: programs fix the shardings of their results.
        """
        if self._noted is None or self._noted.layout is not layout:
            shards = self._shards(layout)
            division = None if self._sync is None else self._sync.division(state.params)
            self._noted = KnownLayout(self._mesh, self._axis_name, layout, shards, division)
        state.known_layout = self._noted

    def _shards(self, layout: StateLayout) -> PyTree | None:
        """Return the specs, over compiler-handled axes, by which `sync` shards its own state."""
        if self._sync is None or not layout.axes or isinstance(self._mesh, VirtualMesh):
            return None
        if self._sync.shard_specs is not None:
            return specs_over(self._sync.shard_specs, layout.axes)
        # A transform without specs knows shardings over Explicit axes from the types.
        types = zip(self._mesh.axis_names, self._mesh.axis_types, strict=True)
        explicit = layout.axes & {name for name, kind in types if kind == AxisType.Explicit}
        return specs_over(layout.specs, explicit) if explicit else None

    def _refuse_beyond(self, layout: StateLayout, state: TrainState) -> None:
        """Raise `ValueError` if state is sharded over axes over which no parameter is.

        A program would gather it on all devices along those axes, and return it unsharded.
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
        """Return a layout in which stored parameters have the specs with which they are made."""
        lookup, replicas = self._lookup, axis_names(self._axis_name)
        inner = tuple(
            a for a in self._mesh.axis_names if a not in {*replicas, *axes, lookup.nested}
        )
        if lookup.nested is not None:
            # It comes last: a batch is split over the other inner axes first.
            axes, inner = axes | {lookup.nested}, (*inner, lookup.nested)
            dense = P() if params is None else jax.tree.map(lambda _: P(), lookup.dense(params))
            dense = dense if specs is None else lookup.dense(specs)
            specs = lookup.joined(dense, lookup.specs)
        key = None if specs is None else specs_key(specs)
        return StateLayout(axes, specs, key, inner, (*replicas, *inner))
