"""Gradient transforms: an optax transform with a `Reduction` that says what it does; and chains."""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, cast

import jax
import jax.numpy as jnp
import optax

from .._support.checks import ArgumentError, Settings, records_settings, warn_user
from .._support.scopes import GRADIENT_TRANSFORM
from .._support.types import AxisName, PyTree
from ..mesh import (
    AnyMesh,
    Layouts,
    axis_names,
    cached_program,
    check_replica_axis,
    check_same_tree,
    inner_layouts,
    map_replicas,
    model_axes,
    replica_count,
    shard_like,
    shard_replicas,
)
from ..tree import Staged
from ._due import Communicate, logical_and, logical_or
from ._optax_states import TypedTransform, check_order, gradient_state, holds_state, moving_states
from ._parameter_transform import ParameterTransform
from ._replica_group import check_axis_argument

TAKEN = frozenset({"weight", "ready_order", "param_specs", "finite", "unscaled"})


class ReducedAxes(NamedTuple):
    """The axes over which an update may reduce gradients at once.

    Attributes:
      axes: names of mapped axes.
      due: whether the next update reduces over them: a bool where that is static, else a () bool
        array that is equal on all replicas.
    """

    axes: tuple[str, ...]
    due: Communicate


@dataclass(frozen=True, kw_only=True, eq=False)
class Reduction:
    """A description of a gradient transform, for other transforms and for the training step.

    Give the attributes that differ from their defaults, and override the methods in a subclass.
    `js.GradientSpec` is this class, too: its older name.

    Attributes:
      axes: names of the mapped axes over which some update reduces gradients.
      takes: the extra arguments that its `update` uses, out of "weight", "ready_order",
        "param_specs", "finite" and "unscaled".
      clips: whether it clips gradients.
      skips: whether it may drop an update.
      returns_updates: whether it holds an optimizer, so that it returns updates of parameters
        instead of gradients.
      of_rows: whether it accepts gradients of rows of tables together with those of dense
        parameters, and treats both in the same way.

    Raises:
      ValueError: `takes` with another name.

    Example:
      >>> class EverySecond(Reduction):
      ...     def due(self, state):
      ...         return state.count % 2 == 1
      >>> EverySecond(axes=("replica",)).reductions(optax.ScaleByScheduleState(count=3))
      [ReducedAxes(axes=('replica',), due=True)]
    """

    axes: tuple[str, ...] = ()
    takes: frozenset[str] = frozenset()
    clips: bool = False
    skips: bool = False
    returns_updates: bool = False
    of_rows: bool = False

    def __post_init__(self) -> None:
        """Raise `ValueError` for names of arguments that no step passes."""
        if wrong := sorted(set(self.takes) - TAKEN):
            raise ValueError(f"Reduction: `takes` must be words of {sorted(TAKEN)}, got {wrong}.")

    def due(self, state: PyTree) -> Communicate:
        """Return whether the next update reduces; by default every update does.

        Args:
          state: state of the transform on one replica, before the update.

        Returns:
          A bool, or a () bool array that is equal on all replicas.
        """
        del state
        return True

    def reductions(self, state: PyTree) -> list[ReducedAxes]:
        """Return the reductions of the next update in order; by default one over all axes."""
        return [ReducedAxes(self.axes, self.due(state))] if self.axes else []

    def unknown(self, state: PyTree) -> list[PyTree]:
        """Return the states of inner transforms that say nothing, such as those of optax."""
        del state
        return []


