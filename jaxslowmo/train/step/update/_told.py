"""What the optimizer is told beside the gradients: the loss, and a way to ask for it elsewhere.

`optax.contrib.reduce_on_plateau`, `optax.polyak_sgd` and others need the loss as `value`; line
searches (`optax.lbfgs`) need `grad` and `value_fn`, too. The loss has to be averaged as the
gradients were: over which axes that is, is read off the traced gradient transform.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from ...._scopes import METRICS, PHASE, SKIP_UNUSED
from ...._typing import AxisName, PyTree
from ....collectives import all_mean, weighted_means
from ....mesh import axis_names, axis_size, collective_axes, vary_over, varying_axes
from ....precision import Unscaled, is_about_keywords, loss_scale_of
from ....reducer import DivideBy
from ....transform import Validation, holds_state
from ....tree import at_least_float32
from ._differentiate import Data, Differentiation
from ._rows import Rows, mean_rows, with_entries_of
from .ways import run_as_varying

Update = Callable[..., tuple[PyTree, PyTree]]


class TracedUpdate:
    """An update of transforms, traced before it runs: one can look over which axes it sends.

    Args:
      update: `(*operands) -> (updates, state)`.
      axis_name: the replica axis.
      *operands: what it will be called with.
      of_gradients: whether it exchanges nothing but gradients: hooks have phases of their own
        (PowerSGD), which are then no exchanges of parameters.

    Attributes:
      axes: those of `axis_name` over which it communicates in some update, exchanges of parameters
        apart.
    """

    def __init__(
        self, update: Update, axis_name: AxisName, *operands: PyTree, of_gradients: bool = False
    ) -> None:
        self._counts = _is_no_predicate if of_gradients else _may_average_gradients
        self._update = jax.jit(update, inline=True)
        self._closed: Any = self._update.trace(*operands).jaxpr
        self._replica_axes = axis_names(axis_name)
        self.axes = self._axes_of(self._closed.jaxpr)

    def communicates_over(self, name: str) -> bool:
        """Whether it reduces over another axis, too."""
        return name in collective_axes(self._closed.jaxpr, self._counts)

    def __call__(self, *operands: PyTree) -> tuple[PyTree, PyTree]:
        """The result of the update."""
        return self._update(*operands)

    def mean(self, x: jax.Array, weight: jax.Array | None, *operands: PyTree) -> jax.Array:
        """`x` averaged over replicas as this update averages gradients.

        Where all that it sends stands in one conditional (`js.post_local_gradients`), `x` is
        averaged in just the updates in which gradients are.

        Args:
          x: () float.
          weight: this replica's share; one of weight 0 does not count.
          *operands: of the update.

        Communication: one all-reduce of `x` over `axes`, with a weight of 8 bytes more; none where
          nothing uses the result.
        """
        return self._as_gradients(lambda axes, x: self._mean_over(axes, weight, x), x, operands)

    def rows(
        self, rows: Rows, weight: jax.Array | None, divide_by: DivideBy, *operands: PyTree
    ) -> Rows:
        """Gradients of rows averaged over replicas, as this update averages dense ones.

        Args:
          rows: of this device.
          weight: as in `mean`.
          divide_by: that of the means which this update takes of dense gradients.
          *operands: of the update.

        Communication: per table one all-gather of the row numbers and one of the rows.
        """

        def mean(axes: frozenset[str], rows: Rows) -> Rows:
            names = tuple(name for name in self._replica_axes if name in axes)
            means = mean_rows(rows, names, weight, divide_by)
            # As the dense gradients.
            return vary_over(with_entries_of(means, rows, self._replica_axes), self._replica_axes)

        return self._as_gradients(mean, rows, operands) if rows else rows

    def _as_gradients(
        self,
        mean: Callable[[frozenset[str], PyTree], PyTree],
        x: PyTree,
        operands: tuple[PyTree, ...],
    ) -> PyTree:
        """`mean(axes, x)` over the axes over which this update averages gradients."""
        jaxpr = self._closed.jaxpr
        choices = [
            place
            for place, equation in enumerate(jaxpr.eqns)
            if equation.primitive.name == "cond" and len(set(self._axes_of_branches(equation))) > 1
        ]
        others = [eqn for place, eqn in enumerate(jaxpr.eqns) if place not in choices]
        if len(choices) != 1 or self._axes_of(jaxpr.replace(eqns=others)):
            # Several exchanges, each in some updates: averaged as if all took place in all.
            return mean(self.axes, x)
        (place,) = choices
        branches = self._axes_of_branches(jaxpr.eqns[place])
        means = [partial(mean, branch) for branch in branches]
        return lax.switch(self._index_of(place, operands), means, x)

    def _mean_over(self, axes: frozenset[str], weight: jax.Array | None, x: jax.Array) -> jax.Array:
        names = tuple(name for name in self._replica_axes if name in axes)
        if names:
            with jax.named_scope(METRICS):
                flat = x.reshape(1)
                if weight is None:
                    (x,) = all_mean(flat, names)
                else:
                    ((x,),) = weighted_means([flat], weight, names, idle_as_zeros=False)
        return vary_over(x, self._replica_axes)  # as the gradients

    def _index_of(self, place: int, operands: tuple[PyTree, ...]) -> jax.Array:
        """Which branch the conditional at `place` takes."""
        jaxpr = self._closed.jaxpr
        before = jaxpr.replace(eqns=jaxpr.eqns[:place], outvars=jaxpr.eqns[place].invars[:1])
        find = jaxpr_as_fun(ClosedJaxpr(before, self._closed.consts))
        return find(*jax.tree.leaves(operands))[0].astype(jnp.int32)

    def _axes_of_branches(self, equation: Any) -> list[frozenset[str]]:
        return [self._axes_of(branch.jaxpr) for branch in equation.params["branches"]]

    def _axes_of(self, jaxpr: Any) -> frozenset[str]:
        found = collective_axes(jaxpr, self._counts) & set(self._replica_axes)
        return frozenset(name for name in found if axis_size(name) > 1)


def _may_average_gradients(equation: Any) -> bool:
    """Not an exchange of parameters, nor a count of uses, nor a predicate."""
    scopes = str(equation.source_info.name_stack)
    return PHASE not in scopes and SKIP_UNUSED not in scopes and _is_no_predicate(equation)


def _is_no_predicate(equation: Any) -> bool:
    """Not what makes predicates alike (`uniform`, `js.dynamic_loss_scale`)."""
    return equation.primitive.name != "pmax"


@dataclass(frozen=True)
class Loss:
    """What the optimizer is told of the loss.

    Attributes:
      value: () float, averaged as the gradients were.
      averaged: over which axes they were, in some update.
      differentiation: the loss function, and the microbatches of a batch.
      data: this replica's batch, key and model state before the update; None for a window, whose
        batches are gone.
    """

    value: jax.Array
    averaged: tuple[str, ...]
    differentiation: Differentiation
    data: Data | None

    def at(self, params: PyTree, data: Data, weight: Any = None) -> jax.Array:
        """The replica's own loss, of the same examples, at other parameters.

        `weight` is not used: line searches pass on all that they were told.

        Communication: none.
        """
        del weight
        batch, key, model_state = data
        fn, accumulate = self.differentiation.loss, self.differentiation.accumulate
        if accumulate == 1:
            return as_value(fn(params, batch, rng=key, model_state=model_state)[0])
        parts = jax.tree.map(lambda x: x.reshape(accumulate, -1, *x.shape[1:]), batch)

        def one(state: PyTree, x: tuple[PyTree, jax.Array]) -> tuple[PyTree, jax.Array]:
            part, own_key = x
            value, (_, state) = fn(params, part, rng=own_key, model_state=state)
            return state, as_value(value)

        keys = jax.random.split(key, accumulate)
        return lax.scan(one, model_state, (parts, keys))[1].mean()


def _refusing(axes: tuple[str, ...]) -> Callable[[PyTree], jax.Array]:
    """What stands in the place of the loss where that would need a collective, or other batches."""

    def value_fn(params: PyTree) -> jax.Array:
        del params
        asked = "`optimizer` asks for `value_fn`, the loss at other parameters, as line searches do"
        if not axes:
            raise ValueError(
                f"{asked}. The batches of a window of gradients are gone when it becomes an "
                "update: give them as one batch to js.make_train_step(accumulate=...), or use an "
                "optimizer that needs `value` and `grad` alone, or none of them."
            )
        raise ValueError(
            f"{asked}. They loop as often as the data want, and no collective may stand in such a "
            f"loop, but here gradients are averaged over {axes}. Use an optimizer that needs "
            "`value` and `grad` alone, or none of them, such as optax.lbfgs(0.1, linesearch=None); "
            "or let each replica search by itself: `sync`, no `gradients`, and no inner axes."
        )

    return value_fn


def averages_without_rows(how: str) -> str:
    """Return the message for an `optimizer` that averages beside tables; `how` is its verb."""
    return (
        f"`optimizer` beside `embeddings` {how}, and is not given rows of tables: dense parameters "
        "would agree on all replicas, and tables drift apart. Pass what averages gradients, "
        "js.all_reduce_gradients(...), as `gradients`, and what averages parameters, such as "
        "js.local_sgd(...), as `sync`."
    )


def as_value(loss: jax.Array) -> jax.Array:
    """A loss as an optimizer is told it: at least float32, since it is averaged and compared."""
    return loss.astype(at_least_float32(loss.dtype))


def update_told(
    optimizer: optax.GradientTransformationExtraArgs,
    grads: PyTree,
    state: PyTree,
    params: PyTree,
    *,
    loss: Loss,
    axis_name: AxisName,
    weight: jax.Array | None,
    finite: jax.Array | None = None,
    param_specs: PyTree | None = None,
    validation: Validation | None = None,
) -> tuple[PyTree, PyTree]:
    """`optimizer.update` with `value`, `grad` and `value_fn`, and the weight if there is one.

    Where `optimizer` is a chain that averages gradients by a transform of ours, `value` is averaged
    likewise, and the chain is told the specs of the parameters, where there are some. One that
    keeps a loss scale is told that gradients were divided by it, and whether those that it does not
    get are `finite`. `validation` reaches all that listens to it.

    Raises:
      ValueError: it calls `value_fn` and gradients are averaged over some axis; a chain that
        exchanges and cannot be run with varying types; a loss scale inside of what keeps from it
        that gradients were divided; with tables one that exchanges over the replicas.

    Communication: the optimizer's, and that of `TracedUpdate.mean` for such a chain.
    """
    is_chain = holds_state(state, "gradients")
    averaged = loss.averaged or (axis_names(axis_name) if is_chain else ())

    def update(
        grads: PyTree,
        state: PyTree,
        params: PyTree,
        value: jax.Array,
        weight: Any,
        finite: Any,
        data: Any,
    ) -> tuple[PyTree, PyTree]:
        extra: dict[str, Any] = {} if weight is None else {"weight": weight}
        if is_chain and param_specs is not None:
            extra["param_specs"] = param_specs
        is_refused = averaged or loss.data is None
        own = _refusing(averaged) if is_refused else partial(loss.at, data=data, weight=weight)
        late = {} if validation is None else {"validation": validation}
        told = {"value": value, "grad": grads, "value_fn": own, **extra, **late}
        run = partial(optimizer.update, grads, state, params)
        if loss_scale_of(state) is None:
            return _called_with(run, told, {})
        # Divided as soon as they were taken, so that all that reads them gets what it expects.
        with Unscaled.heard() as unscaled:
            scaled = {"unscaled": unscaled, "finite": finite, **late}
            return _called_with(run, {**told, **scaled}, scaled)

    def without_exchange(*operands: PyTree) -> tuple[PyTree, PyTree]:
        traced = TracedUpdate(update, axis_name, *operands)
        axes = [name for name in axis_names(axis_name) if traced.communicates_over(name)]
        if axes:
            raise ValueError(averages_without_rows(f"exchanges over {axes} by itself"))
        return traced(*operands)

    checked = update if loss.differentiation.tables is None else without_exchange
    operands = grads, state, params, loss.value, weight, finite, None if averaged else loss.data
    try:
        if is_chain:
            traced = TracedUpdate(update, axis_name, *operands)
            value = traced.mean(loss.value, weight, *operands)
            return traced(grads, state, params, value, weight, finite, None)
        return checked(*operands)
    except (TypeError, AssertionError) as error:
        if not any(map(varying_axes, jax.tree.leaves(operands))):
            raise
        if is_chain or holds_state(state, "parameters"):
            raise ValueError(
                "`optimizer` is a chain that exchanges, and a transform in it has branches or "
                "loops that return constants beside what differs between replicas, which jax "
                "refuses on devices. Pass what exchanges apart from it, as `gradients` or `sync`."
            ) from error
        # Branches and loops that mix constants with what differs between replicas; and zeros like
        # a shape of them (`optax.MultiSteps`), of leaves sharded inside a replica: an assertion.
        return run_as_varying(checked, *operands)


def _called_with(run: Update, all_known: dict[str, Any], few: dict[str, Any]) -> Any:
    """`run` with all that is known; with few where it does not take all.

    optax wants transforms to take what they don't know; `optax.contrib.sam` does not.
    """
    try:
        return run(**all_known)
    except TypeError as error:
        if not is_about_keywords(error):
            raise
        return run(**few)


def optimizer_rate(opt_state: PyTree) -> Any:
    """The learning rate that an optimizer used, from its state after the update.

    Raises:
      ValueError: not just one `optax.inject_hyperparams` state with a `learning_rate`.
    """
    found = [
        x.hyperparams["learning_rate"]
        for x in jax.tree.leaves(opt_state, is_leaf=_has_rate)
        if _has_rate(x)
    ]
    if len(found) != 1:
        raise ValueError(
            '`sync` was made with learning_rate="optimizer", so `optimizer` must hold one learning '
            "rate in its state: make it by `optax.inject_hyperparams(optax.sgd)(learning_rate=...)`"
            f"; found {len(found) or 'none'}."
        )
    return found[0]


def _has_rate(x: Any) -> bool:
    hyperparams = getattr(x, "hyperparams", None)
    return isinstance(hyperparams, Mapping) and "learning_rate" in hyperparams
