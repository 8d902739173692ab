"""How a loss computes in few bits: the dtypes of a policy, and the scale of its gradients."""

from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..._support.scopes import LOSS_SCALE
from ..._support.types import PyTree
from ...mesh import vary_over
from ...tracing import FullLoss
from ...transform import remembered
from ...tree import all_finite, at_least_float32, by_dtype, cast, kept_if, parts_of

COMPUTE_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Policy:
    """In what a loss function computes, whatever dtypes parameters and batch have.

    `js.make_train_step(policy=js.Policy("bfloat16"))` gives the loss function parameters and batch
    in bfloat16. Parameters stay as they are: gradients arrive in their dtypes, and the optimizer
    works on float32 master weights. Results are at least float32. With `"float16"` put
    `js.dynamic_loss_scale` around `optimizer`: without it a step issues a `UserWarning` once.

    Attributes:
      compute: `"float32"`, `"bfloat16"` or `"float16"`: what floating leaves are cast to.
      keep: names of leaves, or of the subtrees that hold them, that are not cast, in the parameters
        as in the batch: paths such as `"decoder/norm"`, or patterns such as `"*/norm"`, in which
        `*` stands for anything. A name that is nowhere is an error of the step.

    Raises:
      ValueError: another dtype, or names that are no strings.
    """

    compute: str = "float32"
    _: KW_ONLY
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise `ValueError` for other dtypes and names."""
        try:
            name = jnp.dtype(self.compute).name
        except TypeError:
            name = None
        if name not in COMPUTE_DTYPES:
            raise ValueError(
                f"Policy: `compute` must be one of {COMPUTE_DTYPES}, got {self.compute!r}."
            )
        names = (self.keep,) if isinstance(self.keep, str) else self.keep
        keep = tuple(names) if isinstance(names, Iterable) else (names,)
        if not all(isinstance(x, str) and x for x in keep):
            raise ValueError(f"Policy: `keep` must be names of leaves, got {self.keep!r}.")
        object.__setattr__(self, "compute", name)
        object.__setattr__(self, "keep", keep)

    def cast(self, tree: PyTree) -> PyTree:
        """`tree` with its real floating leaves in `compute`, but for those that are kept."""
        dtype = jnp.dtype(self.compute)

        def one(path: Any, x: Any) -> Any:
            if not _is_real(x) or any(_matches(path, name) for name in self.keep):
                return x
            return cast(jnp.asarray(x), dtype)

        return jax.tree_util.tree_map_with_path(one, tree)

    def check_names(self, *trees: PyTree) -> None:
        """Raise `ValueError` for names in `keep` that none of the trees has."""
        paths = [path for tree in trees for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
        for name in self.keep:
            if not any(_matches(path, name) for path in paths):
                known = ", ".join(_name(path) for path in paths[:8])
                more = f" and {len(paths) - 8} more" if len(paths) > 8 else ""
                raise ValueError(
                    f"Policy: `keep` must name leaves of the parameters or the batch, or subtrees "
                    f"of them, got {name!r}; leaves are {known}{more}."
                )


def computing_in(policy: Policy, loss: FullLoss) -> FullLoss:
    """`loss` that computes as `policy` says.

    Model state goes in as it is, and comes out in the dtypes that it had. Loss and floating metrics
    are at least float32. What else the loss is given is cast as the batch is.
    """

    def full(params: PyTree, batch: PyTree, *, rng: jax.Array, model_state: PyTree, **extra: Any):
        policy.check_names(params, batch, extra)
        value, (metrics, after) = loss(
            policy.cast(params),
            policy.cast(batch),
            rng=rng,
            model_state=model_state,
            **policy.cast(extra),
        )
        value, metrics = jax.tree.map(_wide, (value, metrics))
        if jax.tree.structure(after) == jax.tree.structure(model_state):
            after = jax.tree.map(_as, after, model_state)
        return value, (metrics, after)

    return full


def _matches(path: Any, name: str) -> bool:
    return any(fnmatchcase(_name(path[:n]), name) for n in range(1, len(path) + 1))


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _is_real(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def _wide(x: Any) -> Any:
    return cast(jnp.asarray(x), at_least_float32(jnp.result_type(x))) if _is_real(x) else x


def _as(x: Any, old: Any) -> Any:
    return cast(jnp.asarray(x), jnp.result_type(old)) if _is_real(x) else x


class DynamicLossScaleState(NamedTuple):
    """State of `dynamic_loss_scale`."""

    loss_scale: jax.Array  # () float32, by which to multiply the next loss
    growth_count: jax.Array  # () int32, updates without overflow since the last one or growth
    hysteresis_left: jax.Array  # () int32, overflows until the scale falls; 0 once it has
    skipped: jax.Array  # () int32, updates so far that were skipped
    skipped_last: jax.Array  # () bool, whether the last one was
    inner: PyTree  # of the optimizer inside

    @property
    def scale(self) -> jax.Array:
        """The value of `loss_scale`, by the name that the field had in 0.1.0."""
        return self.loss_scale


def scale_state(opt_state: PyTree) -> DynamicLossScaleState | None:
    """The state of the `dynamic_loss_scale` in the state of an optimizer; None without one.

    Raises:
      ValueError: there are several.
    """
    found = parts_of(opt_state, DynamicLossScaleState)
    if len(found) > 1:
        raise ValueError(
            "dynamic_loss_scale: an optimizer must hold one loss scale, by which the loss is "
            f"multiplied, found {len(found)}. Put one js.dynamic_loss_scale around the whole, such "
            "as the optax.partition of optimizers."
        )
    return found[0] if found else None


def scale_metrics(before: PyTree, after: PyTree) -> dict[str, jax.Array]:
    """What an update tells of its loss scale: the one it used, all skipped updates so far.

    Args:
      before: the state of the optimizer, which may have no loss scale.
      after: likewise, after the update.
    """
    old, new = scale_state(before), scale_state(after)
    if old is None or new is None:
        return {}
    return {
        "loss_scale": old.loss_scale,
        "skipped_updates": new.skipped.astype(old.loss_scale.dtype),
    }


def was_skipped(before: PyTree, after: PyTree) -> jax.Array | None:
    """() bool: whether an update was skipped; None without a loss scale.

    `skipped_last` would not tell where `js.accumulate` stands around the loss scale: it stays in
    updates that only add up.

    Args:
      before: the state of the optimizer.
      after: likewise, after the update.
    """
    old, new = scale_state(before), scale_state(after)
    return None if old is None or new is None else new.skipped != old.skipped


# States of optax inside of which a loss scale does not work, and why.
_NOT_AROUND = {
    "ApplyIfFiniteState": "optax.apply_if_finite, which keeps every overflow from it, so that the "
    "scale never falls",
    "MultiStepsState": "optax.MultiSteps, whose sum of gradients stays NaN after an overflow",
}


def check_place(opt_state: PyTree) -> None:
    """Raise `ValueError` for a loss scale inside of what makes it useless, or for several."""
    scale_state(opt_state)

    def stands_around(x: object) -> bool:
        return type(x).__name__ in _NOT_AROUND

    for x in jax.tree.leaves(opt_state, is_leaf=stands_around):
        if stands_around(x) and parts_of(tuple(x), DynamicLossScaleState):
            raise ValueError(
                f"dynamic_loss_scale: stands inside of {_NOT_AROUND[type(x).__name__]}: put it "
                "inside of js.dynamic_loss_scale instead, or leave it out."
            )


def loss_scale_of(opt_state: PyTree) -> jax.Array | None:
    """By what the next loss is to be multiplied: the scale that `js.dynamic_loss_scale` keeps.

    `js.make_train_step` does it by itself. In a loop of your own, with the loss as `value`:

        scale = js.loss_scale_of(opt_state)
        grads = jax.grad(lambda p: loss_fn(p, batch).astype(jnp.float32) * scale)(params)
        updates, opt_state = tx.update(grads, opt_state, params)

    Args:
      opt_state: of any optax transform; the scale is found inside of wrappers and chains.

    Returns:
      () float32, in a stacked state (replicas,); None without a loss scale.

    Raises:
      ValueError: several loss scales.

    Communication: none.
    """
    state = scale_state(opt_state)
    return None if state is None else state.loss_scale


Update = Callable[..., tuple[PyTree, PyTree]]


def is_number(x: Any) -> bool:
    """Whether an array holds what can overflow: row numbers, counters and keys do not."""
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def overflowed(tree: PyTree) -> jax.Array:
    """() bool: whether something in `tree` is infinite or NaN, on this device.

    Of leaves that the compiler shards it is whether something is anywhere.
    """
    return ~all_finite(tree)


def anywhere(found: jax.Array, axes: Iterable[str], weight: jax.Array | None) -> jax.Array:
    """`found`, () bool, on some device along `axes`.

    Args:
      found: on this device.
      axes: mapped axes; none leaves it as it is.
      weight: () this replica's share. Where some along `axes` have one above 0 those of weight 0,
        whose batch may hold anything, are not asked; where none has, all are.

    Communication: one all-reduce (max) of 4 bytes over `axes`, if there are any.
    """
    names = tuple(sorted(axes))
    if not names:
        return found
    flag = found.astype(jnp.int32)
    if weight is not None:
        # Any replica that counts outbids those that do not; the lowest bit is the answer.
        flag = flag + 2 * (weight > 0).astype(jnp.int32)
    with jax.named_scope(LOSS_SCALE):
        return lax.pmax(vary_over(flag, names), names) % 2 == 1


def zero_if(overflow: jax.Array, tree: PyTree) -> PyTree:
    """`tree` with zeros in place of all its numbers where `overflow`, () bool, is True."""
    keep = ~overflow
    return jax.tree.map(lambda x: kept_if(keep, jnp.asarray(x)) if is_number(x) else x, tree)


def as_before_if(overflow: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """`old` where `overflow`, () bool, is True, else `new`, in the dtypes of `new`."""

    def one(n: Any, o: Any) -> jax.Array:
        return jnp.where(overflow, cast(jnp.asarray(o), jnp.asarray(n).dtype), n)

    return jax.tree.map(one, new, old)


def unless_overflow(update: Update, axes: Iterable[str], weight: jax.Array | None) -> Update:
    """`update(grads, state, params)` that keeps overflows out of what it remembers and sends.

    A hook that feeds back what it did not send would never be rid of a NaN. Where one of those
    along `axes` has an overflow all get NaN for the mean, which is what makes a loss scale skip;
    counters in the state count on, and what the state holds of gradients is as before.

    Args:
      update: of a gradient transform.
      axes: over which it reduces.
      weight: see `anywhere`.

    Communication: that of `update`, and where its state holds numbers that of `anywhere`.
    """

    def guarded(grads: PyTree, state: PyTree, *rest: PyTree) -> tuple[PyTree, PyTree]:
        if not any(map(is_number, remembered(state))):
            return update(grads, state, *rest)
        overflow = anywhere(overflowed(grads), axes, weight)
        means, after = update(zero_if(overflow, grads), state, *rest)
        after = jax.tree.map(
            lambda n, o: jnp.where(overflow, o, n) if is_number(n) else n, after, state
        )
        means = jax.tree.map(
            lambda g: jnp.where(overflow, jnp.nan, g) if is_number(g) else g, means
        )
        return means, after

    return guarded


def scaled_value_and_grad(
    loss: Callable[..., Any], scale: jax.Array, *, divides: bool = True
) -> Callable[..., Any]:
    """`jax.value_and_grad(loss, has_aux=True)` by way of the loss times a scale.

    The loss is then at least float32: the product would soon be infinite in float16.

    Args:
      loss: `(params, ...) -> (loss, aux)`.
      scale: () float.
      divides: False leaves the gradients those of the loss times the scale.
    """

    def scaled(*args: Any, **known: Any) -> tuple[jax.Array, Any]:
        value, aux = loss(*args, **known)
        value = cast(value, at_least_float32(value.dtype))
        return value * cast(scale, value.dtype), (value, aux)

    def differentiate(*args: Any, **known: Any) -> tuple[Any, PyTree]:
        (_, own), grads = jax.value_and_grad(scaled, has_aux=True)(*args, **known)
        return own, divided(grads, scale) if divides else grads

    return differentiate


def divided(grads: PyTree, scale: jax.Array) -> PyTree:
    """Gradients of the loss, from those of the scaled loss, in their own dtypes."""
    divisor = by_dtype(scale)

    def one(g: Any) -> Any:
        if not is_number(g):
            return g
        g = jnp.asarray(g)
        wide = at_least_float32(g.dtype)
        return cast(cast(g, wide) / divisor(wide), g.dtype)

    return jax.tree.map(one, grads)
