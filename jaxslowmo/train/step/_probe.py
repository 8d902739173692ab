"""Whether an optimizer takes back what a synchronisation does, tried out on a few numbers.

Which optimizers of optax remember parameters is known by the classes of their states. Of one that
somebody wrote nothing is known, so it is asked: it takes some updates, then the same equal
gradients once from where it is and once from where an exchange might have put it. Of the difference
all must be left afterwards (weight decay takes little). That is on parameters of the same tree and
few elements, on one device of this process, once per training step.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..._support.types import PyTree
from ...transform import Every, ParameterTransform, instants, shifted_copies

_SIDE = 3  # elements along an axis, at most
_BEFORE = (4, 5, 6)  # updates before the displacement: it may matter which, as for SAM
_AFTER = 3  # updates after it
_LEFT = 0.9  # less is a complaint: a decay of 3 % per update is not
_MAX_PERIOD = 64


def check_remembered(
    optimizer: optax.GradientTransformationExtraArgs,
    params: PyTree,
    sync: ParameterTransform,
    warn: Callable[[str], None],
    *,
    unknown: Sequence[str],
    has_sam: bool,
) -> None:
    """Warn of an optimizer that undoes exchanges of parameters, or that they find in mid-air.

    Args:
      optimizer: the optimizer of the training step.
      params: the stacked parameters; only their types matter.
      sync: the parameter transform, which exchanges.
      warn: a function that issues each message once.
      unknown: what the optimizer's state holds of which nothing is known, for the message.
      has_sam: whether the optimizer holds `optax.contrib.sam`.

    Communication: none.
    """
    if unknown:
        left = _left(optimizer, params)
        if left is not None and left < _LEFT:
            whose = f"its state has {', '.join(unknown)}"
            warn(
                f"`optimizer` remembers parameters ({whose}): of what an exchange adds to them, it "
                f"had taken back {1 - max(left, 0):.0%} after {_AFTER} updates of a trial with few "
                "numbers, so replicas will not stay together. Name the fields of its state that "
                "are copies of the parameters, as in js.remembers_parameters(MyState, "
                'moves=("start",)), and they will move along.'
            )
    if has_sam:
        period = _sam_period(optimizer, params)
        if period is not None and _falls_between(sync, period):
            warn(
                f"`optimizer` holds optax.contrib.sam with a period of {period}, and `sync` also "
                "averages in between, while parameters stand where SAM has pushed them: replicas "
                "then stay apart by what they were pushed. Make `sync_every` a multiple of "
                f"{period}."
            )


def _unless_it_fails(trial: Callable[..., Any]) -> Callable[..., Any]:
    """What a trial finds; None where the optimizer cannot be tried.

    It may want arguments, shapes or values that a trial does not have and training has: that it
    fails here says nothing of it, and whatever is really wrong the first step raises.
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
    """What is left of a displacement, at least; None for an optimizer that cannot be tried."""
    trial = _Trial(optimizer, params)  # one, so that its program is compiled once
    return min(map(trial.left, _BEFORE))


@_unless_it_fails
def _sam_period(optimizer: optax.GradientTransformationExtraArgs, params: PyTree) -> int | None:
    """After how many updates SAM is back from its steps up the slope."""

    def steps(state: PyTree) -> list[int]:
        def is_sam(x: Any) -> bool:
            return type(x).__name__ == "SAMState" and x.cache is not None

        states = jax.tree.leaves(state, is_leaf=is_sam)
        return [int(x.steps_since_sync) for x in states if is_sam(x)]

    trial = _Trial(optimizer, params)
    now = trial.start()
    for t in range(1, _MAX_PERIOD + 1):
        now = trial.updated(*now, trial.gradients(t))
        if not any(steps(now[1])):
            return t
    return None


def _falls_between(sync: ParameterTransform, period: int) -> bool:
    """Whether some update that exchanges is no multiple of `period`."""
    schedules = (*sync.schedules, Every(period))
    return any(sync.phase(t) and t % period for t in instants(schedules))


class _Trial:
    """An optimizer on parameters of the same tree as `params`, whose leaves are stacked."""

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
        """Parameters and state."""
        return self._random[0], self._optimizer.init(self._random[0])

    def gradients(self, t: int) -> PyTree:
        """Of update t = 1, 2, ..."""
        return self._random[1 + t % (len(self._random) - 1)]

    def left(self, before: int) -> float:
        """Of a displacement after so many updates, what is left of it some updates later."""
        now = self.start()
        for t in range(1, before + 1):
            now = self.updated(*now, self.gradients(t))
        params, state = now
        d = jax.tree.map(lambda x: x / 8, self._random[-1])
        there = jax.tree.map(jnp.add, params, d), shifted_copies(state, d)
        for _ in range(_AFTER):
            equal = self.gradients(before + 1)
            now, there = self.updated(*now, equal), self.updated(*there, equal)
        apart = jax.tree.map(jnp.subtract, there[0], now[0])
        return float(jnp.real(optax.tree.vdot(apart, d) / optax.tree.vdot(d, d)))

    def _updated(self, params: PyTree, state: PyTree, grads: PyTree) -> tuple[PyTree, PyTree]:
        told: dict[str, Any] = {"value": jnp.float32(1.0), "grad": grads}
        told["value_fn"] = lambda p: optax.tree.norm(p, squared=True)
        try:
            updates, state = self._optimizer.update(grads, state, params, **told)
        except TypeError:  # takes no more than it knows
            updates, state = self._optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state
