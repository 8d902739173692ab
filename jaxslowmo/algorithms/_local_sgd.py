"""LocalSGD: replicas train independently and average their parameters every few updates."""

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._support.settings import records_settings
from .._support.types import AxisName, PyTree
from ..collectives.codecs import Codec, Half
from ..mesh import axis_names
from ..transform import (
    Carried,
    Event,
    Every,
    Exchange,
    InnerState,
    Now,
    Operand,
    Others,
    ParameterTransform,
    Sent,
    StatePlacement,
    Sync,
    as_schedule,
    carried_sent,
    checked_exchange,
    first_sent,
    kept,
    mean_of_parts,
    names_of_sent,
    narrowed,
    part_to_send,
    replica_mean,
    sent_with,
    split_mark,
    wide_types_on,
)
from ..tree import apply_exactly, landing, subtracted, updates_to
from .outer import Fragments, Outer, Placement


class LocalSGDState(NamedTuple):
    """The state of `local_sgd` and `hierarchical_local_sgd`."""

    count: jax.Array  # () int32, updates so far; equal on all replicas
    sent: PyTree = ()  # `js.spec.Sent` with a codec that sends how far replicas have moved


@records_settings
def local_sgd(
    axis_name: AxisName,
    *,
    sync_every: int | Every = 3,
    local_axis_name: AxisName | None = None,
    param_specs: PyTree | None = None,
    bucket_bytes: int | None = None,
    codec: Codec | None = None,
    fragments: Fragments = 1,
    delay: int = 0,
    merge: float = 0.0,
    inner_state: InnerState = "keep",
) -> ParameterTransform:
    """Train replicas independently and average their parameters every `sync_every` updates.

    Put it last in a chain, after the optimizer. With y = params + updates, an update in which the
    average is due sets params to the mean of y over `axis_name`; any other update sets params to y.
    Optimizer state is not averaged, unless `inner_state` says so.

    Args:
      axis_name: mapped axis of the replicas.
      sync_every: period k (due when t % k == 0, t = 1, 2, ...) or `js.every(...)`.
      local_axis_name: axis of the L devices inside a replica, which hold equal parameters; each
        device then exchanges 1/L of the parameters.
      param_specs: `PartitionSpec` per leaf (or prefix of the tree) over automatic axes inside a
        replica, for leaves that are sharded there; each device exchanges its own block.
      bucket_bytes: size in bytes at which a flat buffer is complete and the next one begins; None
        exchanges one buffer per dtype.
      codec: None exchanges parameters in their own dtypes, `js.codecs.float16()` in 16 bits. With
        error feedback or fewer bits how far replicas have moved is sent; each keeps N bytes, from
        where they measure, and with error feedback N bytes more, what it has not sent.
      fragments: number of parts of the model that take turns, as in `js.slowmo`.
      delay: number of updates beside which an average is exchanged, as in `js.slowmo`.
      merge: share of its own progress that a replica keeps, as in `js.slowmo`. With fragments,
        delay or merge the exchange has at least float32, and each replica an anchor of N bytes.
      inner_state: "keep", "reset" or "average" the optimizer's moments, as in `js.slowmo`.

    Returns:
      A `ParameterTransform` with state `LocalSGDState`, or `OuterState` with fragments, delay or
      merge. `update` needs `params`; updates of half-precision leaves are returned as float32.

    Raises:
      ValueError: `sync_every` < 1, negative `bucket_bytes` or an invalid `codec`, at construction;
        at trace time an unbound axis, missing params, non-float leaves (named).
      UserWarning: once, if the axis has size 1.

    Communication: in a due update one all-reduce over `axis_name` per buffer, N bytes in total, N
      in the sent dtypes (plus 8 bytes if `update` is called with `weight`), or for how far replicas
      moved one all-to-all and one all-gather of the codec's bytes; nothing otherwise. With
      `local_axis_name` N / L per device, and an all-gather of N over that axis.

    Source: Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019, algorithm 1.
    """
    owner = "local_sgd"
    exchange = checked_exchange(owner, axis_name, local_axis_name, param_specs, bucket_bytes, codec)
    schedule = as_schedule(sync_every)
    if fragments != 1 or delay != 0 or merge != 0:
        # With this optimizer anchor <- anchor - D, which is the average.
        take_average = optax.with_extra_args_support(optax.sgd(1.0))
        outer = Outer(
            owner,
            exchange,
            schedule,
            take_average,
            placement=Placement(owner, False),
            is_sharded=False,
            fragments=fragments,
            delay=delay,
            merge=merge,
            inner_state=inner_state,
        )
        return ParameterTransform(outer)
    # This is hierarchical averaging with only one group, that of all replicas. In 16 bits it can
    # send parameters themselves, if what rounding loses is dropped.
    is_plain = codec is None or (isinstance(codec, Half) and not codec.error_feedback)
    level = _Level(exchange, schedule, "average")
    return ParameterTransform((LocalSGD if is_plain else CodedSGD)(owner, (level,), inner_state))


