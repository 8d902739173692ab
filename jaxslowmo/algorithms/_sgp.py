"""Stochastic gradient push: gossip with a few peers in every update."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._support.checks import checked_int, warn_once
from .._support.types import AxisName, Phase, PyTree
from ..collectives.codecs import Codec
from ..mesh import axis_names, axis_size, is_bound, vary_over
from ..topology import Graph, Mixing, check_graph, check_mixing, npeer_directed_exponential
from ..transform import (
    Carried,
    Communicate,
    Exchange,
    Others,
    ParameterTransform,
    StatePlacement,
    carry_leaf,
    checked_exchange,
    decide,
    every,
    increment,
    parameter_transform,
    run_if,
    stacked,
)
from ..tree import landing, widen_updates
from ._gossip import (
    Arrival,
    Gossip,
    GossipPlan,
    SGPState,
    gossip_plan,
    over,
    pulled,
    pulled_with_residual,
    round_event,
    round_number,
    shares_of_gossip,
    together,
    total_mass,
    unsent,
)


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
    codec: Codec | None = None,
) -> ParameterTransform:
    """Gossip: in every update send the parameters to a few peers and mix in what arrives.

    Comes last in a chain. With push-sum weight w (starts at 1), numerator x = w * params, updates u
    and P the mixing matrix of the exchange, whose columns sum to 1:

        x <- P (x + u);   w <- P w;   params = x / w                                  (overlap=0)
        x <- P x + u;     w <- P w;   params = x / w                                  (overlap=1)

    The graph rotates through its phone book with every exchange, starting at 0; an exchange that is
    skipped does not rotate. The sums of x and of w over the replicas are kept by every exchange, so
    params approach the mean also where nodes send and receive different numbers of messages.

    Args:
      axis_name: mapped axis of the replicas.
      graph: who sends to whom, of the axis' size, from `js.topology`; or its constructor, such as
        `js.topology.ring`, to be called with the axis' size. None is
        `js.topology.npeer_directed_exponential`.
      mixing: callable `(graph, step) -> P[destination, source]`; None is uniform: every node splits
        its value evenly between itself and its peers. It must repeat with the graph's rotation
        (a static graph: not depend on the step); the steps of two rotations are compared.
      push_sum: False (PushPull) promises that P is doubly stochastic, so that w stays 1.
      overlap: 0 mixes the new parameters. 1 (OSGP) sends those of before the update, so the
        exchange waits for no gradient and can run beside their computation: with a static graph,
        or programs per round (`mode="host"`), and not inside a traced `js.slowmo`; on some TPUs
        with a flag or the right graph (docs/tpu.md). k > 1 applies what was sent k - 1 exchanges
        earlier.
      local_axis_name: axis of the devices inside a replica, which hold equal parameters: each then
        sends 1/L of them.
      param_specs: `PartitionSpec` per leaf (or prefix of the tree) over automatic axes inside a
        replica; each device sends its own block.
      bucket_bytes: None sends one buffer per dtype, else buffers that close at this size.
      codec: None sends parameters in their own dtypes, `js.codecs.bfloat16()` or `float16()` in 16
        bits. A node mixes its own value as it is; with error feedback it also keeps what rounding
        left of the share that it sent, so that the sums over the replicas are kept. float16 with
        error feedback rounds each mixture too, as FairScale does.

    Returns:
      A `ParameterTransform` with state `SGPState`. As `base` of `js.slowmo` its exchange is skipped
      in exact slow steps, which average x and w (also what is in flight) and set w to 1. Memory
      beyond the parameters: (overlap - 1) N for overlap > 1.

    Raises:
      ValueError: no graph, mixing or overlap, or functions of other arguments; a mixing with
        negative weights, columns that don't sum to 1, or weights where there is no edge, checked
        for a whole rotation, or that does not repeat with it; push_sum=False
        where P is not doubly stochastic; overlap > 1 with a node that keeps nothing; push-sum
        weights that would fall below 1e-30. At trace time
        a graph of another size than the axis, an unbound axis, missing params, non-float leaves.
      UserWarning: once, if the axis has size 1; once for phases of an unknown number of replicas.

    Communication: in every update, for each permutation of the round (`graph.permutations(step)`:
      `peers_per_step` of them where the graph is regular), one collective-permute over `axis_name`
      per dtype buffer, N bytes together, N the bytes of the parameters in their own dtypes, or at
      2 bytes per element where a codec narrows these, and 4 bytes of w where weights can differ
      between nodes. With `local_axis_name` N / L per device,
      and one all-gather of N over that axis. Nothing in updates with `communicate=False`.

    Source: Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019,
      algorithms 1 and 2; FairScale 0.4.13.
    """
    exchange = checked_exchange("sgp", axis_name, local_axis_name, param_specs, bucket_bytes, codec)
    check_graph("sgp", graph)
    check_mixing(mixing)
    if not isinstance(push_sum, bool):
        raise ValueError(f"sgp: `push_sum` must be True or False, got {push_sum!r}.")
    overlap = checked_int("sgp: `overlap` counts exchanges and", overlap, 0)
    return _SGP(exchange, graph, mixing, push_sum, overlap).transform()


Operand = tuple[PyTree, Others, SGPState]  # updates, what travels along, state


@dataclass(frozen=True, eq=False)
class _SGP:
    """The transform.

    Attributes:
      over: what it exchanges over.
      graph: as given to `sgp`, like those that follow.
      mixing: likewise.
      push_sum: likewise.
      overlap: likewise.
      plans: those that were asked for, by number of nodes.
      warn: says a thing once.
    """

    over: Exchange
    graph: Graph | Callable[[int], Graph] | None
    mixing: Mixing | None
    push_sum: bool
    overlap: int
    plans: dict[int, GossipPlan] = field(default_factory=dict)
    warn: Callable[[str], None] = field(default_factory=warn_once)

    def transform(self) -> ParameterTransform:
        known = self.known()
        # Phases repeat with the rotation of the graph, which is known once its size is.
        rotation = () if known is None else (every(max(1, len(known.rounds))),)
        return parameter_transform(
            "sgp",
            self.init,
            self.step,
            over=[self.over],
            state=SGPState,
            phase=self.phase,
            skipped=lambda state: state.count - state.exchanges,
            due=lambda t: known is None or bool(known.rounds),
            schedules=(every(1), *rotation),
            numerator=self.numerator,
            reset=self.reset,
            sized=self.sized,
            with_specs=lambda specs: replace(self, over=self.over.with_specs(specs)).transform(),
            carry=self.carry,
            shares=shares_of_gossip,
        )

    def graph_for(self, num_nodes: int) -> Graph:
        """The graph of so many nodes, where its constructor was given."""
        if isinstance(self.graph, Graph):
            return self.graph
        made = (npeer_directed_exponential if self.graph is None else self.graph)(num_nodes)
        if not isinstance(made, Graph):
            raise ValueError(
                "sgp: `graph` must be a function that makes a js.topology.Graph, and the function "
                f"returned a {type(made).__name__}."
            )
        return made

    def plan_for(self, num_nodes: int) -> GossipPlan:
        """What each exchange among so many nodes sends; found once."""
        if num_nodes not in self.plans:
            chosen = self.graph_for(num_nodes)
            if chosen.num_nodes != num_nodes:
                raise ValueError(
                    f"sgp: `graph` must have as many nodes as axis {self.over.axis_name!r}, which "
                    f"has size {num_nodes}, got {chosen.name}({chosen.num_nodes})."
                )
            self.plans[num_nodes] = gossip_plan(
                "sgp", chosen, self.mixing, push_sum=self.push_sum, overlap=self.overlap
            )
        return self.plans[num_nodes]

    def known(self) -> GossipPlan | None:
        """The plan where the number of nodes is known from the arguments."""
        return self.plan_for(self.graph.num_nodes) if isinstance(self.graph, Graph) else None

    def sized(self, axis_sizes: Mapping[str, int]) -> ParameterTransform:
        """See `LayoutSpec.sized`: with the graph that it is then."""
        if not set(axis_names(self.over.axis_name)) <= set(axis_sizes):
            return self.transform()  # which says at trace time that the axis is not bound
        num_nodes = math.prod(axis_sizes[name] for name in axis_names(self.over.axis_name))
        # Plans of other sizes are of other graphs.
        fixed = replace(self, graph=self.graph_for(num_nodes), plans={})
        fixed.plan_for(num_nodes)  # refuses another size
        return fixed.transform()

    def phase(self, t: int, skipped: int = 0) -> Phase:
        """See `ScheduleSpec.phase`: the round of the rotation."""
        number, known = t - 1 - skipped, self.known()
        if known is None:
            self.warn(
                "sgp: `graph` is chosen when the number of replicas is known, so phases asked for "
                "before do not repeat, and each compiles a program of its own: ask "
                "`transform.sized({axis: size})`, or pass a graph."
            )
            return (round_event(number),)
        return (round_event(number % len(known.rounds)),) if known.rounds else ()

    def init(self, params: PyTree) -> SGPState:
        """Weight 1, nothing in flight."""

        def differing(weight: jax.Array) -> jax.Array:
            """Equal on all nodes at first, and typed as what it will be."""
            return vary_over(weight, filter(is_bound, axis_names(self.over.axis_name)))

        # With overlap k an exchange arrives k - 1 exchanges later; before the first, nothing does.
        # Arrays of their own, so that all of a state can be donated.
        in_flight = tuple(
            Arrival(jax.tree.map(jnp.zeros_like, params), differing(jnp.zeros([], jnp.float32)))
            for _ in range(self.overlap - 1)
        )
        return SGPState(
            count=jnp.zeros([], jnp.int32),
            exchanges=jnp.zeros([], jnp.int32),
            weight=differing(jnp.ones([], jnp.float32)),
            in_flight=in_flight,
        )

    def step(
        self,
        updates: PyTree,
        others: Others,
        state: SGPState,
        params: PyTree,
        *,
        communicate: Communicate,
        phase: Phase | None,
        **extra: Any,
    ) -> tuple[PyTree, Others, SGPState]:
        """One update; see `ExchangeSpec.exchange`."""
        del extra  # a weight, too: an idle node passes on what it holds
        state = state._replace(count=increment(state.count))
        plan = self.plan_for(axis_size(self.over.axis_name))
        number = round_number("sgp", phase, state.exchanges) if phase else state.exchanges
        # A single node has nobody to send to; an empty phase was asked for.
        if not plan.rounds or phase == ():
            communicate = False

        def alone(operand: Operand) -> Operand:
            """x <- x + w u, so params <- params + u / w where x moves by u."""
            u, o, s = operand
            return over(u, s.weight) if plan.weight_moves else u, o, s

        def exchanged(operand: Operand) -> Operand:
            # What is sent: with overlap the parameters of before, which no gradient of this step
            # has touched, so that the exchange can run beside the forward and backward pass.
            own = params if self.overlap else landing(params, alone(operand)[0])
            return self.exchanged(plan, number, own, params, operand)

        operand = widen_updates(updates), others, state
        return run_if(decide(True, communicate), exchanged, alone, operand)

    def exchanged(
        self,
        plan: GossipPlan,
        number: int | jax.Array,
        own: PyTree,
        params: PyTree,
        operand: Operand,
    ) -> Operand:
        """One exchange of `own`, and what it makes of updates, model state and push-sum weight."""
        # Assran et al., algorithm 1, on node i, with the parameters z = x / w:
        #   x_i <- sum_k P[i, k] x_k         w_i <- sum_k P[i, k] w_k         z_i = x_i / w_i
        # Nodes send z_k, and w_k where it can differ, so the receiver forms P[i, k] w_k z_k. With
        #   w_arrived = sum of P[i, k] w_k over k != i,  z_arrived = the mean that goes with it,
        #   z_i <- (P[i, i] w_i z_i + w_arrived z_arrived) / (P[i, i] w_i + w_arrived)
        #        = z_i + (w_arrived / w_i after) (z_arrived - z_i)
        # which moves nothing where nodes agree, however the weights are rounded.
        u, o, s = operand
        gossip, moves = Gossip(self.over, plan), plan.weight_moves
        w = s.weight if moves else jnp.ones([], jnp.float32)
        arrival, kept = gossip.exchange(number, own, w, like=params)
        if o:
            # Weighted as this exchange, and never late. It is one of its own: with `overlap` the
            # parameters' waits for no forward pass, of which these are results.
            beside = Gossip(Exchange(self.over.axis_name, self.over.local_axis_name), plan)
            came, _ = beside.exchange(number, o, w, like=o)
            share = came.weight.astype(kept.dtype) / together(kept, w, came)
            o = [new.astype(x.dtype) for new, x in zip(pulled(o, o, came, share), o, strict=True)]
        if self.overlap > 1:
            # Of weight too: what is under way is missing from w meanwhile, and comes with z.
            (arrival, *late), fresh = s.in_flight, arrival
            s = s._replace(in_flight=(*late, fresh))
        after = together(kept, w, arrival) if moves else w
        # The gradient moves the numerator, x <- x + u, and the parameters by u / w: with overlap,
        # x <- P x + u, that is the weight after the exchange, else the one before.
        u = over(u, after if self.overlap else w) if moves else u
        share, codec = arrival.weight.astype(after.dtype) / after, self.over.codec
        if codec is None:
            u = pulled(u, own, arrival, share)
        else:
            left, given = unsent(own, self.over, codec, params), (1 - kept) * w.astype(kept.dtype)
            u = pulled_with_residual(u, own, left, arrival, codec, share=share, given=given / after)
        s = s._replace(exchanges=increment(s.exchanges), weight=after.astype(jnp.float32))
        return u, o, s

    def numerator(self, state: SGPState, y: PyTree) -> tuple[PyTree, jax.Array | None]:
        """See `ExchangeSpec.numerator`: x and w, with what is in flight."""
        # Doubly stochastic rounds keep w at 1, and the plain mean is exact.
        plan = self.plan_for(axis_size(self.over.axis_name))
        if not plan.weight_moves:
            return y, None
        x, total = total_mass(y, state.weight, state.in_flight)
        # Where all nodes have the same weight, the division needs no sum over them.
        return (x, total) if plan.weight_differs else (over(x, total), None)

    def reset(self, state: SGPState) -> SGPState:
        """See `ExchangeSpec.reset`."""
        # All hold the mean now, what was in flight included. The rotation of the graph goes on, and
        # with it `exchanges`.
        return state._replace(
            weight=jnp.ones_like(state.weight),
            in_flight=jax.tree.map(jnp.zeros_like, state.in_flight),
        )

    def carry(
        self, state: SGPState, params: PyTree, old: StatePlacement, new: StatePlacement
    ) -> Carried:
        """See `CheckpointSpec.carry`."""
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
