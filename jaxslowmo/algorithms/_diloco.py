"""DiLoCo: replicas train independently, with an outer optimizer step once in a while."""

import functools
import logging
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._support.checks import records_settings
from .._support.types import AxisName, PyTree
from ..collectives.codecs import Codec
from ..transform import (
    Every,
    InnerPeriods,
    ParameterTransform,
    as_schedule,
    checked_group,
    checked_rate,
    increment,
)
from ..tree import times
from .outer import (
    Aggregate,
    Fragments,
    checked_aggregate,
    outer_algorithm,
    resolve_shard_state,
)

_LOGGER = logging.getLogger("jaxslowmo")


class OuterNesterovState(NamedTuple):
    """The state of `outer_nesterov`."""

    trace: PyTree  # like the anchor: the displacements so far, weighted by the momentum
    count: jax.Array  # () int32, outer steps so far


def outer_nesterov(
    learning_rate: float = 0.7, momentum: float = 0.9
) -> optax.GradientTransformation:
    """Return Nesterov's SGD that begins as a plain average, an `outer_optimizer` for `diloco`.

    Outer step k = 0, 1, ... computes, with D the pseudo-gradient:

        w = min(1, k / (0.9 (k + 3)));   m = w * momentum;   r = 1 + w * (learning_rate - 1)
        trace <- m * trace + D;   anchor <- anchor - r * (m * trace + D)

    From k = 27 on steps are those of `optax.sgd(learning_rate, momentum, nesterov=True)`, with the
    default numbers DiLoCo's published optimizer. That one moves by 1.33 D at first, and by 7 D when
    D repeats itself. Early in training, where D is large and turns, the loss rises with it at outer
    steps, and runs of 10 to 160 of them ended higher (docs/outer.md, "The first outer steps").

    Args:
      learning_rate: rate of later steps, >= 0, a number or a traced scalar.
      momentum: momentum of later steps, in [0, 1), a number or a traced scalar.

    Returns:
      An element-wise optax optimizer with an `OuterNesterovState`.

    Raises:
      ValueError: a rate or a momentum that breaks its rule.

    Communication: none.

    Source: Douillard et al., "DiLoCo", 2023, for the numbers; with 0.9, m is the k / (k + 3) of
      Nesterov, 1983, as Su, Boyd and Candès write it, 2014.
    """
    rate = checked_rate("learning_rate", learning_rate)
    beta = checked_rate("momentum", momentum, below=1)

    def init_fn(params: PyTree) -> OuterNesterovState:
        return OuterNesterovState(jax.tree.map(jnp.zeros_like, params), jnp.zeros([], jnp.int32))

    def update_fn(
        updates: PyTree, state: PyTree, params: PyTree | None = None
    ) -> tuple[PyTree, OuterNesterovState]:
        del params
        k = state.count.astype(jnp.float32)
        share = jnp.minimum(1.0, k / (0.9 * (k + 3.0)))
        m, r = beta * share, 1 + share * (rate - 1)
        trace = jax.tree.map(lambda v, d: times(m, v) + d, state.trace, updates)
        moves = jax.tree.map(lambda v, d: times(-r, times(m, v) + d), trace, updates)
        return moves, OuterNesterovState(trace, increment(state.count))

    return optax.GradientTransformation(init_fn, update_fn)


@functools.cache  # so that each function says it once
def published_outer_optimizer(owner: str) -> optax.GradientTransformation:
    """Return DiLoCo's published outer optimizer, and log for which runs another one is better."""
    _LOGGER.warning(
        "%s: no `outer_optimizer` was given, so it is the published optax.sgd(0.7, momentum=0.9, "
        "nesterov=True). Measured runs of 10 to 160 outer steps ended lower with "
        "js.algorithms.outer_nesterov() (docs/outer.md, 'The first outer steps').",
        owner,
    )
    return optax.sgd(0.7, momentum=0.9, nesterov=True)


