"""A trial on a few numbers that shows whether an optimizer undoes what an exchange does.

The optimizers of optax that remember parameters are recognised by the classes of their states.
Other optimizers are tried: after some updates, an optimizer takes the same gradients once from its
own parameters and once from parameters displaced as by an exchange. The displacement must remain
afterwards (weight decay reduces it a little). The trial uses parameters of the same tree with few
elements, and runs on one device of this process, once per training step.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..._support.types import PyTree
from ...transform import Every, ParameterTransform, instants, shifted_copies

_SIDE = 3  # at most this many elements along an axis
_BEFORE = (4, 5, 6)  # updates before the displacement; several, since SAM has a period
_AFTER = 3  # updates after the displacement
_LEFT = 0.9  # warn if less is left: allows a decay of 3 % per update
_MAX_PERIOD = 64
# By the class of its state, an optimizer that updates in some of its calls only: its name, the
# counter of calls since an update, and what happens in between.
COUNTING = {
    "SAMState": (
        "optax.contrib.sam",
        "steps_since_sync",
        "parameters are where SAM has pushed them: replicas then keep different displacements",
    ),
    "MultiStepsState": (
        "optax.MultiSteps",
        "mini_step",
        "gradients at the parameters of before are being collected",
    ),
}


def check_remembered(
    optimizer: optax.GradientTransformationExtraArgs,
    params: PyTree,
    sync: ParameterTransform,
    warn: Callable[[str], None],
    *,
    unknown: Sequence[str],
    counting: Sequence[str],
) -> None:
    """Warn if an optimizer undoes exchanges of parameters, or if they fall between its updates.

    Args:
      optimizer: the optimizer of the training step.
      params: the stacked parameters; only their types matter.
      sync: the parameter transform, which exchanges.
      warn: a function that issues each message once.
      unknown: names of the unknown classes in the optimizer's state, for the message.
      counting: the classes in the optimizer's state that are in `COUNTING`.

    Communication: none.
    """
    if unknown:
        left = _left(optimizer, params)
        if left is not None and left < _LEFT:
            whose = f"its state has {', '.join(unknown)}"
            warn(
                f"`optimizer` remembers parameters ({whose}): of what an exchange adds to them, it "
                f"had undone {1 - max(left, 0):.0%} after {_AFTER} updates of a trial with few "
                "numbers, so replicas will not stay together. Name the fields of its state that "
                "are copies of the parameters, as in js.remembers_parameters(MyState, "
                'moves=("start",)), and they will move along.'
            )
    for kind in counting:
        name, field, meanwhile = COUNTING[kind]
        period = _period(optimizer, params, kind, field)
        if period is not None and _falls_between(sync, period):
            warn(
                f"`optimizer` holds {name} with a period of {period}, and `sync` also averages in "
                f"between, while {meanwhile}. Make `sync_every` a multiple of {period}."
            )


def _unless_it_fails(trial: Callable[..., Any]) -> Callable[..., Any]:
    """Make a trial return None if it raises an exception.

    An optimizer may need arguments, shapes or values that only training has, so a failed trial says
    nothing about it. The first step raises what is really wrong.
    """

    def tried(*args: Any) -> Any:
        try:
            with jax.ensure_compile_time_eval():
                return trial(*args)
        except Exception:
            return None

    return tried


@_unless_it_fails
def _left(optimizer: optax.GradientTransformationExtraArgs, params: PyTree) -> float:
    """Return the least part of a displacement that is left; None if the trial fails."""
    trial = _Trial(optimizer, params)  # one object, so that its program is compiled once
    return min(map(trial.left, _BEFORE))


@_unless_it_fails
def _period(
    optimizer: optax.GradientTransformationExtraArgs, params: PyTree, kind: str, field: str
) -> int | None:
    """Return after how many calls the counters of all states of a class are 0 again."""

    def steps(state: PyTree) -> list[int]:
        def is_one(x: Any) -> bool:
            return type(x).__name__ == kind

        states = jax.tree.leaves(state, is_leaf=is_one)
        return [int(getattr(x, field)) for x in states if is_one(x)]

    trial = _Trial(optimizer, params)
    now = trial.start()
    for t in range(1, _MAX_PERIOD + 1):
        now = trial.updated(*now, trial.gradients(t))
        if not any(steps(now[1])):
            return t
    return None


def _falls_between(sync: ParameterTransform, period: int) -> bool:
    """Return whether some update that exchanges is no multiple of `period`."""
    schedules = (*sync.schedules, Every(period))
    return any(sync.phase(t) and t % period for t in instants(schedules))


class _Trial:
    """An optimizer with small parameters of the same tree as the stacked `params`."""

    def __init__(self, optimizer: optax.GradientTransformationExtraArgs, params: PyTree) -> None:
        self._optimizer, self._numbers = optimizer, np.random.default_rng(0)
        self._shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(tuple(min(n, _SIDE) for n in x.shape[1:]), x.dtype),
            params,
        )
        self._random = [self._drawn() for _ in range(max(_BEFORE) + 2)]
        self.updated = jax.jit(self._updated)

    def _drawn(self) -> PyTree:
        return jax.tree.map(
            lambda x: jnp.asarray(self._numbers.normal(size=x.shape), x.dtype), self._shapes
        )

    def start(self) -> tuple[PyTree, PyTree]:
        """Return the first parameters and optimizer state."""
        return self._random[0], self._optimizer.init(self._random[0])

    def gradients(self, t: int) -> PyTree:
        """Return the gradients of update t = 1, 2, ..."""
        return self._random[1 + t % (len(self._random) - 1)]

    def left(self, before: int) -> float:
        """Return the part left of a displacement after `before` updates, `_AFTER` updates later."""
        now = self.start()
        for t in range(1, before + 1):
            now = self.updated(*now, self.gradients(t))
        params, state = now
        d = jax.tree.map(lambda x: x / 8, self._random[-1])
        displaced = jax.tree.map(jnp.add, params, d), shifted_copies(state, d)
        for _ in range(_AFTER):
            equal = self.gradients(before + 1)
            now, displaced = self.updated(*now, equal), self.updated(*displaced, equal)
        difference = jax.tree.map(jnp.subtract, displaced[0], now[0])
        return float(jnp.real(optax.tree.vdot(difference, d) / optax.tree.vdot(d, d)))

    def _updated(self, params: PyTree, state: PyTree, grads: PyTree) -> tuple[PyTree, PyTree]:
        extra: dict[str, Any] = {"value": jnp.float32(1.0), "grad": grads}
        extra["value_fn"] = lambda p: optax.tree.norm(p, squared=True)
        try:
            updates, state = self._optimizer.update(grads, state, params, **extra)
        except TypeError:  # the optimizer does not take all extra arguments
            updates, state = self._optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state
