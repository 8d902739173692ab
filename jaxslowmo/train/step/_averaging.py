"""How gradients are averaged, and what else an optimizer and the exchange need because of that.

`optax.contrib.reduce_on_plateau`, `optax.polyak_sgd` and others need the loss as `value`; line
searches (`optax.lbfgs`) need `grad` and `value_fn`, too. The loss must be averaged as the gradients
were: over the axes and in the updates that their transforms declare. Weights change with them.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from ..._support.scopes import METRICS
from ..._support.types import AxisName, PyTree
from ...collectives import all_mean, weighted_means
from ...mesh import axis_names, axis_size
from ...transform import ReducedAxes, Reduction, holds_state, run_if, spec_of

USE_CHAIN = "An optax.chain hides the transforms that it holds: join them by js.chain."


class Averaging(NamedTuple):
    """How a transform averages gradients over replica axes with several replicas.

    Attributes:
      reductions: the reductions that it declares, in the order in which they run, with one for all
        that are always due.
      axes: all axes with a reduction.
      has_unknown: whether it holds transforms that declare nothing; they may average over any axis.
      replicas: the replica axes with several replicas.
    """

    reductions: list[ReducedAxes]
    axes: set[str]
    has_unknown: bool
    replicas: list[str]

    @classmethod
    def from_transform(cls, transform: Any, state: PyTree, axis_name: AxisName) -> Self:
        """Return the averaging of a transform, whose state is that before its update."""
        names = [name for name in axis_names(axis_name) if axis_size(name) > 1]
        if transform is None:
            return cls([], set(), False, names)
        spec = spec_of(transform)
        stated = spec.reductions(state)
        always = {name for axes, due in stated if due is True for name in axes}
        reductions = [ReducedAxes(tuple(n for n in names if n in always), True)]
        for axes, due in stated:
            if not isinstance(due, bool):
                others = tuple(n for n in names if n in axes and n not in always)
                reductions.append(ReducedAxes(others, due))
        reductions = [each for each in reductions if each.axes]
        has_unknown = holds_state(spec.unknown(state), "gradients")
        axes = {*names} if has_unknown else {name for each in reductions for name in each.axes}
        return cls(reductions, axes, has_unknown, names)

    def mean(self, x: jax.Array, weight: jax.Array | None) -> jax.Array:
        """Average `x`, () float, over replicas in the updates in which gradients are averaged.

        `weight` is this replica's; a replica of weight 0 does not count.

        Communication: one all-reduce of `x` over the axes of each reduction that is due, with a
          weight of 8 bytes more; none if nothing uses the result.
        """

        def mean_over(axes: tuple[str, ...], x: jax.Array) -> jax.Array:
            with jax.named_scope(METRICS):
                flat = x.reshape(1)
                if weight is None:
                    return all_mean(flat, axes)[0]
                return weighted_means([flat], weight, axes, idle_as_zeros=False)[0][0]

        for axes, due in self.reductions:
            x = run_if(due, partial(mean_over, axes), lambda x: x, x, axes={*axes, *self.replicas})
        return x


class Weights(NamedTuple):
    """The weights of a replica in its update, and then in the exchange of parameters.

    Both begin as the weight of its batch; None means that all replicas are equal. An average of
    gradients over some of the replica axes gives the replicas that it joins the mean of their
    weights. An average over all of them is the update of each, with weight 1, also of a replica
    whose batch has weight 0. In the exchange such a replica still has weight 0: it follows.

    Attributes:
      exchange_weight: () weight in the exchange of parameters.
      update_weight: () weight in the update; a replica of weight 0 does not take it.
      may_differ: whether the two may differ, since some updates average over all replicas.
    """

    exchange_weight: jax.Array | None
    update_weight: jax.Array | None
    may_differ: bool = False

    @classmethod
    def from_batch(cls, weight: jax.Array | None) -> Self:
        """Return the weights of a replica before any average, from that of its batch."""
        return cls(weight, weight)

    def after_averaging(self, averaging: Averaging) -> "Weights":
        """Return the weights after the gradients were averaged in this way.

        Communication: one all-reduce of 4 bytes over the axes of each reduction that is due and
          leaves a replica axis out; else none.
        """
        left, (exchange_weight, update_weight, may_differ) = {*averaging.replicas}, self
        for axes, due in averaging.reductions:
            left = left.difference(axes)
            if exchange_weight is None or update_weight is None:
                break
            if left:
                reduction = averaging._replace(reductions=[ReducedAxes(axes, due)])
                exchange_weight = update_weight = reduction.mean(exchange_weight, None)
                may_differ = False
            elif due is True:
                update_weight, may_differ = None, True
            else:
                update_weight = jnp.where(due, jnp.ones_like(update_weight), update_weight)
                may_differ = True
        return Weights(exchange_weight, update_weight, may_differ)

    @property
    def is_follower(self) -> jax.Array | None:
        """Whether it takes an update for which it has no weight, () bool; None: it does not."""
        if self.exchange_weight is None or not self.may_differ:
            return None
        idle = self.exchange_weight <= 0
        return idle if self.update_weight is None else idle & (self.update_weight > 0)


def raising_value_fn(axes: tuple[str, ...]) -> Callable[[PyTree], jax.Array]:
    """Return a `value_fn` that raises: it would need a collective, or batches that are gone."""

    def value_fn(params: PyTree) -> jax.Array:
        del params
        why = "after the batches of a window are gone: give one to js.make_train_step(accumulate=)"
        if axes:
            why = (
                f"whose collectives over {axes} must not be in its loop: let replicas search alone"
            )
        raise ValueError(
            f"`optimizer` asks for `value_fn`, as a line search does, {why}, or use one without, "
            "such as optax.lbfgs(0.1, linesearch=None)."
        )

    return value_fn


def accepted_arguments(spec: Reduction, state: PyTree, **arguments: Any) -> dict[str, Any]:
    """Return those of `arguments` that a transform of this spec and state takes, and the weight.

    A transform of this library inside of an optax.chain also needs the layouts of leaves, which it
    would gather otherwise.
    """
    hidden = holds_state(spec.unknown(state), "gradients")
    takes = spec.takes | ({"weight", "param_specs"} if hidden else {"weight"})
    return {name: x for name, x in arguments.items() if x is not None and name in takes}


def optimizer_rate(opt_state: PyTree) -> Any:
    """Return the learning rate that an optimizer used, from its state after the update.

    Raises:
      ValueError: there is not exactly one `optax.inject_hyperparams` state with a `learning_rate`.
    """
    rates = [
        x.hyperparams["learning_rate"]
        for x in jax.tree.leaves(opt_state, is_leaf=_has_learning_rate)
        if _has_learning_rate(x)
    ]
    if len(rates) != 1:
        raise ValueError(
            '`sync` with learning_rate="optimizer" needs an `optimizer` with one learning rate, of '
            f"`optax.inject_hyperparams(optax.sgd)(learning_rate=...)`, got {len(rates)}."
        )
    return rates[0]


def _has_learning_rate(x: Any) -> bool:
    hyperparams = getattr(x, "hyperparams", None)
    return isinstance(hyperparams, Mapping) and "learning_rate" in hyperparams