@records_settings
def hierarchical_local_sgd(
    sync_every: Mapping[AxisName, int | Every],
    *,
    param_specs: PyTree | None = None,
    bucket_bytes: int | None = None,
    codec: Half | None = None,
) -> ParameterTransform:
    """Average the parameters over nested groups of replicas, over the larger ones less often.

    Put it last in a chain, after the optimizer. In every update the largest group that is due
    averages y = params + updates, which also makes the smaller groups inside it agree.

        js.hierarchical_local_sgd({"device": 2, ("node", "device"): 16})

    Args:
      sync_every: maps each group, named by its mapped axes, to its period or `js.every(...)`.
        Groups are nested: a longer period has all axes of a shorter one and more.
      param_specs: `PartitionSpec` per leaf over automatic axes inside a replica; see `local_sgd`.
      bucket_bytes: size at which a buffer is complete, in bytes; see `local_sgd`.
      codec: format of the exchange in all groups; see `local_sgd`.

    Returns:
      A `ParameterTransform` with state `LocalSGDState`. The `weight` of a replica, an argument of
      `update`, counts in the averages of all groups.

    Raises:
      ValueError: no group, a period < 1, groups that are not nested, periods that do not grow with
        the groups, negative `bucket_bytes` or an invalid `codec`, at construction; at trace time
        an unbound axis, missing params, non-float leaves.
      UserWarning: once, if an axis has size 1.

    Communication: in a due update one all-reduce per buffer over the axes of the largest due
      group, N bytes in total, N as in `local_sgd`; nothing in other updates.

    Source: torch 2.13, `HierarchicalModelAverager`. It counts updates from 0, so its {k: group}
      with `warmup_steps=w` is here {axes of the group: `js.every(k, start=w, offset=1 - w)`}.
    """
    owner = "hierarchical_local_sgd"
    levels = [
        _Level(
            narrowed(owner, checked_exchange(owner, axes, None, param_specs, bucket_bytes, codec)),
            schedule,
            f"average {','.join(axis_names(axes))}",
        )
        for axes, schedule in _nested(owner, sync_every)
    ]
    return ParameterTransform(LocalSGD(owner, tuple(levels)))


@dataclass(frozen=True)
class _Level:
    """A group of replicas, the schedule of its average, and the event that names it in a phase."""

    exchange: Exchange
    schedule: Every
    event: str


@dataclass(frozen=True)
class LocalSGD(Sync):
    """The averages over nested groups, smallest group first.

    Each update makes at most one of them, that over the largest group that is due.
    """

    owner: str
    levels: tuple[_Level, ...]
    inner_state: InnerState = "keep"
    state = LocalSGDState
    packs = True

    @classmethod
    def needs_owner(cls) -> bool:
        """Return False: on other replicas leaves keep their means, and `view` is one for all."""
        return False

    @property
    def sent_names(self) -> list[str] | None:
        """The fields of `Sent` that the state has; None if parameters themselves are sent."""
        return None

    @property
    def groups(self) -> list[Exchange]:
        """See `Sync.groups`."""
        return [level.exchange for level in self.levels]

    def init(self, params: PyTree) -> LocalSGDState:
        """Return the first state."""
        return LocalSGDState(jnp.zeros([], jnp.int32), first_sent(self.sent_names, params))

    def events(self) -> list[Event]:
        """Return the averages; that over a larger group replaces those over groups inside it."""
        return [
            Event(x.event, x.schedule, functools.partial(self.average, x), replaces=True)
            for x in self.levels
        ]

    def with_specs(self, param_specs: PyTree, *, of_state: bool = False) -> "LocalSGD":
        """See `Sync.with_specs`."""
        del of_state
        levels = [replace(x, exchange=x.exchange.with_specs(param_specs)) for x in self.levels]
        return replace(self, levels=tuple(levels))

    def average(self, level: _Level, operand: Operand, now: Now) -> Operand:
        """Return the updates that set the parameters to the mean of y = params + updates."""
        # Stich, algorithm 1, with x_t^k the parameters of worker k, eta_t its step size and H the
        # set of synchronised steps:
        #   x_{t+1}^k = x_t^k - eta_t grad f(x_t^k)                        if t + 1 is not in H
        #   x_{t+1}^k = 1/K sum_j (x_t^j - eta_t grad f(x_t^j))            if t + 1 is in H
        # Here the optimizer's update stands for -eta_t grad f, so the mean is that of y, where
        # y = x + update.
        updates, others, state = operand
        # Round y to the leaves' dtypes, in which it is sent if no codec narrows it further.
        y = apply_exactly(now.params, updates)
        mean = replica_mean(y, level.exchange, now.weight, role="average")
        others = self.average_others(level, others, now)
        # optax adds updates to parameters, so return the difference and not the mean.
        return updates_to(now.params, mean), others, state

    def average_others(self, level: _Level, others: Others, now: Now) -> Others:
        """Return the mean of what is averaged with the parameters, and the mark."""
        others, mark = split_mark(self, others)
        # Layouts, buckets and codec are those of parameters, so others are sent without.
        means = replica_mean(others, Exchange(level.exchange.axis_name), now.weight)
        return [*means, *[True] * len(mark)]

    def division(self, params: PyTree) -> Mapping[str, Any]:
        """See `Sync.division`: the fields of `Sent` that the state has; {} without a codec."""
        del params
        return {"sent": self.sent_names} if self.sent_names else {}

    def like_on(self, state: LocalSGDState, params: PyTree, at: StatePlacement) -> LocalSGDState:
        """See `Sync.like_on`."""
        names = self.sent_names if at.division is None else at.division.get("sent")
        return state._replace(sent=sent_with(names, lambda _: wide_types_on(params, at)))

    def carry(
        self, state: LocalSGDState, params: PyTree, old: StatePlacement, new: StatePlacement
    ) -> Carried:
        """See `Sync.carry`: with a codec that the saved run had not, replicas measure from here."""
        state = super().carry(state, params, old, new).state
        sent, notes = carried_sent(state.sent, self.sent_names, params, new, lambda: params)
        return Carried(state._replace(sent=sent), tuple(notes))


