"""When an exchange is due, on the host and inside the program, and conditionals of what runs."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from .._support.checks import checked_int
from .._support.scopes import PHASE
from .._support.types import Phase, PyTree
from ..mesh import cast_varying, match_varying, uniform, varying_axes
from ..tracing import collective_axes


@dataclass(frozen=True)
class Every:
    """Every `k`-th update. Made by `every`; call it with t, the 1-based number of the update.

    Attributes:
      k: period in updates.
      start: updates before the schedule begins.
      offset: shift of the first due update after `start`.
      before: whether updates up to `start` are due, `"none"` or `"all"`.
    """

    k: int
    start: int = 0
    offset: int = 0
    before: Literal["none", "all"] = "none"

    def __post_init__(self) -> None:
        for name, least in {"k": 1, "start": 0, "offset": None}.items():
            number = checked_int(f"`{name}` counts updates and", getattr(self, name), least)
            object.__setattr__(self, name, number)  # as plain ints, whatever they were
        if self.before not in ("none", "all"):
            raise ValueError(f'`before` must be "none" or "all", got {self.before!r}.')

    def __call__(self, t: Any) -> Any:
        """Whether update `t` is due: a bool for an int, an array for an array of integers."""
        start, shifted = self.start, self.start + self.offset
        # The same answer for an int on the host and for a counter in the program.
        if isinstance(t, int):
            is_met = (t - shifted) % self.k == 0
        else:
            start = min(start, int(np.iinfo(t.dtype).max))  # decides the same of all that t can be
            is_met = _is_congruent(t, shifted, self.k)
        running = (t > start) & is_met
        if self.before == "all":
            running = running | (t <= start)
        return running

    def times(self, t: int) -> int:
        """How many of the updates 1 to `t` are due, on the host."""
        # Up to `start` all or none; after it as many as multiples of k between the shifted ends.
        first = min(t, self.start) if self.before == "all" else 0
        running = max(0, t - self.start)
        return first + (running - self.offset) // self.k - (-self.offset) // self.k

    @property
    def is_plain(self) -> bool:
        """Due exactly when t is a multiple of k."""
        return self.before == "none" and (self.start + self.offset) % self.k == 0 == self.start


def every(
    k: int, start: int = 0, offset: int = 0, before: Literal["none", "all"] = "none"
) -> Every:
    """A schedule for `sync_every`: due when t > start and (t - start - offset) % k == 0.

    Args:
      k: period in updates, >= 1.
      start: number of updates before it begins, >= 0. Post-local SGD is
        `every(k, start=s, before="all")`: exchange at every update up to s, then every k-th.
      offset: shifts the due updates after `start` by this many.
      before: `"none"` or `"all"` updates up to `start` are due.

    Returns:
      An `Every`: callable with t = 1, 2, ..., as int on the host or as array in a program;
      hashable.

    Raises:
      ValueError: k < 1, start < 0, another `before`, or values that are no ints.

    Example:
      >>> [t for t in range(1, 10) if every(3)(t)]
      [3, 6, 9]
      >>> [t for t in range(1, 10) if every(3, start=2, before="all")(t)]
      [1, 2, 5, 8]

    Communication: none.
    """
    return Every(k, start, offset, before)


def as_schedule(period: int | Every, argument: str = "sync_every") -> Every:
    """`period` as a schedule; `ValueError` naming `argument` for periods below 1."""
    if isinstance(period, Every):
        return period
    return Every(checked_int(f"`{argument}` counts updates and", period, 1))


_SCAN = 2**16  # instants looked at per schedule; exact for all periods up to that


def instants(schedules: Iterable[Every]) -> list[int]:
    """Updates t among which every combination of due schedules that occurs is found.

    A whole cycle is at most as long as the product of the periods (of their least common multiple,
    where no schedule holds up another, as the slow step does a base that counts its exchanges),
    which may be huge; so beside its beginning only the due updates of each schedule and their
    successors are listed.
    """
    # The product, not the least common multiple: one schedule may hold another one up.
    known = list(schedules)
    cycle = math.prod(s.k for s in known)
    begin = max((s.start + abs(s.offset) for s in known), default=0)
    found = set(range(1, min(begin + cycle, _SCAN) + 1))
    for s in known:
        first = s.start + s.offset % s.k
        due = range(first, first + s.k * min(cycle // s.k + 1, _SCAN), s.k)
        found.update(t for d in due for t in (d, d + 1) if t >= 1)
    return sorted(found)


def _is_congruent(t: Any, shift: int, k: int) -> Any:
    """`(t - shift) % k == 0` for an array of integers and ints that it may be too narrow for."""
    least, most = np.iinfo(t.dtype).min, np.iinfo(t.dtype).max
    first = shift % k
    if k <= most:
        return t % k == first
    # All of its values lie within one period on either side of 0.
    found = t != t  # nowhere
    for candidate in (first - k, first):
        if least <= candidate <= most:
            found = found | (t == candidate)
    return found


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
    exchanged = frozenset[str]().union(*map(collective_axes, jaxprs))
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


def isolated(fn: Callable[..., PyTree], known: jax.Array, *operands: PyTree) -> PyTree:
    """`fn(*operands)`, on CPU compiled by itself.

    Compilers join operations with those before and behind them, and where they multiply and add in
    one instruction is then another place, and the last bit another. What stands in a conditional is
    not joined with anything outside. A barrier is forgotten too soon (jax 0.10); and on devices
    where work and exchanges overlap a conditional would keep them apart, so there is none.

    Args:
      fn: function of the operands.
      known: some array, whatever it holds.
      *operands: of `fn`.

    Communication: that of `fn`.
    """
    if jax.default_backend() != "cpu":
        return fn(*operands)
    shapes = jax.eval_shape(fn, *operands)

    def never(*operands: PyTree) -> PyTree:
        del operands
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return match_varying(zeros, shapes)

    return lax.cond(unseen_zero(known) == 0, fn, never, *operands)


def unseen_zero(x: jax.Array) -> jax.Array:
    """() int32: 0, computed from the bits of `x` in a way that no compiler sees through.

    Communication: none.
    """
    if not x.size:
        return jnp.zeros([], jnp.int32)
    bits = 8 * x.dtype.itemsize
    words = lax.bitcast_convert_type(x.reshape(-1)[-1], jnp.dtype(f"uint{bits}"))
    high = lax.shift_right_logical(words, jnp.full_like(words, bits - 1))
    return lax.shift_right_logical(high, jnp.ones_like(high)).astype(jnp.int32)
