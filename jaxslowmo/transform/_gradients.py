"""Gradient transforms: an optax transform with a `Reduction` that says what it does."""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, cast

import jax
import optax

from .._support.checks import ArgumentError
from .._support.scopes import GRADIENT_TRANSFORM
from .._support.settings import Settings, records_settings
from .._support.types import AxisName, PyTree
from ..mesh import axis_names
from ..tree import Staged
from ._due import Communicate, logical_and, logical_or
from ._parameter_transform import ParameterTransform
from ._replica_group import check_axis_argument
from ._state_classes import WithSpec, gradient_state

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


class GradientTransform(WithSpec):
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
