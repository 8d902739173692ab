"""LocalSGD: replicas train independently and average their parameters every few updates."""

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._support.checks import ArgumentError, records_settings
from .._support.scopes import MODEL_STATE
from .._support.types import AxisName, PyTree
from ..collectives.codecs import Codec, Half
from ..mesh import axis_names
from ..transform import (
    Algorithm,
    Carry,
    Event,
    Every,
    InnerPeriods,
    InnerState,
    ParameterTransform,
    ReplicaGroup,
    UpdateContext,
    as_schedule,
    checked_group,
    moment_events,
    rounded_params,
    update_moments,
)
from ..tree import subtract, widen_updates
from ._error_feedback import (
    ErrorFeedback,
    check_sends_parameters,
    first_memory,
    next_residual,
    part_to_send,
)
from .outer import Fragments, outer_algorithm


@records_settings
def local_sgd(
    axis_name: AxisName,
    *,
    sync_every: int | Every = 3,
    local_axis_name: AxisName | None = None,
    bucket_bytes: int | None = None,
    codec: Codec | None = None,
    fragments: Fragments = 1,
    delay: int = 0,
    merge: float = 0.0,
    inner_state: InnerPeriods = "keep",
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
      bucket_bytes: size in bytes at which a flat buffer is complete and the next one begins; None
        exchanges one buffer per dtype. Leaves of 1 MiB or more are exchanged as they lie.
      codec: None sends parameters in their own dtypes, `js.codecs.float16()` in 16 bits. A codec
        with error feedback or fewer bits sends how far a replica has moved since the last average,
        which takes N bytes of state. Error feedback keeps what was not sent, N bytes more.
      fragments: number of parts of the model that take turns, as in `js.slowmo`.
      delay: number of updates beside which an average is exchanged, as in `js.slowmo`.
      merge: share of its own progress that a replica keeps, as in `js.slowmo`. With fragments,
        delay or merge the exchange has at least float32, and each replica an anchor of N bytes.
      inner_state: "keep", "reset" or "average" the optimizer's moments, as in `js.slowmo`, or
        periods of their own, such as `{"mu": 96, "nu": 192}`; see `js.des_loc`.

    Returns:
      A `ParameterTransform`. Its state has a shared anchor with fragments, delay or merge. `update`
      needs `params`; updates of half-precision leaves are returned as float32.

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
    group = checked_group(owner, axis_name, local_axis_name, bucket_bytes, codec)
    schedule = as_schedule(sync_every)
    if fragments != 1 or delay != 0 or merge != 0:
        # With this optimizer anchor <- anchor - D, which is the average.
        algorithm = outer_algorithm(
            owner,
            group,
            schedule,
            optax.with_extra_args_support(optax.sgd(1.0)),
            is_sharded=False,
            fragments=fragments,
            delay=delay,
            merge=merge,
            inner_state=inner_state,
        )
        return ParameterTransform(algorithm)
    change, moment_averages = moment_events(owner, inner_state, group)
    run: Callable[..., Carry] = average
    state_options: dict[str, Any] = {}
    # In 16 bits parameters themselves can be sent, if what rounding loses is dropped.
    if codec is not None and (codec.error_feedback or not isinstance(codec, Half)):
        run = _average_in_codec
        state_options = {
            "local": lambda params: {"sent": first_memory(codec, params, has_reference=True)},
            "move": _move_reference,
        }
    run = functools.partial(run, inner_state=change)
    event = Event("average", schedule, run, group, replaces=True, inner_state=change)
    events = (event, *moment_averages)
    return ParameterTransform(Algorithm(events, (group,), owner=owner, **state_options))


@records_settings
def hierarchical_local_sgd(
    sync_every: Mapping[AxisName, int | Every],
    *,
    bucket_bytes: int | None = None,
    codec: Half | None = None,
) -> ParameterTransform:
    """Average the parameters over nested groups of replicas, over the larger ones less often.

    Put it last in a chain, after the optimizer. In every update the largest group that is due
    averages y = params + updates.

        js.hierarchical_local_sgd({"device": 2, ("node", "device"): 16})

    Args:
      sync_every: maps each group, named by its mapped axes, to its period or `js.every(...)`.
        Groups are nested: a longer period has all axes of a shorter one and more.
      bucket_bytes: size at which a buffer is complete, in bytes; see `local_sgd`.
      codec: format of the exchange in all groups; see `local_sgd`.

    Returns:
      A `ParameterTransform`.

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
    check_sends_parameters(owner, codec)
    events, groups = [], []
    for axes, schedule in _nested_groups(owner, sync_every):
        groups.append(checked_group(owner, axes, None, bucket_bytes, codec))
        name = f"average {','.join(axis_names(axes))}"
        events.append(Event(name, schedule, average, groups[-1], replaces=True))
    return ParameterTransform(Algorithm(tuple(events), tuple(groups), owner=owner))


def average(
    carry: Carry,
    replicas: ReplicaGroup,
    context: UpdateContext,
    *,
    inner_state: InnerState = "keep",
) -> Carry:
    """Set the parameters to the mean of y = params + updates, and the statistics to theirs."""
    # Stich, algorithm 1, with x_t^k the parameters of worker k, eta_t its step size and H the
    # set of synchronised steps:
    #   x_{t+1}^k = x_t^k - eta_t grad f(x_t^k)                        if t + 1 is not in H
    #   x_{t+1}^k = 1/K sum_j (x_t^j - eta_t grad f(x_t^j))            if t + 1 is in H
    # Here the optimizer's update stands for -eta_t grad f, so the mean is that of y, where
    # y = x + update. It is sent in the leaves' dtypes, if no codec narrows it further.
    mean = replicas.mean(rounded_params(carry), context.weight, role="average")
    new = carry._replace(params=widen_updates(mean))
    return _with_means(carry, new, replicas, context, inner_state)


def _average_in_codec(
    carry: Carry, replicas: ReplicaGroup, context: UpdateContext, *, inner_state: InnerState
) -> Carry:
    """Set the parameters to the mean of y, as far as what replicas sent in the codec says it."""
    sent, codec = carry.local["sent"], replicas.codec
    assert codec is not None
    away = jax.tree.map(subtract, sent.reference, carry.params)
    parts, anyone = part_to_send(away, sent.residual, replicas, context.weight)
    mean, lost = replicas.mean_in_codec(parts, role="average")
    reference = jax.tree.map(subtract, sent.reference, mean)
    params, after = reference, ErrorFeedback(next_residual(codec, lost), reference)
    if anyone is not None:  # if all replicas have run out of data, all stays as it is
        choose = functools.partial(jnp.where, anyone)
        params, after = jax.tree.map(choose, (params, after), (carry.params, sent))
    new = carry._replace(params=params, local=carry.local | {"sent": after})
    return _with_means(carry, new, replicas, context, inner_state)


def _with_means(
    old: Carry,
    carry: Carry,
    replicas: ReplicaGroup,
    context: UpdateContext,
    inner_state: InnerState,
) -> Carry:
    """Return the carry with averaged statistics, and moments that follow the parameters."""
    # Layouts, buckets and codec are those of parameters, so statistics are sent without.
    with jax.named_scope(MODEL_STATE):
        means = replicas.plain.mean(carry.statistics, context.weight)
    carry = carry._replace(statistics=means)
    return update_moments(old, carry, replicas, context, inner_state)


def _move_reference(local: Any, move: Callable[[PyTree], PyTree]) -> Any:
    """Return the local state with `reference`, from where replicas measure, moved as they were."""
    sent = local["sent"]
    return local | {"sent": sent._replace(reference=move(sent.reference))}


def _nested_groups(
    owner: str, sync_every: Mapping[AxisName, int | Every]
) -> list[tuple[AxisName, Every]]:
    """Return the groups with their schedules, smallest first."""
    if not isinstance(sync_every, Mapping) or not sync_every:
        raise ArgumentError(
            "sync_every",
            f"{owner}: `sync_every` must map the axes of each group to a period, such as "
            f'{{"device": 2, ("node", "device"): 16}}, got {sync_every!r}.',
        )
    levels = [(axes, as_schedule(period)) for axes, period in sync_every.items()]
    # Of two nested groups the larger has more axes, so the dict may be in any order.
    levels.sort(key=lambda level: len(axis_names(level[0])))
    for (inner, often), (outer, rarely) in itertools.pairwise(levels):
        if not set(axis_names(inner)) < set(axis_names(outer)):
            raise ArgumentError(
                "sync_every",
                f"{owner}: `sync_every` must name nested groups, the larger one with all axes of "
                f"the smaller, got {inner!r} and {outer!r}.",
            )
        if often.k >= rarely.k:
            raise ArgumentError(
                "sync_every",
                f"{owner}: `sync_every` must be longer for the larger group, got {often.k} for "
                f"{inner!r} and {rarely.k} for {outer!r}.",
            )
    return levels