GradientSpec = Reduction
"""The same class as `js.spec.Reduction`, under its older name."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ChainReduction(Reduction):
    """The description of a transform that runs others one after the other.

    The state of the transform is a tuple of the states of the others, as in a chain.

    Attributes:
      parts: what the others do, in the order in which they run.
    """

    parts: tuple[Reduction, ...]

    @classmethod
    def from_parts(cls, *parts: Reduction, takes: Iterable[str] = (), **values: Any) -> Self:
        """Return what a transform around `parts` does.

        Args:
          *parts: what the inner transforms do, in the order in which they run.
          takes: names of extra arguments that it uses besides those of the parts.
          **values: attributes that are not those of the parts.
        """
        # It clips, skips or returns updates if one part does; rows must pass through all parts.
        of_parts = {
            "axes": tuple(dict.fromkeys(axis for part in parts for axis in part.axes)),
            "clips": any(part.clips for part in parts),
            "skips": any(part.skips for part in parts),
            "returns_updates": any(part.returns_updates for part in parts),
            "of_rows": all(part.of_rows for part in parts),
        }
        every = frozenset(takes).union(*(part.takes for part in parts))
        return cls(parts=parts, takes=every, **(of_parts | values))

    def states(self, state: PyTree) -> Sequence[PyTree]:
        """Return the state of each part."""
        return state

    def calls(self, state: PyTree) -> Sequence[Communicate]:
        """Return for each part whether the next update calls it, as `due` returns it."""
        del state
        return [True] * len(self.parts)

    def due(self, state: PyTree) -> Communicate:
        """Return whether the next update calls a part that then reduces."""
        return functools.reduce(logical_or, [each.due for each in self.reductions(state)], False)

    def reductions(self, state: PyTree) -> list[ReducedAxes]:
        """Return the reductions of the parts that the next update calls."""
        called_parts = zip(self.parts, self.states(state), self.calls(state), strict=True)
        return [
            ReducedAxes(axes, called if due is True else logical_and(due, called))
            for part, part_state, called in called_parts
            for axes, due in part.reductions(part_state)
        ]

    def unknown(self, state: PyTree) -> list[PyTree]:
        """Return the states of transforms that say nothing, of all parts."""
        pairs = zip(self.parts, self.states(state), strict=True)
        return [x for part, part_state in pairs for x in part.unknown(part_state)]


class WrapperReduction(ChainReduction):
    """The description of a wrapper, whose state holds that of what it wraps as `inner`."""

    def states(self, state: PyTree) -> Sequence[PyTree]:
        """Return the state of the wrapped transform."""
        return (state.inner,)


class _Unknown(Reduction):
    """The description of a transform of another library, which may be an optimizer."""

    def unknown(self, state: PyTree) -> list[PyTree]:
        return [state]


_UNKNOWN = _Unknown(returns_updates=True)
_IDENTITY = Reduction(of_rows=True)
_UPDATE_OF_IDENTITY: Any = optax.identity().update


def spec_of(transform: optax.GradientTransformation) -> Reduction:
    """Return what a transform says that it does to gradients, or that it may do anything."""
    # The spec of a parameter transform is of another class.
    spec = getattr(transform, "spec", None)
    if isinstance(spec, Reduction):
        return spec
    # `optax.identity` makes a new function in each call, always of the same code.
    code = getattr(transform.update, "__code__", None)
    return _IDENTITY if code is _UPDATE_OF_IDENTITY.__code__ else _UNKNOWN


class GradientTransform(TypedTransform):
    """An optax transform of gradients with a description of what it does.

    All gradient transforms of this package are such, and `js.gradient_transform` makes one from
    your own optax transform. `js.make_train_step` reads from the spec over which axes to average
    the loss for optimizers that use it, which extra arguments to pass to `update`, and which
    transforms of a `js.chain` are its `gradients`.

    Args:
      init: `init(params) -> state`.
      update: `update(updates, state, params=None, **extra) -> (updates, state)`.
      spec: a `js.spec.Reduction` that describes the transform.

    Attributes:
      spec: the `js.spec.Reduction`. `_replace` with another `init` keeps it; with another `update`
        it returns an `optax.GradientTransformationExtraArgs` without a spec.

    Raises:
      ValueError: `spec` that is no `js.spec.Reduction`.
    """

    spec: Reduction

    def __new__(
        cls,
        init: Callable[[PyTree], PyTree],
        update: Callable[..., tuple[PyTree, PyTree]],
        spec: Reduction,
        settings: Settings | None = None,
    ) -> Self:
        """Make a transform from its functions and its spec."""
        if not isinstance(spec, Reduction):
            raise ValueError(
                f"GradientTransform: `spec` must be a js.spec.Reduction, got {spec!r}."
            )
        self = super().__new__(cls, cast("optax.TransformInitFn", init), update)
        self.spec, self.settings = spec, settings
        return self

    def __repr__(self) -> str:
        """Return the factory and the arguments that it was given."""
        return f"<{self.settings or 'a gradient transform of its own'}>"

    def _replace(self, **changed: Any) -> optax.GradientTransformationExtraArgs:
        pair = {**self._asdict(), **changed}
        if "update" in changed or len(pair) > 2:
            return optax.GradientTransformationExtraArgs(**pair)
        return GradientTransform(**pair, spec=self.spec, settings=self.settings)


@gradient_state
class OwnReductionState(NamedTuple):
    """The state of `gradient_transform`; its class identifies the transform in optax chains."""

    inner: PyTree  # state of the wrapped transform


@dataclass(frozen=True, kw_only=True, eq=False)
class _OwnReduction(Reduction):
    """The description of a user's own transform, whose state is `inner`."""

    due_of_inner: Callable[[PyTree], Communicate] | None  # the argument `due`

    def due(self, state: PyTree) -> Communicate:
        return True if self.due_of_inner is None else self.due_of_inner(state.inner)


