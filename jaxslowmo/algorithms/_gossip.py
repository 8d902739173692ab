"""Gossip: what a graph and a mixing ask of the program, one exchange, and push-sum weights.

In an exchange a node sends to the out-peers of a round and takes the mean of what the in-peers
sent. What travels are parameters as they are (de-biased), and their push-sum weight w where weights
can differ between nodes. The receiver applies the mixing weights, which it knows: it gets the mean
of its in-peers' values, each weighted with P[i, k] w_k, and the sum of these weights. So values
stay in the range of parameters whatever the weights are, and nodes that agree keep their value
exactly.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.core import Tracer

from .._support.types import Phase, PyTree
from ..collectives import in_slices, permute
from ..collectives.codecs import Codec
from ..mesh import Shares
from ..topology import ExchangeRound, Graph, Mixing, exchange_rounds
from ..transform import Exchange, Flats, TreePacking, packing_of, phase_scope, run_one_of
from ..tree import Buffer, added, at_least_float32, by_dtype, cast, subtracted


@dataclass(frozen=True)
class GossipPlan:
    """The exchanges that a graph and a mixing ask for.

    Attributes:
      rounds: the exchanges of a rotation; () for a single node.
      weight_moves: whether push-sum weights can differ from 1.
      weight_differs: whether they can differ between nodes, so that they must be sent.
    """

    rounds: tuple[ExchangeRound, ...]
    weight_moves: bool
    weight_differs: bool


def gossip_plan(
    owner: str, graph: Graph, mixing: Mixing | None, *, push_sum: bool, overlap: int
) -> GossipPlan:
    """Check graph and mixing for a whole rotation and say what they need.

    Raises:
      ValueError: a mixing that is none; without push-sum, one that is not doubly stochastic; with
        late arrivals, a node that keeps nothing meanwhile.
    """
    # One rotation tells all: graph and mixing repeat with it.
    rounds = exchange_rounds(graph, mixing)
    if graph.num_nodes == 1:
        return GossipPlan((), False, False)
    # Columns of P sum to 1. Where rows do, too, w = 1 stays 1: sum_k P[i, k] 1 = 1.
    uneven = next((i for i, r in enumerate(rounds) if not r.is_doubly_stochastic), None)
    if uneven is not None and not push_sum:
        raise ValueError(
            f"{owner}: `push_sum`=False needs a doubly stochastic mixing, where what a node keeps "
            f"and receives also sums to 1; at step {uneven} of {graph.name}({graph.num_nodes}) the "
            "rows of P do not. Leave `push_sum` True, which weighs that out."
        )
    # Parameters are x / w: a weight that vanishes in float32 would make them infinite.
    smallest = 1.0 if uneven is None else _smallest_weight(rounds)
    if smallest < _LEAST_WEIGHT:
        raise ValueError(
            f"{owner}: push-sum weights must stay above {_LEAST_WEIGHT:g}, since float32 ends near "
            f"1e-38; on {graph.name}({graph.num_nodes}) with this mixing they fall to "
            f"{smallest:.1g}. Let nodes that send much receive more often, or keep more."
        )
    # With late arrivals a node that keeps nothing would have weight 0 until they come.
    late = overlap > 1
    if late and any(np.any(r.kept == 0) for r in rounds):
        raise ValueError(
            f"{owner}: `overlap`={overlap} needs a mixing in which every node keeps a share > 0, "
            "since what it is sent arrives later; P has a zero on its diagonal."
        )
    # What is on its way is missing from w: alike on all nodes where all keep the same share.
    kept_differs = any(np.ptp(r.kept) > 0 for r in rounds)
    differs = uneven is not None or (late and kept_differs)
    return GossipPlan(rounds, late or uneven is not None, differs)


_LEAST_WEIGHT = 1e-30
_ROTATIONS = 20  # whose weights are looked at; they settle, or vanish, long before


def _smallest_weight(rounds: Sequence[ExchangeRound]) -> float:
    """Smallest push-sum weight of any node."""
    edges = []  # source, destination and share of every message of a round
    for exchange in rounds:
        sources, destinations = np.concatenate([np.array(p) for p in exchange.permutations]).T
        which = np.repeat(np.arange(len(exchange.permutations)), [*map(len, exchange.permutations)])
        edges.append((sources, destinations, exchange.received[which, destinations]))
    weight = np.ones_like(rounds[0].kept)
    smallest = 1.0
    for _ in range(_ROTATIONS):
        for exchange, (sources, destinations, shares) in zip(rounds, edges, strict=True):
            arriving = np.bincount(destinations, shares * weight[sources], weight.size)
            weight = exchange.kept * weight + arriving
            smallest = min(smallest, float(weight.min()))
        if smallest < _LEAST_WEIGHT:
            break
    return smallest


class Arrival(NamedTuple):
    """Return what a node received in one exchange."""

    mean: PyTree  # like the parameters: weighted mean of what the in-peers sent
    weight: jax.Array  # () float32, sum of the push-sum weight that came with it


@dataclass(frozen=True)
class Gossip:
    """The exchanges of a plan.

    Attributes:
      over: axis of the nodes, and in which pieces they send.
      plan: what each exchange sends.
    """

    over: Exchange
    plan: GossipPlan

    def exchange(
        self, number: int | jax.Array, values: PyTree, weight: jax.Array, like: PyTree
    ) -> tuple[Arrival, jax.Array]:
        """Send `values` with `weight` to the peers of exchange `number`, in the dtypes of `like`.

        Returns:
          What arrived, and the share of its own value that this node keeps, () float.

        Communication: for every permutation of the round one collective-permute of each flat buffer
          over `axis_name`, in the dtype of a codec that narrows it, and of 4 bytes of w where
          weights differ.
        """

        def run(index: int, operand: tuple[Flats, jax.Array]) -> tuple[Flats, jax.Array, jax.Array]:
            with phase_scope(round_event(index)):
                return self._run(self.plan.rounds[index], *operand, packing)

        codec = self.over.codec

        def sent(buffer: Buffer, flat: jax.Array) -> jax.Array:
            return codec.encode(flat)[0] if codec and codec.narrows(buffer.dtype) else flat

        # Flat over the whole switch, so that each of its branches is a few collectives and no more.
        packing = packing_of(like, self.over)
        size = len(self.plan.rounds)
        flats, received, kept = run_one_of(
            number % size,
            [functools.partial(run, i) for i in range(size)],
            (packing.pack(values, sent, role="round"), weight),
        )
        return Arrival(packing.unpack(flats), received.astype(jnp.float32)), kept

    def _run(
        self, round_: ExchangeRound, flats: Flats, weight: jax.Array, packing: TreePacking
    ) -> tuple[Flats, jax.Array, jax.Array]:
        # Weights that are equal on all nodes need not travel.
        weights = [
            permute(weight, self.over.axis_name, p) if self.plan.weight_differs else weight
            for p in round_.permutations
        ]
        shares = jnp.stack(
            [
                (own := self._own(a)) * w.astype(own.dtype)
                for a, w in zip(round_.received, weights, strict=True)
            ]
        )
        received = jnp.sum(shares)
        # A node that nobody sends to in this round has no mean; its weight 0 says so.
        parts = shares / jnp.where(received == 0, 1, received)

        def mean_of_peers(part: jax.Array, parts: jax.Array, dtype: np.dtype) -> jax.Array:
            arrived = [permute(part, self.over.axis_name, p) for p in round_.permutations]
            # In at least float32, rounded to the parameters' dtype once, at the end.
            first = arrived[0].astype(at_least_float32(dtype))
            mean = first
            for i, other in enumerate(arrived[1:], start=1):
                # Differences, so that peers that agree give exactly their value.
                mean += parts[i].astype(mean.dtype) * (other.astype(mean.dtype) - first)
            return mean.astype(dtype)

        def exchange(buffer: Buffer, flat: jax.Array, parts: jax.Array) -> jax.Array:
            # A permutation of nothing is not allowed.
            if flat.size == 0:
                return flat.astype(buffer.dtype)
            local = self.over.local_axis_name
            return in_slices(flat, local, lambda x: mean_of_peers(x, parts, buffer.dtype))

        return packing.map(exchange, flats, parts), received, self._own(round_.kept)

    def _own(self, per_node: np.ndarray) -> jax.Array:
        """This node's entry, in JAX's default float dtype."""
        # A constant where nodes are alike: regular graphs then hold no table and no axis index.
        if np.all(per_node == per_node[0]):
            return jnp.asarray(float(per_node[0]))
        return jnp.asarray(per_node)[lax.axis_index(self.over.axis_name)]


_ROUND, ANY_ROUND = "round", "any round"  # the latter: which one, the state tells


def round_event(index: int) -> str:
    """Name of an exchange in phases and reports."""
    return f"{_ROUND} {index}"


def any_round(phase: Phase) -> Phase:
    """A phase that names no round, for programs that find it in the state."""
    return tuple(ANY_ROUND if event.startswith(f"{_ROUND} ") else event for event in phase)


def round_number(owner: str, phase: Phase, exchanges: jax.Array) -> int | jax.Array:
    """The exchange that a phase of one event names, or the one after so many `exchanges`.

    Raises:
      ValueError: a phase of something else.
    """
    # Who may refuse an exchange cannot tell on the host how many there have been.
    if phase == (ANY_ROUND,):
        return exchanges
    word, _, number = str(phase[0]).partition(" ")
    if len(phase) != 1 or word != _ROUND or not number.isdecimal():
        raise ValueError(
            f"{owner}: `phase` must come from `transform.phase(t)`, one event such as "
            f"{(round_event(0),)!r} or none, got {phase!r}."
        )
    return int(number)


def over(tree: PyTree, weight: jax.Array) -> PyTree:
    """`tree / weight` leaf by leaf, for a scalar weight > 0, in the leaves' dtypes (not half)."""
    # Half precision never gets here: updates and numerators are at least float32.
    in_dtype = by_dtype(weight)
    return jax.tree.map(lambda x: x / in_dtype(x.dtype), tree)


