"""Stochastic gradient push: replicas exchange parameters with a few peers in every update."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from .._support.checks import checked_int, records_settings
from .._support.types import AxisName, PyTree
from ..collectives.codecs import Half
from ..mesh import Shares
from ..topology import Graph, Mixing, check_graph, check_mixing, npeer_directed_exponential
from ..transform import (
    Algorithm,
    Carry,
    Event,
    ParameterTransform,
    ReplicaGroup,
    UpdateContext,
    checked_group,
    every,
    increment,
)
from ..tree import add, cached_cast, subtract, widen_updates
from ._error_feedback import check_sends_parameters
from ._gossip import (
    ROUND,
    Arrival,
    Gossip,
    GossipPlan,
    PushSumState,
    gossip_plan,
    on_graph,
    params_after_mixing,
    weight_after,
)


@records_settings
def sgp(
    axis_name: AxisName,
    *,
    graph: Graph | Callable[[int], Graph] | None = None,
    mixing: Mixing | None = None,
    push_sum: bool = True,
    overlap: int = 0,
    local_axis_name: AxisName | None = None,
    bucket_bytes: int | None = None,
    codec: Half | None = None,
) -> ParameterTransform:
    """Send the parameters to a few peers in every update, and mix in what they send (gossip).

    Put it last in a chain. With push-sum weight w (starts at 1), numerator x = w * params, updates
    u and P the mixing matrix of the exchange, whose columns sum to 1:

        x <- P (x + u);   w <- P w;   params = x / w                                  (overlap=0)
        x <- P x + u;     w <- P w;   params = x / w                                  (overlap=1)

    The graph rotates with every exchange. No exchange changes the sums of x and w over the
    replicas. More on each argument: [docs/api/algorithms.md](#details).

    Args:
      axis_name: mapped axis of the replicas.
      graph: who sends to whom: a graph of the axis' size, or its constructor, such as
        `js.topology.ring`. None is `js.topology.npeer_directed_exponential`.
      mixing: callable `(graph, step) -> P[destination, source]`; None is uniform.
      push_sum: True allows any P; False (PushPull) requires a doubly stochastic P.
      overlap: 0 sends the parameters after the update, 1 those before it, beside the gradients'
        computation. k > 1 mixes in what was sent k - 1 exchanges earlier.
      local_axis_name: axis of the L devices inside a replica; each of them then sends 1/L.
      bucket_bytes: size in bytes at which a buffer closes; None sends one buffer per dtype.
      codec: None sends parameters in their own dtypes, `js.codecs.float16()` in 16 bits.

    Returns:
      A `ParameterTransform`; `state.local.weight` is w. For overlap > 1 it keeps (overlap - 1) N
      bytes.

    Raises:
      ValueError: an invalid `graph`, `mixing`, `overlap` or push-sum; at trace time a graph of
        another size, an unbound axis, missing params, non-float leaves.
      UserWarning: once, if the axis has size 1.

    Communication: in every update, per peer (`graph.permutations(step)`), one collective-permute
      per buffer, N bytes in total, N in the sent dtypes, and 4 bytes of w if weights can differ.
      With `local_axis_name` N / L per device, and an all-gather of N over that axis.

    Source: Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019,
      algorithms 1 and 2; FairScale 0.4.13.
    """
    group = checked_group("sgp", axis_name, local_axis_name, bucket_bytes, codec)
    check_sends_parameters("sgp", codec)
    check_graph("sgp", graph)
    check_mixing(mixing)
    overlap = checked_int("sgp: `overlap` counts exchanges and", overlap, 0)
    graph = npeer_directed_exponential if graph is None else graph
    algorithm = Algorithm(
        groups=(group,),
        local=functools.partial(_first_state, overlap=overlap),
        mass=_mass,
        owner="sgp",
        count=lambda local: int(local.exchanges),
    )

    def make_algorithm(graph: Graph) -> Algorithm:
        plan = gossip_plan("sgp", graph, mixing, push_sum=push_sum, overlap=overlap)
        if not plan.rounds:  # a single node has no peers
            return algorithm
        run = functools.partial(_exchange, plan=plan, overlap=overlap)
        event = Event(ROUND, every(1), run, group, replaces=True, forms=len(plan.rounds))
        return replace(
            algorithm,
            events=(event,),
            reset=_reset,
            counts_alike=not plan.weight_moves,
            begin=_scale_updates if plan.weight_moves else None,
            move=_move_in_flight,
        )

    return ParameterTransform(on_graph(algorithm, graph, make_algorithm))


def _first_state(params: PyTree, *, overlap: int) -> PushSumState:
    """Return the first state: weight 1, nothing in flight."""
    # With overlap k a message arrives k - 1 exchanges later, so at first nothing arrives. Every
    # entry has its own arrays, so that a whole state can be donated.
    in_flight = tuple(
        Arrival(jax.tree.map(jnp.zeros_like, params), jnp.zeros([], jnp.float32))
        for _ in range(overlap - 1)
    )
    return PushSumState(jnp.zeros([], jnp.int32), jnp.ones([], jnp.float32), in_flight)


def _scale_updates(updates: PyTree, local: Any, shared: Any, context: UpdateContext) -> Any:
    """Return the updates of the parameters: x moves by u, and so params = x / w by u / w."""
    del context
    # No update is in half precision: they are at least float32.
    weight = cached_cast(local.weight)
    return jax.tree.map(lambda u: u / weight(u.dtype), updates), local, shared


def _exchange(
    carry: Carry,
    replicas: ReplicaGroup,
    context: UpdateContext,
    *,
    plan: GossipPlan,
    overlap: int,
) -> Carry:
    """Mix in what the peers of this round send, and the push-sum weights that go with it."""
    # `context.weight` is not read: an idle node passes on the parameters that it holds.
    before, y, local = carry.before, carry.params, carry.local
    # With overlap the parameters before the update are sent. They do not depend on the gradients,
    # so the exchange can run at the same time as forward and backward pass.
    values = before if overlap else y
    # The phase of a program for one round names the round; other programs read it from the state.
    form = context.form(ROUND)
    number = local.exchanges if form is None else form
    # Assran et al., algorithm 1, on node i, with the parameters z = x / w:
    #   x_i <- sum_k P[i, k] x_k         w_i <- sum_k P[i, k] w_k         z_i = x_i / w_i
    # Nodes send z_k, and w_k where it can differ, so the receiver forms P[i, k] w_k z_k. With
    #   w_arrived = sum of P[i, k] w_k over k != i,  z_arrived = the mean that goes with it,
    #   z_i <- (P[i, i] w_i z_i + w_arrived z_arrived) / (P[i, i] w_i + w_arrived)
    #        = z_i + (w_arrived / w_i after) (z_arrived - z_i)
    # which moves nothing if nodes agree, however the weights are rounded.
    gossip, moves = Gossip(replicas, plan), plan.weight_moves
    w = local.weight if moves else jnp.ones([], jnp.float32)
    arrival, kept = gossip.exchange(number, values, w, like=before)
    # Model state has the same weights and is never late.
    statistics = gossip.mix_statistics(number, carry.statistics, w)
    in_flight = local.in_flight
    if overlap > 1:
        # Weight is late too: what is in flight is missing from w until it arrives with z.
        (arrival, *late), fresh = in_flight, arrival
        in_flight = (*late, fresh)
    after = weight_after(kept, w, arrival) if moves else w
    if moves and overlap:
        # With x <- P x + u the parameters move by u / w, of the weight after the exchange; before
        # it y was made with the one before.
        ratio = w.astype(after.dtype) / after
        wide = widen_updates(before)
        step = jax.tree.map(lambda a, b: ratio.astype(a.dtype) * subtract(a, b), y, wide)
        y = jax.tree.map(add, wide, step)
    y = params_after_mixing(y, values, arrival, kept, w, after, replicas.codec, like=before)
    local = PushSumState(increment(local.exchanges), after.astype(jnp.float32), in_flight)
    return carry._replace(params=y, statistics=statistics, local=local)


def _mass(local: PushSumState) -> Shares:
    """Return the weight of this node's parameters, and those of messages on their way to it."""
    return [(local.weight, None), *((x.weight, x.mean) for x in local.in_flight)]


def _reset(local: PushSumState) -> PushSumState:
    """Return the state after all nodes took the mean, which includes what was in flight.

    `exchanges` is kept, so that the rotation of the graph goes on.
    """
    in_flight = jax.tree.map(jnp.zeros_like, local.in_flight)
    return local._replace(weight=jnp.ones_like(local.weight), in_flight=in_flight)


def _move_in_flight(local: PushSumState, move: Callable[[PyTree], PyTree]) -> PushSumState:
    """Return the state after nodes moved their parameters, and what is under way with them."""
    # Weights stay: what is under way moves alike, so sum x / sum w moves with it.
    return local._replace(in_flight=tuple(x._replace(mean=move(x.mean)) for x in local.in_flight))
