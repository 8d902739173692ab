"""The protocol of parameter transforms, and the decision whether an exchange runs."""

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from .._typing import AxisName, Phase, PyTree
from ..mesh import axis_names, axis_size, require_axes, uniform, vary_over, varying_axes
from ._carry import Carry, Shares, carry_plainly
from ._schedule import Every, instants

Communicate = bool | jax.Array


class ParameterTransform(optax.GradientTransformationExtraArgs):
    """An optax transform that comes last in a chain and moves the parameters themselves.

    With y = params + updates, `update` returns the update that lands on the new parameters: y where
    nothing is due. `update(updates, state, params, communicate=True, weight=None, phase=None)`:

    * `communicate`: False, or an array that is False on all replicas, skips what is due.
    * `weight`: () number >= 0, this replica's share in averages, such as its number of samples; 0
      for one that has run out of data: its updates are dropped and averages leave it out (gossip
      passes on what it holds), so it follows the others. None: all alike.
    * `phase=None` decides inside the program (`lax.cond` on the counter in the state); a given
      phase is static, and the program holds that phase's collectives only.

    Beside optax's pair it has what other transforms and the step builder need:

    Attributes:
      phase: `phase(t, skipped=0)` on the host: the events of update t = 1, 2, ... as a hashable
        tuple of names; `()` exchanges nothing. `skipped`: in how many updates before t its exchange
        was skipped (`communicate=False`); gossip does not rotate in those. Slow steps with an exact
        average do not count: gossip does not rotate in them anyway.
      due: `due(t)`: whether update t exchanges anything, for an int or an array.
      numerator: `numerator(state, y) -> (x, w)`: the weighted parameters and their weight, whose
        sums over replicas give the exact mean; w is None where it is always 1.
      reset: `reset(state)`: the state after all replicas were set to one mean.
      schedules: when it exchanges by itself, then what else its phases repeat with.
      anchor: `anchor(state, params)`: the anchor as a tree, under the axis; None without one.
      sized: `sized(axis_sizes)`: the same transform for axes of known sizes, by name. That fixes
        what depends on them: the graph that `js.sgp` chooses by itself.
      carry: `carry(state, params, old, new)` on the host, for checkpoints: the state of all
        replicas, NumPy arrays stacked on placement `old`, as it is on `new` once all parameters are
        the consensus; where the number of replicas is the same, in another layout only. Given
        shapes and dtypes of one copy of the parameters.
      shares: `shares(state)` likewise: pairs of weights (replicas,) and stacked parameters, None
        for the replicas' own, whose weighted mean is the consensus.

    The state is a NamedTuple with a field `count`: () int32, updates so far.
    """

    phase: Callable[..., Phase]
    due: Callable[[Any], Any]
    numerator: Callable[[PyTree, PyTree], tuple[PyTree, jax.Array | None]]
    reset: Callable[[PyTree], PyTree]
    schedules: tuple[Every, ...]
    anchor: Callable[[PyTree, PyTree], PyTree] | None
    sized: Callable[[Mapping[str, int]], "ParameterTransform"]
    carry: Carry
    shares: Shares

    def __new__(
        cls,
        init: Callable[[PyTree], PyTree],
        update: Callable[..., tuple[PyTree, PyTree]],
        *,
        phase: Callable[..., Phase],
        due: Callable[[Any], Any],
        schedules: tuple[Every, ...],
        numerator: Callable[[PyTree, PyTree], tuple[PyTree, jax.Array | None]] | None = None,
        reset: Callable[[PyTree], PyTree] | None = None,
        anchor: Callable[[PyTree, PyTree], PyTree] | None = None,
        sized: "Callable[[Mapping[str, int]], ParameterTransform] | None" = None,
        carry: Carry = carry_plainly,
        shares: Shares | None = None,
    ) -> "ParameterTransform":
        """Make one from its functions; `numerator` and `reset` default to plain parameters."""
        self = super().__new__(cls, cast("optax.TransformInitFn", init), update)
        self.phase = phase
        self.due = due
        self.schedules = schedules
        self.anchor = anchor
        self.numerator = numerator or (lambda state, y: (y, None))
        self.reset = reset or (lambda state: state)
        self.sized = sized or (lambda axis_sizes: self)
        self.carry = carry
        self.shares = shares or (lambda state: [(1.0, None)])
        return self

    def phases(self) -> list[Phase]:
        """All phases that occur, in order of first appearance."""
        return list(dict.fromkeys(self.phase(t) for t in instants(self.schedules)))


