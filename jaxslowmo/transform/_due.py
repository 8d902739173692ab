"""Schedules of exchanges, on the host and inside the program, and conditionals that run them."""

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
from .._support.types import PyTree, tracks_types, varying_axes
from ..mesh import cast_varying, uniform


@dataclass(frozen=True)
class Every:
    """A schedule of every `k`-th update. Made by `every`; call it with the update's number t >= 1.

    Attributes:
      k: period in updates.
      start: number of updates before the schedule begins.
      offset: number of updates by which due updates after `start` are shifted.
      before: which of the updates up to `start` are due, `"none"` or `"all"`.
    """

    k: int
    start: int = 0
    offset: int = 0
    before: Literal["none", "all"] = "none"

    def __post_init__(self) -> None:
        for name, least in {"k": 1, "start": 0, "offset": None}.items():
            number = checked_int(f"`{name}` counts updates and", getattr(self, name), least)
            object.__setattr__(self, name, number)  # convert NumPy integers to int
        if self.before not in ("none", "all"):
            raise ValueError(f'`before` must be "none" or "all", got {self.before!r}.')

    def __call__(self, t: Any) -> Any:
        """Return whether update `t` is due: a bool for an int, an array for an integer array."""
        start, shifted = self.start, self.start + self.offset
        # An int on the host and a counter in the program must give the same answer.
        if isinstance(t, int):
            is_met = (t - shifted) % self.k == 0
        else:
            start = min(start, int(np.iinfo(t.dtype).max))  # no value of t is beyond that
            is_met = _is_congruent(t, shifted, self.k)
        running = (t > start) & is_met
        if self.before == "all":
            running = running | (t <= start)
        return running

    def times(self, t: int) -> int:
        """Return, on the host, how many of the updates 1 to `t` are due."""
        # Up to `start` all or none are due, after it one per multiple of k between shifted ends.
        first = min(t, self.start) if self.before == "all" else 0
        running = max(0, t - self.start)
        return first + (running - self.offset) // self.k - (-self.offset) // self.k

    @property
    def is_always(self) -> bool:
        """True if all updates are due."""
        return self.k == 1 and self.start == 0

    @property
    def is_plain(self) -> bool:
        """True if the due updates are exactly the multiples of k."""
        return self.before == "none" and (self.start + self.offset) % self.k == 0 == self.start


