"""Gradient transforms: an optax transform with a `GradientSpec` that describes what it does."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, cast

import jax
import optax

from .._support.scopes import GRADIENT_TRANSFORM
from .._support.settings import Settings, records_settings
from .._support.types import AxisName, PyTree
from ..mesh import axis_names
from ..tree import Staged
from ._due import Communicate, decide, either
from ._parameter_transform import ParameterTransform
from ._replica_exchange import check_axis_argument
from ._state_classes import WithSpec, gradient_state

TAKEN = frozenset({"weight", "ready_order", "param_specs", "finite", "unscaled"})


class Reduction(NamedTuple):
    """A reduction of gradients that an update may do.

    Attributes:
      axes: mapped axes that it reduces over.
      due: whether the next update does it: a bool where that is static, else a () bool array that
        is equal on all replicas.
    """

    axes: tuple[str, ...]
    due: Communicate


@dataclass(frozen=True, kw_only=True, eq=False)
class GradientSpec:
    """A description of a gradient transform, for other transforms and for the training step.

    Attributes:
      axes: names of the mapped axes over which some update reduces gradients.
      due: `due(state)`: whether the next update reduces, from the state of one replica before it:
        a bool, or a () bool array that is equal on all replicas.
      takes: the extra arguments that its `update` uses, out of "weight", "ready_order",
        "param_specs", "finite" and "unscaled".
      clips: whether it clips gradients.
      skips: whether it may drop an update.
      returns_updates: whether it holds an optimizer, so that it returns updates of parameters
        instead of gradients.
      of_rows: whether it accepts gradients of rows of tables together with those of dense
        parameters, and treats both in the same way.
      reductions: `reductions(state)`: all reductions of an update in order, as pairs (axes, due).
        None: one over `axes` if `due`.
      unknown: `unknown(state)`: the states of inner transforms without a spec, such as those of
        optax.
      settings: the factory of this package that made it, and its arguments; None for other ones.

    Raises:
      ValueError: `takes` with another name.
    """

    axes: tuple[str, ...] = ()
    due: Callable[[PyTree], Communicate] = lambda state: True
    takes: frozenset[str] = frozenset()
    clips: bool = False
    skips: bool = False
    returns_updates: bool = False
    of_rows: bool = False
    reductions: Callable[[PyTree], Sequence[Reduction]] | None = None
    unknown: Callable[[PyTree], list[PyTree]] = lambda state: []
    settings: Settings | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Raise `ValueError` for names of arguments that no step passes."""
        if wrong := sorted(set(self.takes) - TAKEN):
            raise ValueError(
                f"GradientSpec: `takes` must be words of {sorted(TAKEN)}, got {wrong}."
            )

    def reductions_of(self, state: PyTree) -> list[Reduction]:
        """Return the reductions of gradients that the next update may do, in order."""
        if self.reductions is not None:
            return [Reduction(*each) for each in self.reductions(state)]
        return [Reduction(self.axes, self.due(state))] if self.axes else []

    def around(
        self,
        inner: Callable[[Any], PyTree],
        due: Callable[[Any], Communicate] = lambda state: True,
        **values: Any,
    ) -> "GradientSpec":
        """Return the spec of a transform that wraps the one of this spec.

        Args:
          inner: `inner(state)`: the state of the wrapped transform, from the wrapper's state.
          due: `due(state)`: whether the next update calls the wrapped transform, from the wrapper's
            state. By default every update does.
          **values: values of the new spec, in place of those of this one.
        """

        def reductions(state: PyTree) -> list[Reduction]:
            called = due(state)
            every = self.reductions_of(inner(state))
            return [
                Reduction(x.axes, called if x.due is True else decide(x.due, called)) for x in every
            ]

        # `axes` are those of all updates; `due` depends on the state.
        return dataclasses.replace(
            self,
            reductions=reductions,
            due=lambda state: _any_due(reductions(state)),
            unknown=lambda state: self.unknown(inner(state)),
            **values,
        )


def _any_due(reductions: Sequence[Reduction]) -> Communicate:
    return functools.reduce(either, [each.due for each in reductions], False)


# The spec of a transform that has none; it may be an optimizer.
_UNKNOWN = GradientSpec(returns_updates=True, unknown=lambda state: [state])


def spec_of(transform: optax.GradientTransformation) -> GradientSpec:
    """Return the spec of a gradient transform, or for other transforms one that claims nothing."""
    # The spec of a parameter transform is of another class.
    spec = getattr(transform, "spec", None)
    return spec if isinstance(spec, GradientSpec) else _UNKNOWN


