"""SlowMo: slow momentum over any base algorithm."""

import optax

from .._typing import AxisName, PyTree
from .._warn import warn_once
from ._anchor import AnchorLayout, own_anchor, sharded_anchor, whole_anchor
from ._checks import check_exchange_arguments
from ._outer import outer_transform
from ._protocol import ParameterTransform
from ._schedule import Every, as_schedule
from ._slow_momentum import observe_rate, slow_momentum

LearningRate = float | optax.Schedule | None


def slowmo(
    axis_name: AxisName,
    *,
    base: ParameterTransform | None = None,
    sync_every: int | Every = 48,
    momentum: float = 0.5,
    slow_learning_rate: float = 1.0,
    learning_rate: LearningRate = None,
    shard_state: bool | None = None,
    exact_average: bool = True,
    nesterov: bool = False,
    local_axis_name: AxisName | None = None,
    param_specs: PyTree | None = None,
    bucket_bytes: int | None = None,
) -> ParameterTransform:
    """Slow momentum on top of a base algorithm; comes last in a chain.

    Every `sync_every` updates, with D = anchor - average of the replicas' y = params + updates and
    gamma = `learning_rate` now:

        m <- momentum * m + D / gamma;   anchor <- anchor - slow_learning_rate * gamma * m

    and all parameters become the anchor, which starts as the initial parameters. In between `base`
    runs. FairScale's `memory_efficient=True` is `shard_state=True`, its `memory_efficient=False` is
    `exact_average=False`.

    Args:
      axis_name: mapped axis of the replicas.
      base: a `ParameterTransform` such as `js.local_sgd(...)`; None trains alone between slow steps
        (with a warning).
      sync_every: period of the slow step in updates, or `js.every(...)`.
      momentum: slow momentum in [0, 1).
      slow_learning_rate: step size of the outer step, >= 0.
      learning_rate: the inner learning rate gamma: a float >= 0, a schedule of the 0-based update
        count (the one given to the optimizer), or None for 1.
      shard_state: keep 1/R of anchor and momentum on each replica. None: True where the average is
        exact.
      exact_average: True averages y over the replicas in the slow step and skips the base's own
        exchange; False takes what `base` left on this replica (implies `shard_state=False`).
      nesterov: Nesterov form of the outer step.
      local_axis_name: axis of the devices inside a replica, which hold equal parameters: each then
        exchanges 1/L of them.
      param_specs: `PartitionSpec` per leaf over automatic axes inside a replica; each device
        exchanges its own block, and anchor and momentum are split likewise.
      bucket_bytes: None exchanges one buffer (per exchange dtype), else buffers of about this size.

    Returns:
      A `ParameterTransform` with state `OuterState` whose `outer` is a `SlowMomentumState`. Anchor,
      momentum and the slow exchange are float32 (float64 for float64 leaves). Memory per replica:
      2N/R sharded (padding apart), else 2N, N the bytes of the parameters in float32.

    Raises:
      ValueError: sync_every < 1, momentum outside [0, 1), negative rates, exact_average=False with
        shard_state=True or without a base, a plain optax transform or another slowmo as base; at
        trace time an unbound axis, missing params, non-float leaves.
      UserWarning: once, for sync_every that is no multiple of the base's, no base, an axis of size
        1.

    Communication: in a slow step over `axis_name`, sharded: one reduce-scatter and one all-gather
      of N bytes each (per buffer); unsharded: one all-reduce of N bytes; not exact: only the
      base's. In other updates the base's. With `local_axis_name` N / L per device, and all-gathers
      over that axis (of N/R before and N after the outer step when sharded).

    Source: Wang et al., "SlowMo", ICLR 2020, algorithm 1; FairScale 0.4.13
      `SlowMoDistributedDataParallel`.
    """
    owner = "slowmo"
    check_exchange_arguments(owner, axis_name, local_axis_name, bucket_bytes)
    schedule = as_schedule(sync_every)
    _check_base(base, schedule, exact_average)
    if shard_state and not exact_average:
        raise ValueError(
            "slowmo: `exact_average=False` keeps each replica's own anchor, which cannot be "
            "sharded; got shard_state=True. Leave `shard_state` out or set it to False."
        )

    def layout_for(specs: PyTree | None) -> AnchorLayout:
        if not exact_average:
            return own_anchor()
        made = whole_anchor if shard_state is False else sharded_anchor
        return made(axis_name, local_axis_name, specs, bucket_bytes)

    return outer_transform(
        owner,
        axis_name,
        base=base,
        schedule=schedule,
        outer_optimizer=slow_momentum(momentum, slow_learning_rate, nesterov=nesterov),
        layout_for=layout_for,
        param_specs=param_specs,
        exact_average=exact_average,
        local_axis_name=local_axis_name,
        learning_rate=_as_learning_rate(learning_rate),
        **({"observe": observe_rate} if callable(learning_rate) else {}),
    )


def _as_learning_rate(learning_rate: LearningRate) -> optax.Schedule:
    if learning_rate is None:
        return optax.constant_schedule(1.0)
    if callable(learning_rate):
        return learning_rate
    if not learning_rate >= 0:
        raise ValueError(f"slowmo: `learning_rate` must be >= 0, got {learning_rate}.")
    return optax.constant_schedule(float(learning_rate))


def _check_base(base: ParameterTransform | None, schedule: Every, exact_average: bool) -> None:
    warn = warn_once()
    if base is None:
        if not exact_average:
            raise ValueError(
                "slowmo: `exact_average=False` takes what `base` left, and without a base the "
                "replicas would never communicate: give a base, such as js.local_sgd(...)."
            )
        warn(
            "slowmo without a `base`: replicas do not communicate between slow steps. Pass "
            "base=js.local_sgd(...), or use js.diloco where that is meant."
        )
        return
    if not isinstance(base, ParameterTransform):
        raise ValueError(
            "slowmo: `base` must be a js.ParameterTransform such as js.local_sgd(...), got "
            f"{type(base).__name__}; an optimizer stands before slowmo in optax.chain."
        )
    if base.anchor is not None:
        raise ValueError(
            "slowmo: `base` must have no slow step of its own, since both would be called slow; "
            "got a transform with an anchor (js.slowmo or js.diloco)."
        )
    own = base.schedules[0]
    if own.is_plain and schedule.is_plain and schedule.k % own.k:
        warn(
            f"slowmo: `sync_every`={schedule.k} is not a multiple of the base's {own.k}, so some "
            "averages fall between slow steps unevenly."
        )