@records_settings
def gradient_transform(
    tx: optax.GradientTransformation,
    axes: AxisName = ("replica",),
    *,
    due: Callable[[PyTree], Communicate] | None = None,
) -> GradientTransform:
    """Declare that your own optax transform reduces gradients, and over which axes.

    A training step refuses transforms with undeclared collectives over its replicas, such as a
    `jax.lax.pmean`. It averages the loss for optimizers that use it over the declared axes, too.

    Args:
      tx: an optax transform whose `update` takes gradients and returns gradients.
      axes: mapped axes over which it reduces, a name or a tuple; the default is `("replica",)`.
      due: `due(state)`: whether the next update reduces, from the state of `tx`: a bool or a ()
        bool array equal on all replicas. By default every update reduces.

    Returns:
      The same transform as a `js.GradientTransform`, with state `OwnReductionState`.

    Raises:
      ValueError: `tx` that is no optax transform, or moves parameters; axes that are no names;
        `due` that is no function.

    Example:
      >>> import jax
      >>> mean = optax.stateless(lambda grads, params: jax.lax.pmean(grads, "replica"))
      >>> gradient_transform(mean).spec.axes
      ('replica',)

    Communication: that of `tx`.
    """
    if isinstance(tx, ParameterTransform) or not isinstance(tx, optax.GradientTransformation):
        raise ValueError(
            f"gradient_transform: `tx` must be an optax transform of gradients, got {tx!r}."
        )
    check_axis_argument("gradient_transform", "axes", axes)
    if due is not None and not callable(due):
        raise ValueError(
            f"gradient_transform: `due` must be a function of the state, or None, got {due!r}."
        )
    # The step passes extra arguments, which plain optax transforms do not take.
    transform = optax.with_extra_args_support(tx)

    def init_fn(params: PyTree) -> OwnReductionState:
        return OwnReductionState(transform.init(params))

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        # The scope marks its collectives as declared, at any depth of other transforms.
        with jax.named_scope(GRADIENT_TRANSFORM):
            updates, inner = transform.update(updates, state.inner, params, **extra)
        return updates, OwnReductionState(inner)

    spec = _OwnReduction(axes=axis_names(axes), takes=frozenset({"weight"}), due_of_inner=due)
    return GradientTransform(init_fn, update_fn, spec)


