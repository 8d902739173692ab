"""Which transforms of this library a state belongs to, and what a step refuses to do with them."""

import jax
import optax

from .._typing import AxisName, PyTree
from ..algorithms import LocalSGDState, OnlyFiniteState, OuterState, ParameterTransform, SGPState
from ..mesh import axis_names
from ..reducer import AllReduceGradientsState, PostLocalGradientsState
from ..sparse import AllReduceRowsState

PARAMETER_STATES = (LocalSGDState, OnlyFiniteState, OuterState, SGPState)
GRADIENT_STATES = (AllReduceGradientsState, AllReduceRowsState, PostLocalGradientsState)


def holds_parameter_transform(state: PyTree) -> bool:
    """Whether the state of one of our parameter transforms is in `state`, wrapped or not."""
    return _holds(state, PARAMETER_STATES)


def holds_gradient_transform(state: PyTree) -> bool:
    """Whether the state of one of our gradient transforms is in `state`, wrapped or not."""
    return _holds(state, GRADIENT_STATES)


def _holds(state: PyTree, kinds: tuple[type, ...]) -> bool:
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kinds))
    return any(isinstance(x, kinds) for x in leaves)


def check_gradients(gradients: optax.GradientTransformation | None) -> None:
    """Raise `ValueError` for a parameter transform in the place of a gradient transform."""
    if isinstance(gradients, ParameterTransform):
        raise ValueError(_misplaced("a js.ParameterTransform"))


def check_transforms(
    opt_state: PyTree,
    *,
    mode: str,
    axis_name: AxisName,
    num_replicas: int,
    exchanges: bool,
) -> None:
    """Check what only the states of `gradients` and `optimizer` tell about them.

    Args:
      opt_state: of the whole chain: states of gradient transform, optimizer, parameter transform.
      mode: of the step.
      axis_name: the replica axis.
      num_replicas: along it.
      exchanges: whether the step was given `sync` or `gradients`; True where replicas were said to
        train apart.

    Raises:
      ValueError: a parameter transform in `gradients`, or, host-scheduled, in `optimizer`; several
        replicas that would train apart without anyone having said so.
    """
    gradients, optimizer = opt_state[:2]
    if holds_parameter_transform(gradients):
        raise ValueError(_misplaced("a chain that holds a parameter transform"))
    found = holds_parameter_transform(optimizer)
    if mode == "host" and found:
        raise ValueError(
            '`mode`="host" schedules `sync` alone, and `optimizer` holds a parameter transform '
            'too: pass that one as `sync`, or use mode="traced".'
        )
    if num_replicas > 1 and not (exchanges or found or holds_gradient_transform(optimizer)):
        axis = axis_name[0] if axis_name == axis_names(axis_name)[:1] else axis_name
        raise ValueError(
            "`sync` and `gradients` are both None and `optimizer` holds no transform of js, so the "
            f"{num_replicas} replicas would train apart and never meet. Pass "
            f"gradients=js.all_reduce_gradients({axis!r}) to average gradients, "
            f"sync=js.local_sgd({axis!r}) or another parameter transform to average parameters, "
            "gradients=optax.identity() where `optimizer` averages gradients by itself, or "
            'sync="none" to train them apart.'
        )


def _misplaced(what: str) -> str:
    return (
        "`gradients` must be a gradient transform such as js.all_reduce_gradients(...), got "
        f"{what}. It would take gradients for updates of parameters, and replicas would drift "
        "apart: pass it as `sync`, or last in a chain as `optimizer`."
    )