def pulled(updates: PyTree, own: PyTree, arrival: Arrival, share: jax.Array) -> PyTree:
    """`updates` that also move `own` by `share` of the way to what arrived.

    With share = (weight that arrived) / (weight afterwards) this is push-sum's new estimate: the
    mean of own and received values, each with its weight. Where both are equal nothing moves.
    """
    in_dtype = by_dtype(share)

    def pull(u: jax.Array, mine: jax.Array, theirs: jax.Array) -> jax.Array:
        # The difference first: nodes that agree then move by exactly 0.
        wide = at_least_float32(u.dtype)
        away = subtracted(cast(theirs, wide), cast(mine, wide))
        return added(cast(u, wide), in_dtype(wide) * away)

    return jax.tree.map(pull, updates, own, arrival.mean)


def together(kept: jax.Array, weight: jax.Array, arrival: Arrival) -> jax.Array:
    """The push-sum weight after an exchange, in the dtype of the share that was kept."""
    return kept * weight.astype(kept.dtype) + arrival.weight.astype(kept.dtype)


def total_mass(
    values: PyTree, weight: jax.Array, in_flight: Sequence[Arrival]
) -> tuple[PyTree, jax.Array]:
    """Numerators and weight of a node, what was sent to it and not yet mixed in included.

    Returns:
      `(x, w)`, in at least float32; over all nodes sum x / sum w is the mean that gossip tends to.
    """

    def numerator(own: jax.Array, *arrived: jax.Array) -> jax.Array:
        wide = at_least_float32(own.dtype)
        # x = w z of what this node holds, and of each message under way to it.
        x = weight.astype(wide) * own.astype(wide)
        for arrival, mean in zip(in_flight, arrived, strict=True):
            x += arrival.weight.astype(wide) * mean.astype(wide)
        return x

    x = jax.tree.map(numerator, values, *(arrival.mean for arrival in in_flight))
    total = weight + sum((a.weight for a in in_flight), start=jnp.zeros_like(weight))
    return x, total