class CodedSGD(LocalSGD):
    """The average over one group, of which a codec sends how far each replica has moved."""

    @property
    def sent_names(self) -> list[str] | None:
        """See `LocalSGD.sent_names`."""
        return names_of_sent(self.levels[0].exchange.codec, has_view=True)

    def average(self, level: _Level, operand: Operand, now: Now) -> Operand:
        """Return the updates that set the parameters to the mean of y, as replicas know it."""
        updates, others, state = operand
        y, sent, codec = landing(now.params, updates), state.sent, level.exchange.codec
        assert codec is not None
        away = jax.tree.map(subtracted, sent.view, y)
        parts, anyone = part_to_send(away, sent.lost, level.exchange, now.weight)
        mean, lost = mean_of_parts(parts, level.exchange, role="average")
        view = jax.tree.map(subtracted, sent.view, mean)
        target, new = view, Sent(kept(codec, lost), view)
        if anyone is not None:  # if all replicas have run out of data, all stays as it is
            choose = functools.partial(jnp.where, anyone)
            target, new = jax.tree.map(choose, (target, new), (y, sent))
        target = jax.tree.map(lambda p, t: t.astype(p.dtype), now.params, target)
        others = self.average_others(level, others, now)
        return updates_to(now.params, target), others, state._replace(sent=new)

    def settle(self, state: LocalSGDState, move: Callable[[PyTree], PyTree]) -> LocalSGDState:
        """See `Sync.settle`: replicas measure from where they were moved to."""
        return state._replace(sent=state.sent._replace(view=move(state.sent.view)))


def _nested(owner: str, sync_every: Mapping[AxisName, int | Every]) -> list[tuple[AxisName, Every]]:
    """Return the groups with their schedules, smallest first."""
    if not isinstance(sync_every, Mapping) or not sync_every:
        raise ValueError(
            f"{owner}: `sync_every` must map the axes of each group to a period, such as "
            f'{{"device": 2, ("node", "device"): 16}}, got {sync_every!r}.'
        )
    levels = [(axes, as_schedule(period)) for axes, period in sync_every.items()]
    # Of two nested groups the larger has more axes, so the dict may be in any order.
    levels.sort(key=lambda level: len(axis_names(level[0])))
    for (inner, often), (outer, rarely) in itertools.pairwise(levels):
        if not set(axis_names(inner)) < set(axis_names(outer)):
            raise ValueError(
                f"{owner}: `sync_every` must name nested groups, the larger one with all axes of "
                f"the smaller, got {inner!r} and {outer!r}."
            )
        if often.k >= rarely.k:
            raise ValueError(
                f"{owner}: `sync_every` must be longer for the larger group, got {often.k} for "
                f"{inner!r} and {rarely.k} for {outer!r}."
            )
    return levels