def every(
    k: int, start: int = 0, offset: int = 0, before: Literal["none", "all"] = "none"
) -> Every:
    """Return a schedule for `sync_every`: every `k`-th update after update `start`.

    Update t = 1, 2, ... is due if t > start and (t - start - offset) % k == 0.

    Args:
      k: period in updates, >= 1.
      start: number of updates before the schedule begins, >= 0; the default is 0. Post-local SGD is
        `every(k, start=s, before="all")`: exchange at every update up to s, then every k-th.
      offset: number of updates by which due updates after `start` are shifted; the default is 0.
      before: which of the updates up to `start` are due, `"none"` (the default) or `"all"`.

    Returns:
      An `Every`: hashable, and callable with t = 1, 2, ..., an int on the host or an array in a
      program.

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
    """Return `period` as a schedule; raise `ValueError` naming `argument` for periods below 1."""
    if isinstance(period, Every):
        return period
    return Every(checked_int(f"`{argument}` counts updates and", period, 1))


_SCAN = 2**16  # number of instants per schedule; all combinations are found for periods up to that


def instants(schedules: Iterable[Every]) -> list[int]:
    """Return numbers of updates among which every combination of due schedules occurs.

    A cycle may be as long as the product of the periods, which may be huge. So only its beginning,
    and the due updates of each schedule with their successors, are listed. (It is the least common
    multiple of the periods unless one schedule delays another, as the slow step delays a base
    transform that counts its exchanges.)
    """
    schedules = list(schedules)
    cycle = math.prod(s.k for s in schedules)
    begin = max((s.start + abs(s.offset) for s in schedules), default=0)
    updates = set(range(1, min(begin + cycle, _SCAN) + 1))
    for s in schedules:
        first = s.start + s.offset % s.k
        due = range(first, first + s.k * min(cycle // s.k + 1, _SCAN), s.k)
        updates.update(t for d in due for t in (d, d + 1) if t >= 1)
    return sorted(updates)


def _is_congruent(t: Any, shift: int, k: int) -> Any:
    """Return `(t - shift) % k == 0` for an integer array whose dtype may not hold the ints."""
    first, most = shift % k, int(np.iinfo(t.dtype).max)
    if k <= most:
        return t % k == first
    return t == first if first <= most else t != t  # every t >= 1 is within one period


Communicate = bool | jax.Array


def increment(count: jax.Array) -> jax.Array:
    """Return `count + 1`, or `count` if that is the largest int32."""
    return jnp.asarray(optax.safe_increment(count))


def phase_scope(event: str) -> Any:
    """Return a named scope for the exchange of an event, which `js.comm_report` recognises.

    Args:
      event: name of the event, as in phases.

    Returns:
      A context manager.

    Communication: none.
    """
    return jax.named_scope(f"{PHASE}{event}")


def logical_or(a: bool | jax.Array, b: bool | jax.Array) -> bool | jax.Array:
    """Return `a or b`: a bool where that is static, else an array."""
    # Python's `or` would need the truth value of a traced array.
    return b if a is False else True if a is True or b is True else a | b


def logical_and(due: bool | jax.Array, communicate: Communicate) -> bool | jax.Array:
    """Return `due and communicate`: a bool where that is static, else an array."""
    if communicate is True or due is False:
        return due
    return False if communicate is False else jnp.logical_and(due, communicate)


def run_if(
    due: bool | jax.Array,
    exchange: Callable[[PyTree], PyTree],
    otherwise: Callable[[PyTree], PyTree],
    operand: PyTree,
    *,
    axes: Iterable[str],
) -> PyTree:
    """Return `exchange(operand)` if `due`, else `otherwise(operand)`; a `lax.cond` if traced.

    Branches may have collectives if `due` is equal on all replicas, as it is if computed from the
    counter. Under vmap the conditional stays a cond.

    Args:
      due: whether to exchange: a bool, for which the program holds only one of the branches, or a
        () bool array.
      exchange: function of the operand.
      otherwise: function of the operand, with results of the same shapes and dtypes. The axes over
        which results vary may differ: the result of a mean varies over fewer.
      operand: tree of arrays.
      axes: names of the mapped axes over which the functions communicate, along which `due` is
        equal.

    Returns:
      The result of the function that ran.

    Communication: that of the function that runs.
    """
    if isinstance(due, bool):
        return exchange(operand) if due else otherwise(operand)
    # A select would run the collectives of both branches in every update.
    run, leave = _of_equal_types([exchange, otherwise], operand)
    return lax.cond(uniform(due, axes), run, leave, operand)


def run_one_of(
    index: int | jax.Array,
    branches: Sequence[Callable[[PyTree], PyTree]],
    operand: PyTree,
    *,
    axes: Iterable[str],
) -> PyTree:
    """Return `branches[index](operand)`; a `lax.switch` if `index` is traced. See `run_if`."""
    if len(branches) == 1:
        index = 0  # no switch, even if the index is traced
    if isinstance(index, int):
        return branches[index](operand)
    return lax.switch(uniform(index, axes), _of_equal_types(branches, operand), operand)


def _of_equal_types(
    branches: Sequence[Callable[[PyTree], PyTree]], operand: PyTree
) -> Sequence[Callable[[PyTree], PyTree]]:
    """Return branches whose results have equal types, where types name axes that values vary over.

    The result of a mean varies over fewer axes than that of another branch. Each result is typed as
    varying over all axes that it varies over in some branch.
    """
    if not tracks_types():
        return branches
    # Each branch is traced once: the conditional finds the trace. `inline` adds no call.
    traced = [jax.jit(branch, inline=True) for branch in branches]
    results = [branch.eval_shape(operand) for branch in traced]
    axes = jax.tree.map(lambda *each: frozenset().union(*map(varying_axes, each)), *results)
    return [lambda x, fn=fn: jax.tree.map(cast_varying, fn(x), axes) for fn in traced]


def prevent_fusion(fn: Callable[..., PyTree], source: jax.Array, *operands: PyTree) -> PyTree:
    """Return `fn(*operands)`; on CPU the compiler cannot fuse it with its surroundings.

    XLA fuses operations with those before and after them. That changes where it multiplies and adds
    in one instruction, and so the last bit of results. It does not fuse across a conditional, so
    `fn` becomes a branch of one. (XLA removes an optimization barrier too early, jax 0.10.) On
    other platforms, where work and exchanges may overlap, a conditional would prevent the overlap,
    so `fn` is called directly.

    Args:
      fn: function of the operands.
      source: array of any values, from which the predicate is computed; see `unseen_zero`.
      *operands: arguments of `fn`.

    Communication: only that of `fn`.
    """
    if jax.default_backend() != "cpu":
        return fn(*operands)
    shapes = jax.eval_shape(fn, *operands)

    def never(operands: tuple[PyTree, ...]) -> PyTree:
        del operands
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    return run_if(unseen_zero(source) == 0, lambda x: fn(*x), never, operands, axes=())


def unseen_zero(x: jax.Array) -> jax.Array:
    """Return 0 as () int32, computed from the bits of `x` so that no compiler can simplify it.

    Communication: none.
    """
    if not x.size:
        return jnp.zeros([], jnp.int32)
    bits = 8 * x.dtype.itemsize
    words = lax.bitcast_convert_type(x.reshape(-1)[-1], jnp.dtype(f"uint{bits}"))
    high = lax.shift_right_logical(words, jnp.full_like(words, bits - 1))
    return lax.shift_right_logical(high, jnp.ones_like(high)).astype(jnp.int32)
