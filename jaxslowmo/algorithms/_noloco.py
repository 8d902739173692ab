"""NoLoCo: an outer step in random pairs of replicas, without a collective over all of them."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from .._support.checks import records_settings
from .._support.types import AxisName, PyTree
from ..collectives.codecs import Half
from ..topology import Graph, check_graph, random_matching
from ..transform import (
    Algorithm,
    Carry,
    Event,
    Every,
    ParameterTransform,
    ReplicaGroup,
    UpdateContext,
    as_schedule,
    checked_group,
    checked_rate,
    increment,
)
from ..tree import at_least_float32, times
from ._error_feedback import check_sends_parameters
from ._gossip import ROUND, Gossip, GossipPlan, gossip_plan, on_graph


@records_settings
def noloco(
    axis_name: AxisName,
    *,
    sync_every: int | Every = 50,
    outer_learning_rate: float = 0.7,
    outer_momentum: float = 0.5,
    pull: float | None = None,
    graph: Graph | Callable[[int], Graph] | None = None,
    local_axis_name: AxisName | None = None,
    bucket_bytes: int | None = None,
    codec: Half | None = None,
) -> ParameterTransform:
    """Every `sync_every` updates replicas make an outer step in random pairs (NoLoCo).

    Put it last in a chain. Each replica has an anchor of its own, which starts as the parameters.
    With y = params + updates and the means of the two replicas of a pair:

        v <- outer_momentum * v + outer_learning_rate * mean(y - anchor)
             + pull * (mean(anchor) - anchor)
        anchor <- anchor + v;   params = anchor

    The last term of v, which DiLoCo lacks, holds replicas together. Each waits for its partner
    only. At the end take the `js.consensus` of the replicas.

    Args:
      axis_name: mapped axis of the replicas, of even size.
      sync_every: inner steps per outer step, or `js.every(...)`.
      outer_learning_rate: step size of the outer step, >= 0.
      outer_momentum: factor of the previous v, in [0, 1).
      pull: strength of the pull towards the pair's mean anchor, >= 0; None is
        `outer_learning_rate`, as in the authors' program, and sends half of the bytes.
      graph: the pairs, as in `js.sgp`; None is `js.topology.random_matching`.
      local_axis_name: axis of the L devices inside a replica; each of them then sends 1/L.
      bucket_bytes: size in bytes at which a buffer closes; None sends one buffer per dtype.
      codec: None sends float32 (float64 for float64 leaves), `js.codecs.float16()` 16 bits.

    Returns:
      A `ParameterTransform`; `state.local` has the replica's "anchor" and "velocity", in
        float32 (float64 for float64 leaves).

    Raises:
      ValueError: an invalid `graph` or number; at trace time an odd number of replicas, a graph of
        another size, an unbound axis, missing params, non-float leaves.
      UserWarning: once, if the axis has size 1; the replica then has no outer steps.

    Communication: in an outer step one collective-permute per buffer, N bytes in the anchor's
      dtypes; with a `pull` of its own 2N. Nothing in other updates, nor ever over all replicas.

    Source: Kolehmainen et al., "NoLoCo", 2025, arXiv 2506.10911; github.com/gensyn-ai/noloco,
      `sparse_optimizer_c.py`.
    """
    owner, schedule = "noloco", as_schedule(sync_every)
    group = checked_group(owner, axis_name, local_axis_name, bucket_bytes, codec)
    check_sends_parameters(owner, codec)
    check_graph(owner, graph)
    momentum = checked_rate("outer_momentum", outer_momentum, below=1)
    rate = checked_rate("outer_learning_rate", outer_learning_rate)
    pull_rate = None if pull is None else checked_rate("pull", pull)
    algorithm = Algorithm(
        groups=(group,),
        local=_first_state,
        owner=owner,
        has_anchor=True,
        count=lambda local: int(local["exchanges"]),
    )

    def make_algorithm(graph: Graph) -> Algorithm:
        plan = gossip_plan(owner, graph, None, push_sum=False, overlap=0)
        if not plan.rounds:  # a single node has no partner
            return algorithm
        run = functools.partial(
            _outer_step, plan=plan, momentum=momentum, rate=rate, pull=pull_rate
        )
        event = Event(ROUND, schedule, run, group, forms=len(plan.rounds))
        return replace(algorithm, events=(event,))

    return ParameterTransform(on_graph(algorithm, graph or random_matching, make_algorithm))


def _first_state(params: PyTree) -> dict[str, Any]:
    anchor = jax.tree.map(lambda x: x.astype(at_least_float32(x.dtype)), params)
    return {
        "anchor": anchor,  # like the parameters, at least float32, of this replica
        "velocity": jax.tree.map(jnp.zeros_like, anchor),  # v, of this replica
        "exchanges": jnp.zeros([], jnp.int32),  # outer steps so far; equal on all replicas
    }


def _outer_step(
    carry: Carry,
    replicas: ReplicaGroup,
    context: UpdateContext,
    *,
    plan: GossipPlan,
    momentum: float | jax.Array,
    rate: float | jax.Array,
    pull: float | jax.Array | None,
) -> Carry:
    """Make an outer step with the partner of this round."""
    # `context.weight` is not read: an idle replica passes on the parameters that it holds.
    local = carry.local
    anchor, form = local["anchor"], context.form(ROUND)
    number = local["exchanges"] if form is None else form
    gossip, one = Gossip(replicas, plan), jnp.ones([], jnp.float32)
    # The authors' program, with theta = y, phi the anchor, delta the velocity, means over the pair,
    # alpha the momentum, beta the learning rate and gamma the pull:
    #   delta <- alpha delta + beta mean(theta - phi) + gamma (mean(phi) - phi)
    #   phi <- phi + delta
    # With gamma = beta mean(phi) cancels, and theta alone is sent: beta (mean(theta) - phi).
    centre = anchor if pull is None else gossip.mix(number, anchor, one)

    def new_velocity(v: jax.Array, y: jax.Array, anchor: jax.Array, centre: jax.Array) -> jax.Array:
        v = times(momentum, v) + times(rate, y - centre)
        return v if pull is None else v + times(pull, centre - anchor)

    mean_params = gossip.mix(number, carry.params, one)
    velocity = jax.tree.map(new_velocity, local["velocity"], mean_params, anchor, centre)
    anchor = jax.tree.map(jnp.add, anchor, velocity)
    local = {"anchor": anchor, "velocity": velocity, "exchanges": increment(local["exchanges"])}
    statistics = gossip.mix_statistics(number, carry.statistics, one)
    return carry._replace(params=anchor, statistics=statistics, local=local)