def over_stages(
    tx: optax.GradientTransformation, argument: str = "optimizer"
) -> optax.GradientTransformationExtraArgs:
    """Return a transform that, for parameters in stages, applies `tx` to the model's leaves.

    `tx` is then traced for the model's own tree, and each stage runs the part of its program that
    is for the stage's leaves. Transforms of this package are returned as they are: they work on the
    buffers of all stages, compute norms from these, and call `over_stages` for inner transforms.
    Other trees reach `tx` unchanged.

    Args:
      tx: the transform.
      argument: the public argument that it was, for messages.

    Raises:
      ValueError: at `init` for parameters in stages, if a result of `tx` for a leaf is computed
        from leaves of other stages.
    """
    transform = optax.with_extra_args_support(tx)
    if isinstance(tx, GradientTransform | ParameterTransform):
        return transform

    @functools.wraps(transform.init)
    def init(params: PyTree) -> PyTree:
        if isinstance(params, Staged):
            return params.packing.init(transform, params, argument)
        return transform.init(params)

    @functools.wraps(transform.update)
    def update(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        if isinstance(updates, Staged):
            return updates.packing.update(transform, updates, state, params, extra)
        return transform.update(updates, state, params, **extra)

    return transform._replace(init=init, update=update)


def checked_optax(owner: str, argument: str, tx: object) -> optax.GradientTransformationExtraArgs:
    """Return `over_stages(tx)`; raise `ValueError` unless `tx` is an optax transform."""
    if not isinstance(tx, optax.GradientTransformation):
        more = " Of an optax.MultiSteps pass its gradient_transformation()."
        raise ArgumentError(
            argument,
            f"{owner}: `{argument}` must be an optax transform, got {tx!r}."
            f"{more if isinstance(tx, optax.MultiSteps) else ''}",
        )
    return over_stages(tx)


# Within `count_shifted_states`: class names of the states whose copies a `Chain` shifts, counted.
_SHIFTED_STATES: ContextVar[Counter[str] | None] = ContextVar("_SHIFTED_STATES", default=None)


class Chain(GradientTransform):
    """Several transforms, applied one after the other, that stay accessible. Made by `js.chain`.

    Attributes:
      parts: the transforms in order; a chain inside is replaced by its parts.
      spec: what the parts do, one after the other.
    """

    parts: tuple[optax.GradientTransformation, ...]


@records_settings
def chain(*transforms: optax.GradientTransformation) -> Chain:
    """Chain transforms like `optax.chain`, so that `js.make_train_step` can see the parts.

        tx = js.chain(
            js.all_reduce_gradients("replica"), optax.adamw(1e-3), js.local_sgd("replica")
        )

    `js.make_train_step(loss_fn, tx, mesh=mesh)` splits the chain into `gradients`, `optimizer` and
    `sync`, which it cannot do with an `optax.chain`.

    In your own loop it differs from `optax.chain` in one way. Optimizers that remember parameters
    (`optax.contrib.cocob`, `madgrad`, `schedule_free`, `sam`) would undo the exchange of a
    parameter transform that follows them. In this chain their copies of the parameters follow the
    exchange, as with `js.make_train_step(sync=...)`.

    Args:
      *transforms: gradient transforms, an optimizer, and last one or several
        `js.ParameterTransform`s, such as one per axis.

    Returns:
      An optax transform whose state is that of `optax.chain` of its parts; with a parameter
      transform `update` needs `params`. It passes extra arguments on to its parts. Other
      transforms, such as `optax.masked`, may wrap it.

    Raises:
      ValueError: something that is no optax transform.

    Communication: that of the transforms.
    """
    if wrong := [x for x in transforms if not (hasattr(x, "init") and hasattr(x, "update"))]:
        raise ValueError(f"chain: `transforms` must be optax transforms, got {wrong[0]!r}.")
    parts = [part for x in transforms for part in (x.parts if isinstance(x, Chain) else (x,))]
    # Copies follow the joint change by all parameter transforms at the end.
    count = len(parts)
    while count and isinstance(parts[count - 1], ParameterTransform):
        count -= 1
    if late := [x for x in parts[:count] if isinstance(x, ParameterTransform)]:
        raise ValueError(
            f"chain: nothing but parameter transforms may follow {late[0]!r}: it would change "
            "where the exchange leads, and replicas would drift apart."
        )
    every = [over_stages(part) for part in parts]
    first, last = every[:count], every[count:]
    start = gradient_parts(parts[:count])

    def init_fn(params: PyTree) -> PyTree:
        states = tuple(part.init(params) for part in every)
        if last:
            note_shifted_states(states[:count])
        return states

    def begin(params: PyTree) -> PyTree:
        return tuple(part.init(params) for part in first[start:])

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        steps, states = updates, ()
        for part, part_state in zip(first, state, strict=False):
            steps, new = part.update(steps, part_state, params, **extra)
            states = (*states, new)
        if not last:
            return steps, states
        # Copies of parameters in the optimizer follow each exchange.
        updates, inner, after = steps, states[start:], []
        moving: Any = last
        for part, part_state in zip(moving, state[count:], strict=True):
            updates, _, new, inner = part.exchange(
                updates, [], part_state, params, moments=inner, init=begin, **extra
            )
            after.append(new)
        return updates, (*states[:start], *inner, *after)

    joined = Chain(init_fn, update_fn, ChainReduction.from_parts(*map(spec_of, parts)))
    joined.parts = tuple(parts)
    return joined


def gradient_parts(parts: Sequence[optax.GradientTransformation]) -> int:
    """Return how many of these first parts of a chain transform gradients; others the optimizer.

    That is everything up to the last transform that reduces gradients, with this library's
    transforms right after it, such as clipping.
    """

    def returns_gradients(part: optax.GradientTransformation) -> bool:
        return isinstance(part, GradientTransform) and not part.spec.returns_updates

    reducing = [i for i, x in enumerate(parts) if returns_gradients(x) and spec_of(x).axes]
    count = reducing[-1] + 1 if reducing else 0
    # After a transform of another library, which may be the optimizer, ours would see updates.
    while count < len(parts) and returns_gradients(parts[count]):
        count += 1
    return count


@contextmanager
def count_shifted_states() -> Iterator[Counter[str]]:
    """Yield a counter of state classes, in which `note_shifted_states` counts within the block."""
    counter = Counter[str]()
    token = _SHIFTED_STATES.set(counter)
    try:
        yield counter
    finally:
        _SHIFTED_STATES.reset(token)


def note_shifted_states(states: PyTree) -> None:
    """Count the classes of new states whose copies of parameters will follow exchanges."""
    counter = _SHIFTED_STATES.get()
    # Copies do not follow an exchange by a transform that is among these states itself.
    if counter is not None and not holds_state(states, "parameters"):
        counter.update(moving_states(states))


def init(
    tx: optax.GradientTransformation,
    stacked_params: PyTree,
    *,
    mesh: AnyMesh,
    axis_name: AxisName = "replica",
) -> PyTree:
    """Make the state of `tx` for a loop of your own, with a leading axis of replicas.

    Transforms that shard their state over replicas can only be initialised inside the mapped
    axis, where this function calls `tx.init`.

    Args:
      tx: any optax transform or chain.
      stacked_params: tree of `(replicas, *s)`, as `js.replicate` returns it.
      mesh: mesh with `axis_name`, or a `VirtualMesh`; its other axes are bound too.
      axis_name: the replica axis, or several.

    Returns:
      The state with a leading replica axis on every leaf; copies, so the parameters can be donated.

    Raises:
      ValueError: leaves without the leading axis, trees that differ between processes (every
        difference listed with the process that has it), or a chain in which something follows a
        parameter transform.
      UserWarning: an optimizer that remembers parameters, in a chain that `js.chain` did not make.

    Communication: none over devices; with several processes one exchange of the trees' names,
      shapes and dtypes (a few KiB) through the host.
    """
    check_replica_axis("init", stacked_params, mesh, axis_name)
    check_same_tree(stacked_params)

    placed = shard_replicas(stacked_params, mesh, axis_name)
    automatic = model_axes(placed, mesh, axis_name)
    over = (mesh, axis_name, automatic, inner_layouts(placed) if automatic else ())
    # `cached_program` refers to it weakly, and a bound method, as of optax.MultiSteps, is new.
    tx_init = tx.init
    made = cached_program(tx_init, over, lambda tx_init: _init_fn(tx_init, *over))(placed)
    # jax (0.10) leaves out arguments that a program does not use, and with them where they lie.
    return shard_replicas(made, mesh, axis_name)


def _warn_of_copies(state: PyTree, shifted: Counter[str]) -> None:
    """Warn of optimizers that undo the exchange of a parameter transform that follows them."""
    names = sorted(Counter(moving_states(state)) - shifted)
    if names and holds_state(state, "parameters"):
        warn_user(
            f"init: `tx` holds an optimizer that remembers parameters ({', '.join(names)}), and "
            "undoes exchanges: make the chain by js.chain, or pass js.make_train_step both."
        )


def _init_fn(
    tx_init: Callable[[PyTree], PyTree],
    mesh: AnyMesh,
    axis_name: AxisName,
    automatic: frozenset[str],
    layouts: Layouts,
) -> Callable[[PyTree], PyTree]:
    def per_replica(params: PyTree) -> PyTree:
        with count_shifted_states() as shifted:
            state = jax.tree.map(jnp.copy, tx_init(params))
        check_order("init", state)
        _warn_of_copies(state, shifted)
        return shard_like(state, layouts, replica_count("init", mesh, axis_name))

    return jax.jit(
        map_replicas(
            per_replica,
            mesh=mesh,
            axis_name=axis_name,
            in_roles=("stacked",),
            automatic=automatic,
        )
    )
