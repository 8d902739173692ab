"""The gradient transform: optax's pair and a spec."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Self, cast

import jax
import optax

from ..._scopes import GRADIENT_TRANSFORM
from ..._typing import AxisName, PyTree
from ...mesh import axis_names
from .._due import Communicate
from .._exchange import check_axis_argument
from .._registry import gradient_state
from ..protocol import ParameterTransform
from ._spec import GradientSpec


class GradientTransform(optax.GradientTransformationExtraArgs):
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

    # Tuples are copied from their items alone, without what they have beside these.

    def __copy__(self) -> "GradientTransform":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "GradientTransform":
        return self  # functions, which are shared by copies of any depth

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

    takes = frozenset({"weight"})
    spec = GradientSpec(axes=axis_names(axes), takes=takes)
    if due is not None:
        spec = replace(spec, due=lambda state: due(state.inner))
    return GradientTransform(init_fn, update_fn, spec)