def joined(specs: Sequence[GradientSpec]) -> GradientSpec:
    """Return the spec of a chain of transforms with these specs; its state is a tuple of theirs."""

    def reductions(state: PyTree) -> list[Reduction]:
        pairs = zip(specs, state, strict=True)
        return [each for spec, part in pairs for each in spec.reductions_of(part)]

    # A chain clips, skips or returns updates if one part does; rows must pass through all parts.
    return GradientSpec(
        axes=tuple(dict.fromkeys(axis for spec in specs for axis in spec.axes)),
        due=lambda state: _any_due(reductions(state)),
        takes=frozenset[str]().union(*(spec.takes for spec in specs)),
        clips=any(spec.clips for spec in specs),
        skips=any(spec.skips for spec in specs),
        returns_updates=any(spec.returns_updates for spec in specs),
        of_rows=all(spec.of_rows for spec in specs),
        reductions=reductions,
        unknown=lambda state: [
            x for spec, part in zip(specs, state, strict=True) for x in spec.unknown(part)
        ],
    )


def is_identity(transform: optax.GradientTransformation) -> bool:
    """Return whether a transform returns its updates unchanged, tried with a leaf of no use."""
    # The leaf is no array, so that any computation with it fails.
    leaf: Any = object()
    try:
        return transform.update(leaf, transform.init(leaf), leaf)[0] is leaf
    except Exception:  # The transform computes with its updates.
        return False


class GradientTransform(WithSpec):
    """An optax transform of gradients with a description of what it does.

    All gradient transforms of this package are such, and `js.gradient_transform` makes one from
    your own optax transform. `js.make_train_step` reads from the spec over which axes to average
    the loss for optimizers that use it, which extra arguments to pass to `update`, and which
    transforms of a `js.chain` are its `gradients`.

    Args:
      init: `init(params) -> state`.
      update: `update(updates, state, params=None, **extra) -> (updates, state)`.
      spec: a `js.GradientSpec` that describes the transform.

    Attributes:
      spec: the `js.GradientSpec`. `_replace` with another `init` keeps it; with another `update` it
        returns an `optax.GradientTransformationExtraArgs` without a spec.

    Raises:
      ValueError: `spec` that is no `js.GradientSpec`.
    """

    spec: GradientSpec

    def __new__(
        cls,
        init: Callable[[PyTree], PyTree],
        update: Callable[..., tuple[PyTree, PyTree]],
        spec: GradientSpec,
    ) -> Self:
        """Make a transform from its functions and its spec."""
        if not isinstance(spec, GradientSpec):
            raise ValueError(f"GradientTransform: `spec` must be a js.GradientSpec, got {spec!r}.")
        self = super().__new__(cls, cast("optax.TransformInitFn", init), update)
        self.spec = spec
        return self

    def _replace(self, **changed: Any) -> optax.GradientTransformationExtraArgs:
        pair = {**self._asdict(), **changed}
        if "update" in changed or len(pair) > 2:
            return optax.GradientTransformationExtraArgs(**pair)
        return GradientTransform(**pair, spec=self.spec)


@gradient_state
class OwnReductionState(NamedTuple):
    """The state of `gradient_transform`; its class identifies the transform in optax chains."""

    inner: PyTree  # state of the wrapped transform


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

    spec = GradientSpec(axes=axis_names(axes), takes=frozenset({"weight"}))
    if due is not None:
        spec = dataclasses.replace(spec, due=lambda state: due(state.inner))
    return GradientTransform(init_fn, update_fn, spec)


def over_stages(
    tx: optax.GradientTransformation, argument: str = "optimizer"
) -> optax.GradientTransformationExtraArgs:
    """Return a transform that, for parameters in stages, applies `tx` to the model's leaves.

    `tx` then runs on each stage with the leaves of that stage, instead of buffers. Transforms of
    this package are returned as they are: they work on the buffers of all stages, compute norms
    from these, and call `over_stages` for inner transforms. Other trees reach `tx` unchanged.

    Args:
      tx: the transform.
      argument: the public argument that it was, for messages.

    Raises:
      ValueError: at `init` for parameters in stages, if the program of `tx` does not prove that its
        result for a leaf depends on no leaves of other stages.
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
        raise ValueError(
            f"{owner}: `{argument}` must be an optax transform, got {tx!r}."
            f"{more if isinstance(tx, optax.MultiSteps) else ''}"
        )
    return over_stages(tx)
