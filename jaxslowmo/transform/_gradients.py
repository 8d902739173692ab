"""Gradient transforms: optax's pair, and what one says of itself to others and to the step."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, cast

import jax
import optax

from .._support.scopes import GRADIENT_TRANSFORM
from .._support.types import AxisName, PyTree
from ..mesh import axis_names
from ..tree import Staged
from ._due import Communicate, decide, either
from ._parameter_transform import ParameterTransform
from ._replica_exchange import check_axis_argument
from ._spec import WithSpec, gradient_state

TAKEN = frozenset({"weight", "ready_order", "param_specs", "validation", "finite", "unscaled"})


class Reduction(NamedTuple):
    """One way in which an update may reduce gradients.

    Attributes:
      axes: mapped axes that it reduces over.
      due: whether the coming update does: a bool where that is static, else a () bool array that is
        equal on all replicas.
    """

    axes: tuple[str, ...]
    due: Communicate


@dataclass(frozen=True, kw_only=True, eq=False)
class GradientSpec:
    """What a gradient transform says, beside optax's pair, to other transforms and to the step.

    Attributes:
      axes: names of the mapped axes over which some update reduces gradients.
      due: `due(state)`: whether the coming update reduces, from the state of one replica before it:
        a bool, or a () bool array that is equal on all replicas.
      takes: which of "weight", "ready_order", "param_specs", "validation", "finite" and "unscaled"
        its `update` listens to.
      clips: whether it clips.
      skips: whether it may drop an update.
      returns_updates: whether it holds an optimizer, so that what it returns are updates of
        parameters, and no gradients any more.
      of_rows: whether gradients of rows of tables may be beside those of dense parameters, which it
        then treats alike.
      reductions: `reductions(state)`: all ways in which updates reduce, one after the other, as
        pairs (axes, due). None: over `axes` where `due`.
      unknown: `unknown(state)`: the states of transforms that it holds and that say nothing of
        themselves, such as those of optax.

    Raises:
      ValueError: `takes` that holds another word.
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

    def __post_init__(self) -> None:
        """Raise `ValueError` for words that no step says."""
        if unheard := sorted(set(self.takes) - TAKEN):
            raise ValueError(
                f"GradientSpec: `takes` must be words of {sorted(TAKEN)}, got {unheard}."
            )

    def reductions_of(self, state: PyTree) -> list[Reduction]:
        """Return the ways in which the coming update may reduce gradients, in order."""
        # What the transforms inside say, each of its own part of the state.
        if self.reductions is not None:
            return [Reduction(*each) for each in self.reductions(state)]
        return [Reduction(self.axes, self.due(state))] if self.axes else []

    def around(
        self,
        inner: Callable[[Any], PyTree],
        due: Callable[[Any], Communicate] = lambda state: True,
        **own: Any,
    ) -> "GradientSpec":
        """Return what a transform says that holds the one of this spec.

        Args:
          inner: of its state, the state of the one that it holds.
          due: of its state, whether the coming update calls that one.
          **own: what it says itself, in place of what the inner one says.
        """

        def reductions(state: PyTree) -> list[Reduction]:
            called = due(state)
            every = self.reductions_of(inner(state))
            return [
                Reduction(x.axes, called if x.due is True else decide(x.due, called)) for x in every
            ]

        # The axes stay those of all updates; which of them reduces is asked of the state.
        return dataclasses.replace(
            self,
            reductions=reductions,
            due=lambda state: _any_due(reductions(state)),
            unknown=lambda state: self.unknown(inner(state)),
            **own,
        )


def _any_due(reductions: Sequence[Reduction]) -> Communicate:
    return functools.reduce(either, [each.due for each in reductions], False)


# Of a transform that says nothing of itself; it may be an optimizer.
_UNKNOWN = GradientSpec(returns_updates=True, unknown=lambda state: [state])


def spec_of(transform: optax.GradientTransformation) -> GradientSpec:
    """Return the spec of a gradient transform; of others one that says nothing."""
    # A parameter transform has a spec, too, of another kind.
    spec = getattr(transform, "spec", None)
    return spec if isinstance(spec, GradientSpec) else _UNKNOWN


def joined(specs: Sequence[GradientSpec]) -> GradientSpec:
    """Return what a chain says of transforms with these specs, its state a tuple of theirs."""

    def reductions(state: PyTree) -> list[Reduction]:
        pairs = zip(specs, state, strict=True)
        return [each for spec, own in pairs for each in spec.reductions_of(own)]

    # One part that clips, skips or makes updates is enough; rows must pass through all of them.
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
            x for spec, own in zip(specs, state, strict=True) for x in spec.unknown(own)
        ],
    )