def unsent(values: PyTree, over: Exchange, codec: Codec, like: PyTree) -> PyTree:
    """Return what a node does not send of `values`, in the dtypes of `like`.

    Communication: none.
    """

    def of(buffer: Buffer, flat: jax.Array) -> jax.Array:
        narrowed = codec.narrows(buffer.dtype)
        return codec.encode(flat)[1] if narrowed else jnp.zeros_like(flat)

    return packing_of(like, over).through(of, values)


def pulled_with_residual(
    updates: PyTree,
    own: PyTree,
    residual: PyTree,
    arrival: Arrival,
    codec: Codec,
    *,
    share: jax.Array,
    given: jax.Array,
) -> PyTree:
    """`pulled`, for a node that keeps what it has not sent of the share that it gave away.

    With z = `own` and r = `residual` the others have got z - r, and the numerator keeps r times the
    weight that they got it with, so that the sum over all nodes is as it was:

        z + share (z_arrived - z) + given r

    Where nodes give as much weight as they get, that is r + what z - r becomes. A codec that
    `rounds_mixtures` rounds the latter.

    Args:
      updates: the updates of the parameters, in at least float32.
      own: z.
      residual: r; leaves that travel as they are have none, and tell it by their dtype.
      arrival: what the node got.
      codec: the codec in whose form it came.
      share: () weight that arrived over the weight afterwards.
      given: () weight that the node gave away over the weight afterwards.
    """
    of_arrived, of_residual = by_dtype(share), by_dtype(given - share)

    def pull(u: jax.Array, mine: jax.Array, left: jax.Array, theirs: jax.Array) -> jax.Array:
        wide = at_least_float32(u.dtype)
        r = cast(left, wide)
        sent = subtracted(cast(mine, wide), r)
        away = of_arrived(wide) * subtracted(cast(theirs, wide), sent)
        if codec.rounds_mixtures and codec.narrows(left.dtype):
            away = subtracted(codec.rounded(added(sent, away)), sent)
        return added(cast(u, wide), away + of_residual(wide) * r)

    return jax.tree.map(pull, updates, own, residual, arrival.mean)


