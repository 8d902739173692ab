"""The form of loss functions, and facts from their traced gradients: order, unused parameters.

A traced gradient is read in the order in which it was traced, with the programs inside it (of jit,
checkpoint, custom derivatives, loops and branches) in the place where they are called. A gradient's
place in that order tells when the backward pass has it.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._support.checks import warn_user
from .._support.types import PyTree
from ..tree import at_least_float32, cast, leaf_names, not_floating, type_text
from ._programs import called_program, interpret, read_loop, varying_axes

NOT_COMPUTED = -1  # place of a value that the program does not compute


class Fact(NamedTuple):
    """A fact about one value of a program.

    Attributes:
      place: position of the equation that computes the value, or `NOT_COMPUTED`.
      zero: whether the value is zero by construction, whatever the inputs are.
    """

    place: int
    zero: bool


# Cheap operations on a finished gradient: a compiler fuses them into the equation before them or
# into what reads them, so the gradient counts as ready where their operands are.
_TRIVIAL = {
    "add_any", "broadcast_in_dim", "convert_element_type", "copy", "name", "neg", "real",
    "reduce_precision", "reshape", "rev", "sharding_constraint", "squeeze", "transpose",
}  # fmt: skip
# Zero where every operand is; where any is; where the first is (the others are places or divisors).
_ZERO_OF_ALL = _TRIVIAL | {
    "add", "all_gather", "all_to_all", "concatenate", "cumsum", "pad", "ppermute", "psum",
    "psum_invariant", "reduce_scatter", "reduce_sum", "slice", "sub",
}  # fmt: skip
_ZERO_OF_ANY = {"conv_general_dilated", "dot_general", "mul"}
_ZERO_OF_FIRST = {"div", "dynamic_slice", "gather"}


def _constant_fact(value: Any) -> Fact:
    """Return the fact of a constant; an array on a device is not read."""
    return Fact(NOT_COMPUTED, isinstance(value, np.ndarray) and not np.any(value))


class _Reader:
    """A walk through a program that counts its equations."""

    def __init__(self) -> None:
        self._place = 0

    def run(self, program: Any, inputs: Sequence[Fact]) -> list[Fact]:
        """Return facts of the outputs of `program`, closed or open, as if called at this place."""
        return interpret(program, inputs, self._equation, _constant_fact)

    def _equation(self, eqn: Any, operands: list[Fact]) -> list[Fact]:
        name, params = eqn.primitive.name, eqn.params
        if name in ("scan", "while"):
            return self._loop(eqn, operands)
        if name == "cond":
            return self._cond(params["branches"], operands[1:])
        if inner := called_program(eqn):
            return self.run(inner, operands)
        self._place += 1
        if name == "optimization_barrier":
            return operands
        last = max((o.place for o in operands), default=NOT_COMPUTED)
        place = self._place if last == NOT_COMPUTED or name not in _TRIVIAL else last
        return [Fact(place, _is_zero(name, [o.zero for o in operands]))] * len(eqn.outvars)

    def _loop(self, eqn: Any, operands: list[Fact]) -> list[Fact]:
        """Return facts of the outputs of a loop.

        All outputs of a loop are ready at its end. The places of its body distinguish what one
        iteration finishes first and last; they are between those before and after the loop.
        """
        self._place += 1
        start = self._place

        def join(fact: Fact, after: Fact, *_: Fact) -> Fact:
            return fact._replace(zero=fact.zero and after.zero)

        facts, last = read_loop(eqn, self.run, operands, join)
        pairs = zip(facts, last, strict=True)
        return [Fact(max(in_body.place, start), fact.zero) for fact, in_body in pairs]

    def _cond(self, branches: Sequence[Any], operands: list[Fact]) -> list[Fact]:
        start = self._place
        facts_by_branch = [self.run(branch, operands) for branch in branches]
        self._place += 1
        return [
            Fact(max(start + 1, *(f.place for f in facts)), all(f.zero for f in facts))
            for facts in zip(*facts_by_branch, strict=True)
        ]


def _is_zero(name: str, zeros: list[bool]) -> bool:
    """Return whether the result of an operation is zero, from which of its operands are."""
    if not zeros:
        return False
    if name == "select_n":  # the first operand selects
        return all(zeros[1:])
    if name.startswith("scatter"):  # operand, places, updates
        return name in ("scatter-add", "scatter") and zeros[0] and zeros[2]
    if name == "dynamic_update_slice":  # operand, update, places
        return zeros[0] and zeros[1]
    return (
        (name in _ZERO_OF_ALL and all(zeros))
        or (name in _ZERO_OF_ANY and any(zeros))
        or (name in _ZERO_OF_FIRST and zeros[0])
    )


class Quotient(NamedTuple):
    """A loss that is a quotient of sums already, and its weight among others.

    Attributes:
      value: () float, the sum divided by the weight.
      weight: () float32, >= 0.
    """

    value: jax.Array
    weight: jax.Array


_NEEDED = {
    "model_state": "the train state has one",
    "embedded": "the step has `embeddings`, and passes their vectors by feature",
}
_TYPES_NAME_THE_MESH = (
    "`loss_fn`: inside of jax.shard_map types of traced arrays differ from those of constants. "
    'Equinox\'s BatchNorm compares them: make it with mode="batch", or use a js.virtual_mesh.'
)
FullLoss = Callable[..., tuple[Any, tuple[dict[str, jax.Array], PyTree]]]
"""A loss function as `as_full_loss` returns it; the loss is one that `as_quotient` takes."""


def as_full_loss(loss_fn: Callable[..., Any]) -> FullLoss:
    """Return a loss as `(params, batch, *, rng, model_state) -> (loss, (metrics, model_state))`.

    The loss is a scalar, a pair of scalars `(sum, weight)` or a `Quotient`; see `as_quotient`. The
    keyword `embedded=`, what was looked up in tables for the batch, is passed on. Model state is
    returned in the containers and the floating dtypes in which it was given.

    Raises:
      ValueError: `loss_fn` is not callable; at trace time, there is model state and the function
        does not take it, or does not return one of the same leaves; it returns results of another
        shape, or a loss that is not floating.
      UserWarning: at trace time, of a pair whose second part depends on the parameters.
    """
    if not callable(loss_fn):
        raise ValueError(f"`loss_fn` must be callable, got {type(loss_fn).__name__}.")
    parameters = inspect.signature(loss_fn).parameters
    any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    takes = {n for n in ("rng", "model_state", "embedded") if any_keyword or n in parameters}
    has_checked_weight = False  # which traces the function once more

    def full(params: PyTree, batch: PyTree, **given: PyTree):
        nonlocal has_checked_weight
        model_state = given["model_state"]
        for name, why in _NEEDED.items():
            if name not in takes and jax.tree.leaves(given.get(name)):
                raise ValueError(f"`loss_fn` must take `{name}` as a keyword, since {why}.")
        keywords = {name: x for name, x in given.items() if name in takes and x is not None}
        has_state = bool(jax.tree.leaves(model_state))
        try:
            out = loss_fn(params, batch, **keywords)
        except Exception as error:
            is_mapped = jax.sharding.get_abstract_mesh().manual_axes
            if has_state and is_mapped and isinstance(error, TypeError | ValueError):
                # Types of traced arrays name the mesh there, and those of constants do not.
                error.add_note(_TYPES_NAME_THE_MESH)
            elif not has_state and "model_state" in parameters:
                error.add_note(f"`loss_fn` takes `model_state`, which is empty: {_GIVE_STATE}.")
            raise
        loss, aux = out, {}
        has_two = isinstance(out, tuple) and len(out) == 2
        if has_two and not isinstance(out[1], jax.Array | np.ndarray | np.generic | float | int):
            loss, aux = out
        is_pair = isinstance(aux, tuple) and len(aux) == 2
        metrics, after = aux if is_pair else (aux, None)
        terms = loss if isinstance(loss, tuple) else (loss, 1.0)
        are_scalars = len(terms) == 2 and all(x is not None and jnp.shape(x) == () for x in terms)
        if not are_scalars or not isinstance(metrics, dict):
            raise ValueError(
                "`loss_fn` must return a loss, (loss, metrics) or (loss, (metrics, model_state)), "
                "with a scalar or a pair of scalars (sum, weight) as loss and a dict as metrics, "
                f"got {jax.tree.map(jnp.shape, out)}."
            )
        if has_state and not is_pair:
            raise ValueError(
                "`loss_fn` must return (loss, (metrics, model_state)), since the train state has a "
                f"model state, got {'(loss, metrics)' if aux else 'a loss'}."
            )
        check_loss("loss_fn", terms[0])
        _check_metrics(metrics)
        if isinstance(loss, tuple) and not isinstance(loss, Quotient) and not has_checked_weight:
            has_checked_weight = True

            def weight(params: PyTree) -> Any:
                out = loss_fn(params, batch, **keywords)
                return (out[0] if isinstance(out[0], tuple) else out)[1]

            warn_of_weight("loss_fn", weight, params)
        # A Python float is a float32 loss, also where jax counts in float64.
        loss = jax.tree.map(lambda x: jnp.float32(x) if type(x) is float else x, loss)
        return loss, (metrics, _like_given(after, model_state))

    return full


_GIVE_STATE = "pass `step.init(params, model_state=...)`"


def _like_given(after: PyTree, before: PyTree) -> PyTree:
    """Return a new model state in the containers and floating dtypes of the one before.

    Raises:
      ValueError: it has other leaves, or a leaf of another shape or kind.
    """
    names, new_names = leaf_names(before), leaf_names(after)
    if names != new_names:
        others = sorted({*names} ^ {*new_names})[:6] or new_names
        if not names:
            raise ValueError(
                f"`loss_fn` returned model state, {others}, and was given none: {_GIVE_STATE}."
            )
        raise ValueError(
            "`loss_fn` must return a model state with the leaves that it was given, as (loss, "
            f"(metrics, model_state)): only one of the two has {others}."
        )
    leaves: list[Any] = []
    for name, x, old in zip(names, jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
        new = x if isinstance(x, jax.Array) else jnp.asarray(x)
        if all(jnp.issubdtype(each.dtype, jnp.floating) for each in (new, old)):
            new = cast(new, old.dtype)
        if type_text(new) != type_text(old):
            raise ValueError(
                "`loss_fn` must return a model state of the types that it was given: "
                f"{name!r} is {type_text(old)}, got {type_text(new)}."
            )
        leaves.append(new)
    return jax.tree.structure(before).unflatten(leaves)


def warn_of_weight(argument: str, weight: Callable[[PyTree], Any], params: PyTree) -> None:
    """Warn if a weight depends on what it must not depend on, as a metric does.

    Args:
      argument: the public argument that has returned a pair `(sum, weight)`.
      weight: function that returns the weight.
      params: the parameters, or other values that depend on them.
    """
    program = jax.make_jaxpr(weight)(params)
    (depends,) = varying_axes(program, [frozenset({"params"})] * len(program.in_avals))
    if depends:
        warn_user(
            f"`{argument}` returned two scalars, which are a sum and its weight, and the second "
            "one depends on the parameters. Return a metric in a dict: (loss, {...})."
        )


def _check_metrics(metrics: dict[str, Any]) -> None:
    """Raise `ValueError` for a metric of which there is no mean: text, an object or a PRNG key."""
    for name, x in zip(leaf_names(metrics), jax.tree.leaves(metrics), strict=True):
        dtype = x.dtype if isinstance(x, jax.Array) else np.asarray(x).dtype
        if not (jnp.issubdtype(dtype, jnp.number) or dtype == np.bool_):
            raise ValueError(
                "`loss_fn` must return metrics of numbers or bools, which are averaged, got "
                f"{name!r} of dtype {dtype}: leave it out, or return it in `model_state`."
            )


def as_quotient(loss: Any) -> tuple[jax.Array, jax.Array | None]:
    """Return the value of a loss, and its weight in means over several batches.

    Args:
      loss: () float; or `(sum, weight)`, whose value is sum / weight; or a `Quotient`. The weight,
        such as a number of tokens, is >= 0 and has no gradient.

    Returns:
      The value, and the weight as () float32; None for a loss that is no pair, of which all count
      equally. A weight of 0 divides by nothing, and becomes the least number above 0, so that the
      mean of such losses alone is theirs.
    """
    if not isinstance(loss, tuple):
        return loss, None
    total, weight = loss
    weight = jax.lax.stop_gradient(jnp.asarray(weight, jnp.float32))
    value = total
    if not isinstance(loss, Quotient):
        wide = at_least_float32(total.dtype)
        value = total.astype(wide) / jnp.where(weight > 0, weight, 1).astype(wide)
    return value, jnp.maximum(weight, jnp.finfo(jnp.float32).tiny)


def check_loss(argument: str, loss: Any) -> None:
    """Raise `ValueError` for a loss that has no gradients: an integer, a bool, a complex number.

    Args:
      argument: the public argument that has returned the loss, for the message.
      loss: a scalar.
    """
    if not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        raise ValueError(
            f"`{argument}` must return a loss of a floating dtype, got {jnp.result_type(loss)}."
        )


def gradient_facts(
    owner: str,
    loss_fn: Callable[..., Any],
    params: PyTree,
    batch: PyTree,
    rng: Any,
    model_state: PyTree | None,
) -> list[Fact]:
    """Return a fact for the gradient of each leaf of `params`, in flattening order.

    Raises:
      ValueError: naming `owner`: a loss function that is not callable or not scalar, no parameters,
        parameters that are not real floating point.
    """
    loss = as_full_loss(loss_fn)
    if not jax.tree.leaves(params):
        raise ValueError(f"{owner}: `params` must have leaves, got an empty tree.")
    if wrong := not_floating(params):
        raise ValueError(
            f"{owner}: `params` must be real floating-point arrays, got {', '.join(wrong)}: let "
            "`loss_fn` close over those."
        )

    def gradients(params: PyTree, batch: PyTree, rng: Any, model_state: PyTree) -> list[Any]:
        def value(params: PyTree) -> jax.Array:
            return as_quotient(loss(params, batch, rng=rng, model_state=model_state)[0])[0]

        return jax.tree.leaves(jax.grad(value)(params))

    # Shapes are all that tracing needs, so a key is described and not made.
    key = jax.eval_shape(lambda: jax.random.key(0)) if rng is None else rng
    state = {} if model_state is None else model_state
    program = jax.make_jaxpr(gradients)(params, batch, key, state)
    return _Reader().run(program, [Fact(NOT_COMPUTED, False)] * len(program.in_avals))


def ready_order(
    loss_fn: Callable[..., Any],
    params: PyTree,
    batch: PyTree,
    *,
    rng: Any = None,
    model_state: PyTree | None = None,
) -> tuple[int, ...]:
    """Return the order in which the backward pass of a loss finishes the gradients.

    It is read from the traced gradient function: a gradient is ready at the equation that computes
    it; reshapes and casts after that do not count. Pass it to `js.all_reduce_gradients(...,
    order=...)`, whose buckets then fill in that order, which torch's reducer learns from a first,
    slow iteration.
    Everything that one loop (`lax.scan` over layers) yields is ready at its end, in the order in
    which an iteration computes it.

    Args:
      loss_fn: a loss function that `js.make_train_step` accepts: `(params, batch) -> loss`, `(loss,
        metrics)` or `(loss, (metrics, model_state))`, with `rng` and `model_state` as keywords if
        it takes them.
      params: arrays or `ShapeDtypeStruct`s, of one replica.
      batch: arrays or `ShapeDtypeStruct`s, of one replica; the shapes of one device's batch.
      rng: PRNG key for a loss that takes one; None: any key.
      model_state: the model state of a loss that takes one; None is {}.

    Returns:
      Leaf positions in flattening order, first ready first. Gradients that are zero by
      construction (unused parameters) come last; what is ready at once, in reverse leaf order.

    Raises:
      ValueError: `loss_fn` not callable or not scalar; no parameters, or some that are not real
        floating point.

    Example:
      >>> layers = {"a": jnp.ones((2, 2)), "b": jnp.ones((2, 2))}  # b is used first, ready last
      >>> ready_order(lambda p, x: jnp.sum((x @ p["b"]) @ p["a"]), layers, jnp.ones((3, 2)))
      (0, 1)

    Nothing runs on a device. Communication: none.

    Source: the counterpart of `rebuild_buckets` in torch 2.13, `reducer.cpp`.
    """
    facts = gradient_facts("ready_order", loss_fn, params, batch, rng, model_state)
    ranks = [(zero, 0 if zero else place, -leaf) for leaf, (place, zero) in enumerate(facts)]
    return tuple(sorted(range(len(facts)), key=ranks.__getitem__))


def unused_parameters(
    loss_fn: Callable[..., Any],
    params: PyTree,
    batch: PyTree,
    *,
    rng: Any = None,
    model_state: PyTree | None = None,
) -> list[str]:
    """Return the names of the parameters that the loss does not depend on.

    They are read from the traced gradient function. A parameter is unused if its gradient is zero
    by construction, whatever the values are: it does not reach the loss, or only through
    `lax.stop_gradient`, rounding, comparisons or a product with a constant zero. A parameter that
    one branch of a `lax.cond` uses is used, and so is one whose gradient merely happens to be zero
    (`js.gradients.skip_unused` finds those).

    Args:
      loss_fn: a loss function that `js.make_train_step` accepts: `(params, batch) -> loss`, `(loss,
        metrics)` or `(loss, (metrics, model_state))`, with `rng` and `model_state` as keywords if
        it takes them.
      params: arrays or `ShapeDtypeStruct`s, of one replica.
      batch: arrays or `ShapeDtypeStruct`s, of one replica.
      rng: PRNG key for a loss that takes one; None: any key.
      model_state: the model state of a loss that takes one; None is {}.

    Returns:
      Leaf names such as `"head/bias"`, in flattening order; [] if all are used.

    Raises:
      ValueError: `loss_fn` not callable or not scalar; no parameters, or some that are not real
        floating point.

    Example:
      >>> unused_parameters(lambda p, x: jnp.sum(p["a"] * x), {"a": 1.0, "b": 2.0}, jnp.ones(3))
      ['b']

    Nothing runs on a device. Communication: none.

    Source: the counterpart of `find_unused_parameters` in torch 2.13, `reducer.cpp`.
    """
    facts = gradient_facts("unused_parameters", loss_fn, params, batch, rng, model_state)
    return [name for name, fact in zip(leaf_names(params), facts, strict=True) if fact.zero]


def check_all_used(
    loss_fn: Callable[..., Any],
    params: PyTree,
    batch: PyTree,
    *,
    rng: Any = None,
    model_state: PyTree | None = None,
) -> None:
    """Raise if the loss does not depend on some parameter, naming all of these.

    This is the default of torch's DDP (`find_unused_parameters=False`), before the first step.

    Args:
      loss_fn: a loss function that `js.gradients.unused_parameters` accepts.
      params: arrays or `ShapeDtypeStruct`s, of one replica.
      batch: arrays or `ShapeDtypeStruct`s, of one replica.
      rng: PRNG key for a loss that takes one; None: any key.
      model_state: the model state of a loss that takes one; None is {}.

    Raises:
      ValueError: naming every unused parameter; as `js.gradients.unused_parameters` otherwise.

    Nothing runs on a device. Communication: none.

    Source: torch 2.13, `reducer.cpp`, "Expected to have finished reduction in the prior iteration".
    """
    names = unused_parameters(loss_fn, params, batch, rng=rng, model_state=model_state)
    if names:
        raise ValueError(
            f"`loss_fn` does not depend on these of `params`: {', '.join(names)}. Leave them out, "
            "freeze them by optax.masked, or put js.gradients.skip_unused around the optimizer."
        )


class LossProgram:
    """Base class of loss functions with parameters, programs or optimizers in a form of their own.

    This is all that a step asks of such a function, whose call is that of any loss function. It
    asks instances of this class alone: a user's function may have attributes of the same names.

    Attributes:
      param_types: types of the parameters in the form in which a step keeps them; None: those of
        the trees that `init` is given.
      dispatch: function that runs the programs of the loss before those of the step, and returns
        what the loss function takes in place of the batch (see `HostPipeline.dispatch`); None: the
        loss function is a part of the step's programs.
      quotient_loss: the loss function as a step calls it, whose loss may be a `Quotient`
        where that of the call itself is a scalar; None: a step calls the function itself.
      before_run: function that is called before each run of a program, and raises an error if
        compiled programs are out of date; None: they never are.
      check_compiled: function that is given the text of each compiled program before its first run,
        and raises an error if it would not end; None: there is nothing to check.
    """

    param_types: PyTree | None = None
    dispatch: Callable[..., Any] | None = None
    quotient_loss: Callable[..., Any] | None = None
    before_run: Callable[..., None] | None = None
    check_compiled: Callable[[str], None] | None = None

    @staticmethod
    def from_loss_fn(loss_fn: Any) -> "LossProgram":
        """Return `loss_fn` if it is a `LossProgram`, and the base class' defaults if it is not."""
        return loss_fn if isinstance(loss_fn, LossProgram) else LossProgram()

    def check_mesh(self, mesh: Any) -> None:
        """Raise `ValueError` if the programs of `dispatch` cannot run on the step's `mesh`."""

    def params_form(self, params: PyTree) -> PyTree:
        """Return the parameters that `init` is given in the form that the loss function takes."""
        return params

    def model_state_form(self, model_state: PyTree) -> PyTree:
        """Return the model state that `init` is given in the form that the loss function takes."""
        return model_state

    def tied_transform(self, tx: optax.GradientTransformation) -> optax.GradientTransformation:
        """Return `tx` for the parameters, of which tied leaves are one parameter."""
        return tx