def is_identity(transform: optax.GradientTransformation) -> bool:
    """Return whether a transform returns what it is given, tried with an object of no other use."""
    # No array, so that nothing can be computed with it.
    leaf: Any = object()
    try:
        return transform.update(leaf, transform.init(leaf), leaf)[0] is leaf
    except Exception:  # It computes with its gradients.
        return False


class Validation(NamedTuple):
    """Passed on as `validation=` to all transforms of an optimizer; None where nothing is late.

    A transform that would hold up the update until something is known on all devices (the norm of
    all gradients, whether one is infinite) does not. It makes the update as if all were well, and
    its new state says what was found. The step then chooses.

    Attributes:
      clipped: the state of `js.clip_by_global_norm`, found by an earlier run of the same update,
        for it to clip by without looking again; None: it looks, and does not clip.
      skipped: () bool, whether that run found something that is not finite, for
        `js.dynamic_loss_scale`; None: it looks.
    """

    clipped: Any = None
    skipped: Any = None


class GradientTransform(WithSpec):
    """An optax transform of gradients that says what it does.

    All gradient transforms of this package are such, and `js.gradient_transform` makes one of your
    own. `js.make_train_step` reads the spec: over which axes the loss is averaged for optimizers
    that ask for it, what `update` is told, which transforms of a `js.chain` are its `gradients`.

    Args:
      init: `init(params) -> state`.
      update: `update(updates, state, params=None, **extra) -> (updates, state)`.
      spec: what it does.

    Attributes:
      spec: a `js.GradientSpec`. With another `init`, by `_replace`, a transform keeps it; with
        another `update` it is an `optax.GradientTransformationExtraArgs`, of which nobody knows.

    Raises:
      ValueError: `spec` that is none.
    """

    spec: GradientSpec

    def __new__(
        cls,
        init: Callable[[PyTree], PyTree],
        update: Callable[..., tuple[PyTree, PyTree]],
        spec: GradientSpec,
    ) -> Self:
        """Make one from its functions and its spec."""
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
    """State of `gradient_transform`, by which it is known in chains of optax, too."""

    inner: PyTree  # of the wrapped transform


def gradient_transform(
    tx: optax.GradientTransformation,
    axes: AxisName = ("replica",),
    *,
    due: Callable[[PyTree], Communicate] | None = None,
) -> GradientTransform:
    """Says of an optax transform of your own that it reduces gradients, and over which axes.

    A training step refuses transforms with collectives over its replicas (`jax.lax.pmean` by hand)
    of which it does not know this. It averages the loss that optimizers ask for likewise.

    Args:
      tx: an optax transform whose `update` takes gradients and returns gradients.
      axes: mapped axes over which it reduces, a name or a tuple.
      due: `due(state)`: whether the coming update reduces, from the state of `tx`: a bool or a ()
        bool array equal on all replicas; None: every one does.

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
    # Of what a step says, those of optax's transforms that take no more hear nothing.
    transform = optax.with_extra_args_support(tx)

    def init_fn(params: PyTree) -> OwnReductionState:
        return OwnReductionState(transform.init(params))

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        # By this scope its collectives are known wherever the transform stands.
        with jax.named_scope(GRADIENT_TRANSFORM):
            updates, inner = transform.update(updates, state.inner, params, **extra)
        return updates, OwnReductionState(inner)

    spec = GradientSpec(axes=axis_names(axes), takes=frozenset({"weight"}))
    if due is not None:
        spec = dataclasses.replace(spec, due=lambda state: due(state.inner))
    return GradientTransform(init_fn, update_fn, spec)


def over_stages(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Return a transform that sees, of parameters in stages, the model's own leaves on each stage.

    Transforms of ours stay as they are: they see the buffers of all stages, take their norms of
    those, and what they hold passes through here, too. Other trees reach `tx` as they are.

    Raises:
      ValueError: at `init` and of parameters in stages, `tx` whose results for a leaf depend on
        leaves of other stages.
    """
    transform = optax.with_extra_args_support(tx)
    if isinstance(tx, GradientTransform | ParameterTransform):
        return transform

    @functools.wraps(transform.init)
    def init(params: PyTree) -> PyTree:
        if isinstance(params, Staged):
            return params.packing.init(transform, params)
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
    """Return a transform as `over_stages` makes it; raise `ValueError` for what is none."""
    if not isinstance(tx, optax.GradientTransformation):
        more = " Of an optax.MultiSteps pass its gradient_transformation()."
        raise ValueError(
            f"{owner}: `{argument}` must be an optax transform, got {tx!r}."
            f"{more if isinstance(tx, optax.MultiSteps) else ''}"
        )
    return over_stages(tx)