class SGPState(NamedTuple):
    """State of `sgp`."""

    count: jax.Array  # () int32, updates so far; equal on all replicas
    exchanges: jax.Array  # () int32, exchanges so far; equal on all replicas
    weight: jax.Array  # () float32, push-sum weight w; with what is in flight, sums to the replicas
    in_flight: tuple[Arrival, ...]  # overlap - 1 of them, oldest first; () for overlap 0 and 1


def shares_of_gossip(opt_state: PyTree) -> Shares | None:
    """Return how the replicas of a state count in their consensus, as `js.consensus` takes it.

    Args:
      opt_state: stacked states of optax transforms, of any depth.

    Returns:
      Pairs of push-sum weights (replicas,) and parameters, None for the replicas' own; None where
      all replicas count alike: without a state of `js.sgp`, and where several, or some inside of
      `optax.masked` or `optax.partition`, have no weights but 1 and nothing in flight.

    Raises:
      ValueError: replicas that count differently in some leaves than in others.

    Communication: none where one state holds for all leaves; else one reduction of the weights, a
      few bytes per state, over the devices that hold them.
    """
    everywhere, in_some_leaves = _states_of_gossip(opt_state)
    states = [*everywhere, *in_some_leaves]
    if len(states) == 1 and everywhere:
        (state,) = states
        return [(state.weight, None), *((a.weight, a.mean) for a in state.in_flight)]
    if all(map(_counts_alike, states)):
        return None
    raise ValueError(
        "`state` holds js.sgp for some of its leaves, or several, and their replicas do not count "
        "alike there, so that no weights hold for all leaves: take the js.consensus of each part, "
        "with `shares` of its own transform."
    )


def _states_of_gossip(tree: PyTree) -> tuple[list[SGPState], list[SGPState]]:
    """The states of `js.sgp` in a tree, and those that belong to some leaves alone."""
    kinds = SGPState | optax.MaskedState
    nodes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kinds))
    everywhere = [x for x in nodes if isinstance(x, SGPState)]
    masked = [_states_of_gossip(x.inner_state) for x in nodes if isinstance(x, optax.MaskedState)]
    return everywhere, [state for pair in masked for states in pair for state in states]


def _counts_alike(state: SGPState) -> bool:
    """Whether all weights are 1 and nothing is in flight, so far as that can be read."""
    if state.in_flight or isinstance(state.weight, Tracer):
        return False
    return bool(jnp.all(jnp.asarray(state.weight) == 1))  # also of arrays over several processes
