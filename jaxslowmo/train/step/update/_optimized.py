"""What the optimizer makes of gradients: what it is told beside them, and validation afterwards.

`optax.contrib.reduce_on_plateau`, `optax.polyak_sgd` and others need the loss as `value`; line
searches (`optax.lbfgs`) need `grad` and `value_fn`, too. The loss has to be averaged as the
gradients were, over the axes and in the updates that their transforms say.

An update that is validated afterwards is made first, and then left as it is, clipped or dropped.
Nothing that must be known on all devices, the norm of all gradients or whether one is infinite,
stands then between the backward pass and the arithmetic of the optimizer.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import jax
import optax
from jax import lax

from ...._support.scopes import METRICS
from ...._support.types import AxisName, PyTree
from ....collectives import all_mean, weighted_means
from ....gradients.clipping import clip_state, scaled
from ....gradients.precision import was_skipped
from ....mesh import axis_names, axis_size, cast_varying, vary_over, varying_axes
from ....tracing import run_where_values_vary
from ....transform import GradientSpec, Reduction, Validation, holds_state, run_if, spec_of
from ....tree import leaf_names
from ._batch_gradients import LossData

USE_CHAIN = (
    "An optax.chain, or another wrapper of optax, hides what transforms it holds: join them by "
    "js.chain, or pass them apart as `gradients`, `optimizer` and `sync`."
)


def averaging_of(
    transform: Any, state: PyTree, axis_name: AxisName
) -> tuple[list[Reduction], set[str], bool]:
    """How a transform of this state averages gradients over replica axes with several replicas.

    Returns:
      The reductions that it states, in the order in which they run, one for all that is static; all
      axes over which there is one; and whether it holds transforms that state nothing, which may
      average over each of them.
    """
    spec = spec_of(transform)
    stated = spec.reductions_of(state)
    names = [name for name in axis_names(axis_name) if axis_size(name) > 1]
    always = {name for axes, due in stated if due is True for name in axes}
    found = [Reduction(tuple(n for n in names if n in always), True)]
    for axes, due in stated:
        if not isinstance(due, bool):
            own = tuple(n for n in names if n in axes and n not in always)
            found.append(Reduction(own, due))
    found = [each for each in found if each.axes]
    hides = holds_state(spec.unknown(state), "gradients")
    averaged = {*names} if hides else {name for each in found for name in each.axes}
    return found, averaged, hides


def mean_where_due(
    x: jax.Array, weight: jax.Array | None, reductions: Sequence[Reduction], axis_name: AxisName
) -> jax.Array:
    """`x` averaged over replicas in the updates in which gradients are.

    Args:
      x: () float.
      weight: this replica's share; one of weight 0 does not count.
      reductions: those of the gradients, of `averaging_of`.
      axis_name: the replica axis.

    Communication: one all-reduce of `x` over the axes of each reduction that is due, with a weight
      of 8 bytes more; none where nothing uses the result.
    """

    def mean_over(axes: tuple[str, ...], x: jax.Array) -> jax.Array:
        with jax.named_scope(METRICS):
            flat = x.reshape(1)
            if weight is None:
                (x,) = all_mean(flat, axes)
            else:
                ((x,),) = weighted_means([flat], weight, axes, idle_as_zeros=False)
        return vary_over(x, axis_names(axis_name))  # as the gradients

    for axes, due in reductions:
        x = run_if(due, partial(mean_over, axes), lambda x: x, x)
    return vary_over(x, axis_names(axis_name))


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


_NO_VALUE = (
    "`optimizer` asks for `value`, the loss averaged as gradients are, and they are averaged by "
    f"transforms that the step does not see. {USE_CHAIN}"
)


class Untold:
    """Stands for a loss that is not averaged as gradients were; whoever computes with it is told.

    Transforms that ignore `value` hand it on.
    """

    def _refuse(self, *_: Any) -> NoReturn:
        raise ValueError(_NO_VALUE)

    __jax_array__ = __array__ = __getattr__ = __float__ = __bool__ = __abs__ = __neg__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __pow__ = __rpow__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _refuse  # type: ignore[assignment]
    __hash__ = object.__hash__


def heard_by(spec: GradientSpec, state: PyTree, **known: Any) -> dict[str, Any]:
    """What of `known` a transform of this spec and state is told: what it takes, and the weight.

    One of ours inside of an optax.chain is told the layouts of leaves, too, which it would gather.
    """
    hidden = holds_state(spec.unknown(state), "gradients")
    takes = spec.takes | ({"weight", "param_specs"} if hidden else {"weight"})
    return {name: x for name, x in known.items() if x is not None and name in takes}


def update_told(
    optimizer: optax.GradientTransformationExtraArgs,
    grads: PyTree,
    state: PyTree,
    params: PyTree,
    *,
    value: jax.Array | None,
    averaged: tuple[str, ...],
    loss_at: Callable[..., jax.Array],
    data: LossData | None,
    weight: jax.Array | None,
    finite: jax.Array | None = None,
    param_specs: PyTree | None = None,
    validation: Validation | None = None,
) -> tuple[PyTree, PyTree]:
    """`optimizer.update` with `value`, `grad` and `value_fn`, and the weight if there is one.

    `value` is the loss, averaged as the gradients were, over the axes `averaged` in some update;
    None where transforms that nobody knows average them. `loss_at(params, data=data)` is the
    replica's own loss elsewhere; without `data` the batches are gone. Of `finite`, `param_specs`,
    `validation` and that gradients were divided by a loss scale it is told what its spec takes.

    Raises:
      ValueError: it calls `value_fn` and gradients are averaged over some axis, or asks for a value
        that is not known; a chain that exchanges and cannot be run with varying types.

    Communication: the optimizer's.
    """
    spec = spec_of(optimizer)
    exchanges = [moves for moves in ("gradients", "parameters") if holds_state(state, moves)]
    static = heard_by(spec, state, unscaled=True, param_specs=param_specs)
    given = heard_by(spec, state, weight=weight, finite=finite, validation=validation)

    def update(
        grads: PyTree, state: PyTree, params: PyTree, value: Any, given: Any, data: Any
    ) -> tuple[PyTree, PyTree]:
        value_fn = _refusing(averaged) if data is None else partial(loss_at, data=data)
        told = {"value": Untold() if value is None else value, "grad": grads, "value_fn": value_fn}
        run = partial(optimizer.update, grads, state, params)
        try:
            return run(**told, **static, **given)
        except (TypeError, ValueError) as error:
            if value is None and "__jax_array__" in str(error):  # as an operand of jax's functions
                raise ValueError(_NO_VALUE) from error
            # optax wants transforms to take what they don't know; `optax.contrib.sam` does not.
            if "unexpected keyword argument" not in str(error):
                raise
            few = {**static, **given}
            return run(**{name: x for name, x in few.items() if name in spec.takes - {"weight"}})

    refused = None
    if exchanges:
        refused = (
            "`optimizer` is a chain that exchanges, and a transform in it has branches or loops "
            "that return constants beside what differs between replicas, which jax refuses on "
            "devices. Pass what exchanges apart from it, as `gradients` or `sync`, or all of it as "
            "a js.chain."
        )
    operands = grads, state, params, value, given, None if averaged else data
    return run_where_values_vary(update, *operands, refused=refused)


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


def check_reduced(updates: PyTree, inner_axes: tuple[str, ...]) -> None:
    """Raise `ValueError` for updates that differ between the devices of a replica."""
    wrong = [
        name
        for name, u in zip(leaf_names(updates), jax.tree.leaves(updates), strict=True)
        if varying_axes(u) & set(inner_axes)
    ]
    if wrong:
        raise ValueError(
            f"`gradients` must average over the inner axes {inner_axes} of the mesh, between whose "
            f"devices the batch is split; updates still differ there: {', '.join(wrong)}. Leave "
            f"`gradients` out, or pass js.all_reduce_gradients({inner_axes!r})."
        )


class Made(NamedTuple):
    """What an optimizer made of gradients."""

    updates: PyTree
    state: PyTree
    rate: jax.Array | None  # the learning rate that it used, where it is wanted


Run = Callable[[PyTree, Validation | None], Made]
"""One update by an optimizer, of gradients; always from the same state."""


def validated(run: Run, grads: PyTree, gradients_state: PyTree, optimizer_state: PyTree) -> Made:
    """The update that `run` makes of `grads`, found without waiting for what decides about it.

    It is run as if nothing were to clip. Where the norm, once it is known, wants gradients clipped,
    it is run again, from the old state.

    Args:
      run: the optimizer.
      grads: averaged, and not clipped yet.
      gradients_state: of the gradient transform, after it, which may have found the norm.
      optimizer_state: before.

    Returns:
      What `run(clipped, None)` returns.

    Communication: that of one run.
    """
    first = run(grads, Validation())
    outside, inside = clip_state(gradients_state), clip_state(first.state)
    found = outside or inside
    if found is None:  # a loss scale alone, which has chosen already
        return first
    skipped = was_skipped(optimizer_state, first.state)

    def again() -> Made:
        clipped = grads if outside is None else scaled(grads, found.clip_factor)
        return run(clipped, Validation(inside, skipped))

    shapes = jax.eval_shape(again)

    def alike(made: Made, other: Made) -> Made:
        return jax.tree.map(
            lambda x, y: cast_varying(x, varying_axes(y) - varying_axes(x)), made, other
        )

    # NaN is no 1, either: what the clipping makes of it is what an earlier one would have made.
    return lax.cond(
        found.clip_factor != 1, lambda: alike(again(), first), lambda: alike(first, shapes)
    )