def phase_name(phase: Phase) -> str:
    """Name of a phase in reports: `"local"`, `"average"`, `"slow"`, `"average+slow"`, ...

    Args:
      phase: events, as `transform.phase(t)` returns them.

    Returns:
      The events joined by "+"; "local" for none.

    Example:
      >>> phase_name(()), phase_name(("average", "slow"))
      ('local', 'average+slow')

    Communication: none.
    """
    return "+".join(phase) or "local"


def increment(count: jax.Array) -> jax.Array:
    """`count + 1`, staying at the largest int32."""
    return jnp.asarray(optax.safe_increment(count))


def phase_scope(event: str) -> Any:
    """Named scope around the exchange of `event`, by which `js.comm_report` knows it."""
    return jax.named_scope(f"phase:{event}")


def either(a: bool | jax.Array, b: bool | jax.Array) -> bool | jax.Array:
    """`a or b`, a bool where that is static."""
    return True if a is True or b is True else a | b


def is_due(
    event: str,
    schedule: Every,
    count: jax.Array,
    communicate: Communicate,
    phase: Phase | None,
) -> bool | jax.Array:
    """Whether `event` runs in this update: a bool where that is static, else a () bool array."""
    return decide(schedule(count) if phase is None else event in phase, communicate)


def decide(due: bool | jax.Array, communicate: Communicate) -> bool | jax.Array:
    """`due and communicate`, a bool where that is static."""
    if communicate is True or due is False:
        return due
    return False if communicate is False else jnp.logical_and(due, communicate)


def run_if(
    due: bool | jax.Array,
    exchange: Callable[[PyTree], PyTree],
    otherwise: Callable[[PyTree], PyTree],
    operand: PyTree,
) -> PyTree:
    """`exchange(operand)` if `due` else `otherwise(operand)`, as a `lax.cond` where undecided.

    The predicate is equal on all replicas, since it comes from the counter, so it is safe to have
    collectives in a branch; under vmap it stays a cond.
    """
    if isinstance(due, bool):
        return exchange(operand) if due else otherwise(operand)
    return lax.cond(uniform(due), *_alike([exchange, otherwise], operand), operand)


def run_one_of(
    index: int | jax.Array, branches: Sequence[Callable[[PyTree], PyTree]], operand: PyTree
) -> PyTree:
    """`branches[index](operand)`, as a `lax.switch` where that is undecided; see `run_if`."""
    if len(branches) == 1:
        index = 0
    if isinstance(index, int):
        return branches[index](operand)
    return lax.switch(uniform(index), _alike(branches, operand), operand)


def _alike(
    branches: Sequence[Callable[[PyTree], PyTree]], operand: PyTree
) -> list[Callable[[PyTree], PyTree]]:
    """Branches that agree in what their results vary over: a mean varies over less than others.

    Each is run once, and what `lax.cond` then runs is its jaxpr. Run twice per cond, branches would
    run four times in a cond inside a cond.
    """
    traced = [jax.make_jaxpr(branch, return_shape=True)(operand) for branch in branches]
    # Joined once: graphs can have hundreds of rounds, a branch each.
    results = zip(*(jax.tree.leaves(shapes) for _, shapes in traced), strict=True)
    axes = [frozenset().union(*map(varying_axes, leaves)) for leaves in results]

    def alike(jaxpr: ClosedJaxpr, shapes: PyTree) -> Callable[[PyTree], PyTree]:
        def branch(x: PyTree) -> PyTree:
            leaves = jaxpr_as_fun(jaxpr)(*jax.tree.leaves(x))
            return jax.tree.unflatten(jax.tree.structure(shapes), map(vary_over, leaves, axes))

        return branch

    return [alike(*each) for each in traced]


