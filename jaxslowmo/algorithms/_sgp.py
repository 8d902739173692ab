"""Stochastic gradient push: replicas exchange parameters with a few peers in every update."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._support.checks import checked_int, warn_once
from .._support.settings import records_settings
from .._support.types import AxisName, Phase, PyTree
from ..collectives.codecs import Half
from ..mesh import Shares, axis_names, axis_size
from ..topology import Graph, Mixing, check_graph, check_mixing, npeer_directed_exponential
from ..transform import (
    Carried,
    Event,
    Exchange,
    Now,
    Operand,
    ParameterTransform,
    StatePlacement,
    Sync,
    carry_leaf,
    checked_exchange,
    every,
    increment,
    narrowed,
    stacked,
)
from ..tree import landing
from ._gossip import (
    ROUND,
    Arrival,
    Gossip,
    GossipPlan,
    SGPState,
    divided,
    gossip_plan,
    pulled,
    pulled_with_residual,
    shares_of_gossip,
    total_mass,
    unsent,
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
    param_specs: PyTree | None = None,
    bucket_bytes: int | None = None,
    codec: Half | None = None,
) -> ParameterTransform:
    """Send the parameters to a few peers in every update, and mix in what they send (gossip).

    Put it last in a chain. With push-sum weight w (starts at 1), numerator x = w * params, updates
    u and P the mixing matrix of the exchange, whose columns sum to 1:

        x <- P (x + u);   w <- P w;   params = x / w                                  (overlap=0)
        x <- P x + u;     w <- P w;   params = x / w                                  (overlap=1)

    The graph rotates with every exchange. No exchange changes the sums of x and w over the
    replicas, so params approach the mean even if nodes send more messages than they receive.
    More on each argument: [docs/api/algorithms.md](#details).

    Args:
      axis_name: mapped axis of the replicas.
      graph: who sends to whom: a graph of the axis' size, or its constructor, such as
        `js.topology.ring`. None is `js.topology.npeer_directed_exponential`.
      mixing: callable `(graph, step) -> P[destination, source]`; None is uniform.
      push_sum: True allows any P; False (PushPull) requires a doubly stochastic P.
      overlap: 0 sends the parameters after the update, 1 those before it, beside the gradients'
        computation. k > 1 mixes in what was sent k - 1 exchanges earlier.
      local_axis_name: axis of the L devices inside a replica; each of them then sends 1/L.
      param_specs: `PartitionSpec` per leaf over automatic axes inside a replica.
      bucket_bytes: size in bytes at which a buffer closes; None sends one buffer per dtype.
      codec: None sends parameters in their own dtypes, `js.codecs.float16()` in 16 bits.

    Returns:
      A `ParameterTransform` with state `SGPState`. For overlap > 1 it needs (overlap - 1) N bytes.

    Raises:
      ValueError: an invalid `graph`, `mixing`, `overlap` or push-sum; at trace time a graph of
        another size, an unbound axis, missing params, non-float leaves.
      UserWarning: once, if the axis has size 1, or for phases before the number of replicas.

    Communication: in every update, per peer (`graph.permutations(step)`), one collective-permute
      per buffer, N bytes in total, N in the sent dtypes, and 4 bytes of w if weights can differ.
      With `local_axis_name` N / L per device, and an all-gather of N over that axis.

    Source: Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019,
      algorithms 1 and 2; FairScale 0.4.13.
    """
    exchange = checked_exchange("sgp", axis_name, local_axis_name, param_specs, bucket_bytes, codec)
    exchange = narrowed("sgp", exchange)
    check_graph("sgp", graph)
    check_mixing(mixing)
    overlap = checked_int("sgp: `overlap` counts exchanges and", overlap, 0)
    return ParameterTransform(SGP(exchange, graph, mixing, push_sum, overlap))


@dataclass(frozen=True, eq=False)
class SGP(Sync):
    """Gossip, with push-sum weights where they can differ from 1.

    Attributes:
      over: axis of the nodes, and the pieces in which they send.
      graph: argument of `sgp`.
      mixing: argument of `sgp`.
      push_sum: argument of `sgp`.
      overlap: argument of `sgp`.
      plans: cache of `plan_for`, by number of nodes.
      warn: function that issues each warning once.
    """

    over: Exchange
    graph: Graph | Callable[[int], Graph] | None
    mixing: Mixing | None
    push_sum: bool
    overlap: int
    plans: dict[int, GossipPlan] = field(default_factory=dict, repr=False)
    warn: Callable[[str], None] = field(default_factory=warn_once, repr=False)
    owner = "sgp"
    state = SGPState
    packs = True

    def __post_init__(self) -> None:
        """Raise `ValueError` for a graph and a mixing that do not go together."""
        self.fixed_plan()

    @property
    def groups(self) -> list[Exchange]:
        """See `Sync.groups`."""
        return [self.over]

    def events(self) -> list[Event]:
        """Return the exchange of an update, whose rounds take turns; none for a single node."""
        plan = self.fixed_plan()
        rounds = 0 if plan is None else len(plan.rounds)
        if plan is not None and not rounds:
            return []
        return [Event(ROUND, every(1), self.exchanged, replaces=True, forms=rounds)]

    def graph_for(self, num_nodes: int) -> Graph:
        """Return the graph, which a constructor makes for `num_nodes` nodes."""
        if isinstance(self.graph, Graph):
            return self.graph
        graph = (npeer_directed_exponential if self.graph is None else self.graph)(num_nodes)
        if not isinstance(graph, Graph):
            raise ValueError(
                "sgp: `graph` must be a function that makes a js.topology.Graph, and the function "
                f"returned a {type(graph).__name__}."
            )
        return graph

    def plan_for(self, num_nodes: int) -> GossipPlan:
        """Return the exchanges among `num_nodes` nodes, which are computed once."""
        if num_nodes not in self.plans:
            graph = self.graph_for(num_nodes)
            if graph.num_nodes != num_nodes:
                raise ValueError(
                    f"sgp: `graph` must have as many nodes as axis {self.over.axis_name!r}, which "
                    f"has size {num_nodes}, got {graph.name}({graph.num_nodes})."
                )
            self.plans[num_nodes] = gossip_plan(
                "sgp", graph, self.mixing, push_sum=self.push_sum, overlap=self.overlap
            )
        return self.plans[num_nodes]

    def fixed_plan(self) -> GossipPlan | None:
        """Return the plan of a graph whose size is fixed; None for a constructor."""
        return self.plan_for(self.graph.num_nodes) if isinstance(self.graph, Graph) else None

    def sized(self, axis_sizes: Mapping[str, int]) -> "SGP":
        """Return the algorithm with the graph of this size."""
        if not set(axis_names(self.over.axis_name)) <= set(axis_sizes):
            return self  # which raises at trace time that the axis is not bound
        num_nodes = math.prod(axis_sizes[name] for name in axis_names(self.over.axis_name))
        # The cached plans belong to graphs of other sizes.
        fixed = replace(self, graph=self.graph_for(num_nodes), plans={})
        fixed.plan_for(num_nodes)  # raises for a graph of another size
        return fixed

    def with_specs(self, param_specs: PyTree, *, of_state: bool = False) -> "SGP":
        """See `Sync.with_specs`."""
        del of_state
        return replace(self, over=self.over.with_specs(param_specs))

    def skipped(self, state: SGPState) -> int:
        """Return in how many updates there was no exchange; see `Sync.skipped`."""
        return int(state.count) - int(state.exchanges)

    def phase(self, t: int, skipped: int = 0) -> Phase:
        """Return the round of the rotation; see `Sync.phase`."""
        if self.fixed_plan() is None:
            self.warn(
                "sgp: `graph` is chosen when the number of replicas is known, so phases before "
                "that do not repeat, and each compiles a program of its own: call "
                "`transform.sized({axis: size})`, or pass a graph."
            )
        return super().phase(t, skipped)

    def init(self, params: PyTree) -> SGPState:
        """Return the first state: weight 1, nothing in flight."""
        # With overlap k a message arrives k - 1 exchanges later, so at first nothing arrives. Every
        # entry has its own arrays, so that a whole state can be donated.
        in_flight = tuple(
            Arrival(jax.tree.map(jnp.zeros_like, params), jnp.zeros([], jnp.float32))
            for _ in range(self.overlap - 1)
        )
        return SGPState(
            count=jnp.zeros([], jnp.int32),
            exchanges=jnp.zeros([], jnp.int32),
            weight=jnp.ones([], jnp.float32),
            in_flight=in_flight,
        )

    def local(self, operand: Operand, now: Now) -> Operand:
        """Return the update without an exchange: x moves by u, and so params by u / w."""
        updates, others, state = super().local(operand, now)
        plan = self.plan_for(axis_size(self.over.axis_name))
        return divided(updates, state.weight) if plan.weight_moves else updates, others, state

    def exchanged(self, operand: Operand, now: Now) -> Operand:
        """Return the new updates, other arrays and push-sum weight after an exchange."""
        # `now.weight` is not read: an idle node passes on the parameters that it holds.
        plan = self.plan_for(axis_size(self.over.axis_name))
        if not plan.rounds:  # a single node has no peers
            return self.local(operand, now)
        params, (u, o, s) = now.params, Sync.local(self, operand, now)
        # With overlap the parameters before the update are sent. They do not depend on the
        # gradients, so the exchange can run at the same time as forward and backward pass.
        local = params if self.overlap else landing(params, self.local(operand, now)[0])
        # A program for one round is named by the phase; others read it from the state.
        form = now.form(ROUND)
        number = s.exchanges if form is None else form
        # Assran et al., algorithm 1, on node i, with the parameters z = x / w:
        #   x_i <- sum_k P[i, k] x_k         w_i <- sum_k P[i, k] w_k         z_i = x_i / w_i
        # Nodes send z_k, and w_k where it can differ, so the receiver forms P[i, k] w_k z_k. With
        #   w_arrived = sum of P[i, k] w_k over k != i,  z_arrived = the mean that goes with it,
        #   z_i <- (P[i, i] w_i z_i + w_arrived z_arrived) / (P[i, i] w_i + w_arrived)
        #        = z_i + (w_arrived / w_i after) (z_arrived - z_i)
        # which moves nothing if nodes agree, however the weights are rounded.
        gossip, moves = Gossip(self.over, plan), plan.weight_moves
        w = s.weight if moves else jnp.ones([], jnp.float32)
        arrival, kept = gossip.exchange(number, local, w, like=params)
        if o:
            # Model state has the same weights and is never late. It is exchanged separately: it
            # results from the forward pass, for which the parameters' exchange need not wait.
            separate = Gossip(Exchange(self.over.axis_name, self.over.local_axis_name), plan)
            others, _ = separate.exchange(number, o, w, like=o)
            share = others.weight.astype(kept.dtype) / weight_after(kept, w, others)
            new = pulled(o, o, others, share)
            o = [x.astype(old.dtype) for x, old in zip(new, o, strict=True)]
        if self.overlap > 1:
            # Weight is late too: what is in flight is missing from w until it arrives with z.
            (arrival, *late), fresh = s.in_flight, arrival
            s = s._replace(in_flight=(*late, fresh))
        after = weight_after(kept, w, arrival) if moves else w
        # The gradient moves the numerator by u and the parameters by u / w. With overlap,
        # x <- P x + u, w is the weight after the exchange, else the one before it.
        u = divided(u, after if self.overlap else w) if moves else u
        share, codec = arrival.weight.astype(after.dtype) / after, self.over.codec
        if not isinstance(codec, Half):
            u = pulled(u, local, arrival, share)
        else:
            residual = unsent(local, self.over, codec, params)
            sent_share = (1 - kept) * w.astype(kept.dtype) / after
            u = pulled_with_residual(
                u, local, residual, arrival, codec, share=share, sent_share=sent_share
            )
        s = s._replace(exchanges=increment(s.exchanges), weight=after.astype(jnp.float32))
        return u, o, s

    def shares(self, state: SGPState) -> Shares | None:
        """See `Sync.shares`."""
        return shares_of_gossip(state)

    def numerator(self, state: SGPState, y: PyTree) -> tuple[PyTree, jax.Array | None]:
        """Return x and w, with what is in flight; see `Sync.numerator`."""
        # Doubly stochastic rounds keep w at 1, so the plain mean is exact.
        plan = self.plan_for(axis_size(self.over.axis_name))
        if not plan.weight_moves:
            return y, None
        x, total = total_mass(y, state.weight, state.in_flight)
        # If all nodes have the same weight, the division needs no sum over them.
        return (x, total) if plan.weight_differs else (divided(x, total), None)

    def reset(self, state: SGPState) -> SGPState:
        """Return the state after all replicas took the mean; see `Sync.reset`."""
        # All nodes hold the mean now, which includes what was in flight. `exchanges` is kept, so
        # that the rotation of the graph goes on.
        return state._replace(
            weight=jnp.ones_like(state.weight),
            in_flight=jax.tree.map(jnp.zeros_like, state.in_flight),
        )

    def settle(self, state: SGPState, move: Callable[[PyTree], PyTree]) -> SGPState:
        """Return the state after nodes moved their parameters; see `Sync.settle`."""
        # Weights stay: what is under way has been moved alike, so sum x / sum w moves with it.
        in_flight = tuple(x._replace(mean=move(x.mean)) for x in state.in_flight)
        return state._replace(in_flight=in_flight)

    def carry(
        self, state: SGPState, params: PyTree, old: StatePlacement, new: StatePlacement
    ) -> Carried:
        """Return the state on another placement; see `Sync.carry`."""
        del params
        if old.replicas == new.replicas:
            return Carried(state)

        def zeros(x: Any) -> Any:
            return stacked(np.zeros(x.shape[1:], x.dtype), new)

        fresh = SGPState(
            count=carry_leaf(state.count, old, new),
            exchanges=carry_leaf(state.exchanges, old, new),
            weight=stacked(np.float32(1), new),
            in_flight=jax.tree.map(zeros, state.in_flight),
        )
        return Carried(
            fresh,
            (
                "Push-sum weights are 1 and nothing is in flight: both are part of the consensus. "
                "The rotation of the graph goes on.",
            ),
        )