@records_settings
def diloco(
    axis_name: AxisName,
    *,
    sync_every: int | Every = 500,
    outer_optimizer: optax.GradientTransformation | None = None,
    shard_state: bool | None = None,
    local_axis_name: AxisName | None = None,
    bucket_bytes: int | None = None,
    codec: Codec | None = None,
    fragments: Fragments = 1,
    delay: int = 0,
    merge: float = 0.0,
    inner_state: InnerPeriods = "keep",
    aggregate: Aggregate = "mean",
) -> ParameterTransform:
    """Train replicas independently; every `sync_every` updates an outer optimizer moves them all.

    Put it last in a chain. In an outer step the pseudo-gradient is D = anchor - mean of the
    replicas' y = params + updates. The outer optimizer updates the anchor with D, and all replicas
    set their parameters to the anchor, which starts as the initial parameters.

    Args:
      axis_name: mapped axis of the replicas.
      sync_every: inner steps per outer step, or `js.every(...)`.
      outer_optimizer: any complete optax optimizer (with learning rate and sign) that needs no
        loss; the default is the paper's, `optax.sgd(0.7, momentum=0.9, nesterov=True)`, and one
        line of the logger "jaxslowmo" then says for which runs `outer_nesterov` is better.
      shard_state: whether each replica keeps only 1/R of each leaf of the anchor and of the outer
        state. True promises an element-wise `outer_optimizer`, and None is True without one (not
        with `top_k`). See `docs/outer.md`.
      local_axis_name: axis of the devices inside a replica, as in `js.slowmo`.
      bucket_bytes: size of the exchanged buffers, as in `js.slowmo`.
      codec: format in which replicas send their displacement, as in `js.slowmo`.
      fragments: number of parts of the model that take turns, as in `js.slowmo`.
      delay: number of updates beside which an exchange runs, as in `js.slowmo`.
      merge: share of its own progress that a replica keeps, as in `js.slowmo`.
      inner_state: "keep", "reset" or "average" the optimizer's moments, as in `js.slowmo`.
      aggregate: how the replicas' displacements become one: their "mean", "rda", `js.rda(...)` or
        `js.norm_weighted(...)`; with the last three each replica has all of the anchor.

    Returns:
      A `ParameterTransform` with `state.shared["anchor"]` and `["outer"]`, the state of
      `outer_optimizer`. They and the exchange without a codec have float32, or the leaf's float64.

    Raises:
      ValueError: sync_every < 1, an invalid `codec`, an outer optimizer that is no optax transform,
        arguments that do not go together; at trace time an unbound axis, missing params, non-float
        leaves; for a model in stages another `aggregate`, or an optimizer that mixes leaves.
      UserWarning: once, if the axis has size 1.

    Communication: every `sync_every` updates, over `axis_name`, one reduce-scatter and one
      all-gather of N bytes each (sharded), or one all-reduce of N bytes; with a codec an all-to-all
      and an all-gather of its bytes. Nothing in other updates.

    Source: Douillard et al., "DiLoCo", 2023, algorithm 1.
    """
    owner = "diloco"
    group = checked_group(owner, axis_name, local_axis_name, bucket_bytes, codec)
    rule = checked_aggregate(owner, aggregate, shard_state=shard_state, codec=codec, delay=delay)
    shard_state = shard_state if rule is None else False
    is_element_wise = rule is None and (outer_optimizer is None or shard_state is True)
    if outer_optimizer is None:
        outer_optimizer = published_outer_optimizer(owner)
    if not isinstance(outer_optimizer, optax.GradientTransformation) or isinstance(
        outer_optimizer, ParameterTransform
    ):
        raise ValueError(
            "diloco: `outer_optimizer` must be an optax gradient transform such as optax.sgd(...), "
            f"got {type(outer_optimizer).__name__}."
        )
    outer_optimizer = optax.with_extra_args_support(outer_optimizer)

    # Douillard et al., algorithm 1, with theta^(t-1) the anchor and theta_i^(t) worker i's y:
    #   Delta^(t) = 1/k sum_i (theta^(t-1) - theta_i^(t)) = theta^(t-1) - mean_i theta_i^(t)
    #   theta^(t) = OuterOpt(theta^(t-1), Delta^(t))
    # No `rate`: the outer optimizer has its own, independent of the inner optimizer's.
    algorithm = outer_algorithm(
        owner,
        group,
        as_schedule(sync_every),
        outer_optimizer,
        is_sharded=resolve_shard_state(owner, shard_state, group, is_element_wise=is_element_wise),
        is_element_wise=is_element_wise,
        fragments=fragments,
        delay=delay,
        merge=merge,
        inner_state=inner_state,
        aggregate=rule,
    )
    return ParameterTransform(algorithm)