def unless_idle(updates: PyTree, weight: jax.Array | None) -> PyTree:
    """`updates`, or zeros on a replica of weight 0, whose batch may hold anything."""
    if weight is None:
        return updates
    return jax.tree.map(lambda u: jnp.where(weight > 0, u, jnp.zeros_like(u)), updates)


def check_axis_argument(owner: str, argument: str, axis_name: object) -> None:
    """Raise `ValueError` unless `axis_name` is a name or a tuple of distinct names."""
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not names or not all(isinstance(n, str) and n for n in names):
        raise ValueError(
            f"{owner}: `{argument}` must be the name of a mapped axis or a tuple of names, "
            f"got {axis_name!r}."
        )
    if len(set(names)) != len(names):
        raise ValueError(f"{owner}: `{argument}` names an axis twice, got {axis_name!r}.")


def check_exchange_arguments(
    owner: str,
    axis_name: object,
    local_axis_name: object | None,
    bucket_bytes: int | None,
) -> None:
    """At construction: the arguments that all parameter transforms share; `ValueError` if bad."""
    check_axis_argument(owner, "axis_name", axis_name)
    if local_axis_name is not None:
        check_axis_argument(owner, "local_axis_name", local_axis_name)
    if bucket_bytes is not None and bucket_bytes < 0:
        raise ValueError(
            f"{owner}: `bucket_bytes` is a size in bytes and must be >= 0, got {bucket_bytes}."
        )


_warned_about: contextvars.ContextVar[tuple[AxisName, ...]] = contextvars.ContextVar(
    "warned_about", default=()
)


@contextlib.contextmanager
def base_over(axis_name: AxisName) -> Iterator[None]:
    """Around the update of a base: an axis of size 1 is for who wraps it to warn about, once."""
    token = _warned_about.set((*_warned_about.get(), axis_name))
    try:
        yield
    finally:
        _warned_about.reset(token)


def check_axes(
    owner: str, axis_name: AxisName, local_axis_name: AxisName | None, warn: Callable[[str], None]
) -> None:
    """At trace time: both axes are bound and distinct; warn about a replica axis of size 1."""
    require_axes(owner, "axis_name", axis_name)
    if local_axis_name is not None:
        require_axes(owner, "local_axis_name", local_axis_name)
        both = set(axis_names(axis_name)) & set(axis_names(local_axis_name))
        if both:
            raise ValueError(
                f"{owner}: `local_axis_name` must differ from `axis_name`, both name {min(both)!r}."
            )
    if axis_size(axis_name) == 1 and axis_name not in _warned_about.get():
        warn(f"{owner}: axis {axis_name!r} has size 1, so there is nothing to communicate.")


def check_update_arguments(
    owner: str,
    params: PyTree | None,
    phase: object,
    events: tuple[str, ...] | None,
) -> None:
    """Raise `ValueError` for missing parameters, or a phase of something else.

    `events` are the names that a phase may hold; None leaves that to a base transform.
    """
    if params is None:
        raise ValueError(
            f"{owner} moves parameters and needs them: call `update(updates, state, params)`."
        )
    if phase is None:
        return
    if not isinstance(phase, tuple) or (events is not None and not set(phase) <= set(events)):
        raise ValueError(
            f"{owner}: `phase` must come from `transform.phase(t)`, a tuple of event names"
            f"{'' if events is None else f' out of {list(events)}'}, got {phase!r}."
        )


def check_weight(owner: str, weight: Any) -> jax.Array | None:
    """`weight` as a () float32 array, or None.

    Raises:
      ValueError: not a real scalar; a number below 0 or not finite, where that is known.
    """
    if weight is None:
        return None
    shape, dtype = jnp.shape(weight), jnp.result_type(weight)
    if shape != () or not (jnp.issubdtype(dtype, jnp.floating) or dtype.kind in "biu"):
        raise ValueError(
            f"{owner}: `weight` must be a real scalar, this replica's share in the mean, got "
            f"{dtype}{list(shape)}."
        )
    if isinstance(weight, int | float) and not 0 <= weight < math.inf:
        raise ValueError(f"{owner}: `weight` must be >= 0 and finite, got {weight}.")
    return jnp.asarray(weight).astype(jnp.float32)
