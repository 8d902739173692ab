"""Whether an exchange runs: from the counter, inside the program or fixed by a phase."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from .._scopes import PHASE
from .._typing import Phase, PyTree
from ..mesh import cast_varying, collective_axes, uniform, varying_axes
from ._schedule import Every

Communicate = bool | jax.Array


def increment(count: jax.Array) -> jax.Array:
    """`count + 1`, staying at the largest int32."""
    return jnp.asarray(optax.safe_increment(count))


def phase_scope(event: str) -> Any:
    """Named scope around the exchange of an event, by which `js.comm_report` knows it.

    Args:
      event: its name, as phases hold it.

    Returns:
      A context manager.

    Communication: none.
    """
    return jax.named_scope(f"{PHASE}{event}")


def either(a: bool | jax.Array, b: bool | jax.Array) -> bool | jax.Array:
    """`a or b`, a bool where that is static."""
    # Not `or`: an array of which the value is not known has no truth.
    return b if a is False else True if a is True or b is True else a | b


def is_due(
    event: str,
    schedule: Every,
    count: jax.Array,
    communicate: Communicate,
    phase: Phase | None,
) -> bool | jax.Array:
    """Whether an event runs in this update.

    Args:
      event: its name, as phases hold it.
      schedule: when it is due.
      count: () int32, the number of this update, from 1.
      communicate: as `update` of a parameter transform is given it.
      phase: likewise; None leaves it to the schedule.

    Returns:
      A bool where that is static, else a () bool array.

    Communication: none.
    """
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

    A branch may have collectives where `due` is equal on all replicas, as it is where it comes from
    the counter; under vmap it stays a cond.

    Args:
      due: whether to exchange: a bool, of which the program holds that branch alone, or a () bool
        array, as `js.is_due` returns it.
      exchange: function of the operand.
      otherwise: likewise, with results of the same shapes and dtypes. Over which axes these vary
        may differ: the result of a mean varies over fewer.
      operand: tree of arrays.

    Returns:
      What the function returned.

    Communication: that of the function which runs.
    """
    # Static: the program holds one of the two, and no conditional.
    if isinstance(due, bool):
        return exchange(operand) if due else otherwise(operand)
    # Not a select: collectives must not run where nothing is due.
    (run, leave), axes = _alike([exchange, otherwise], operand)
    return lax.cond(uniform(due, axes), run, leave, operand)


def run_one_of(
    index: int | jax.Array, branches: Sequence[Callable[[PyTree], PyTree]], operand: PyTree
) -> PyTree:
    """`branches[index](operand)`, as a `lax.switch` where that is undecided; see `run_if`."""
    if len(branches) == 1:
        index = 0  # whatever the counter says
    if isinstance(index, int):
        return branches[index](operand)
    alike, axes = _alike(branches, operand)
    return lax.switch(uniform(index, axes), alike, operand)


def _alike(
    branches: Sequence[Callable[[PyTree], PyTree]], operand: PyTree
) -> tuple[list[Callable[[PyTree], PyTree]], frozenset[str]]:
    """Branches that agree in what their results vary over, and the axes over which they exchange.

    A mean varies over less than others. Each branch is run once: the conditional finds it in the
    cache of `jax.jit`. Run twice per cond, branches would run four times in a cond inside a cond.
    """
    # Inlined: the program is as if the branch stood there.
    jitted = [jax.jit(branch, inline=True) for branch in branches]
    jaxprs = [branch.trace(operand).jaxpr for branch in jitted]
    exchanged = frozenset[str]().union(*(collective_axes(jaxpr.jaxpr) for jaxpr in jaxprs))
    # Of each result, the axes that it varies over in any branch: all are cast to those.
    types = [[varying_axes(aval) for aval in jaxpr.out_avals] for jaxpr in jaxprs]
    # Joined once: graphs can have hundreds of rounds, a branch each.
    axes = [frozenset[str]().union(*each) for each in zip(*types, strict=True)]

    def alike(
        branch: Callable[[PyTree], PyTree], own: list[frozenset[str]]
    ) -> Callable[[PyTree], PyTree]:
        missing = [wanted - has for wanted, has in zip(axes, own, strict=True)]
        if not any(missing):
            return branch

        def cast(x: PyTree) -> PyTree:
            leaves, treedef = jax.tree.flatten(branch(x))
            return treedef.unflatten(map(cast_varying, leaves, missing))

        return cast

    return [alike(*each) for each in zip(jitted, types, strict=True)], exchanged
