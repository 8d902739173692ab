"""Gossip: the exchanges of a graph with its mixing weights, and push-sum weights.

In an exchange a node sends to its out-peers of the round and averages what its in-peers sent.
Nodes send their de-biased parameters, and their push-sum weight w if weights can differ between
nodes. The receiver knows the mixing weights and applies them: it computes the mean of its in-peers'
values, each weighted with P[i, k] w_k, and the sum of these weights. So sent values stay in the
range of parameters whatever the weights are, and nodes that agree keep their value exactly.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.core import Tracer
from jax.sharding import PartitionSpec as P

from .._support.checks import ArgumentError
from .._support.scopes import MODEL_STATE
from .._support.types import PyTree
from ..collectives import exchange_in_slices, permute
from ..collectives.codecs import Codec, Half
from ..mesh import Shares
from ..topology import ExchangeRound, Graph, Mixing, exchange_rounds, weights_move
from ..transform import (
    Algorithm,
    ReplicaGroup,
    packing_of,
    phase_scope,
    run_one_of,
)
from ..tree import Buffer, BufferPlan, Flats, add, at_least_float32, cached_cast, cast, subtract

ROUND = "round"  # name of the events of gossip


@dataclass(frozen=True)
class GossipPlan:
    """The exchanges of a graph with its mixing weights.

    Attributes:
      rounds: the exchanges of a rotation; () for a single node.
      weight_moves: whether push-sum weights can differ from 1.
      weight_differs: whether they can differ between nodes, so that nodes must send them.
    """

    rounds: tuple[ExchangeRound, ...]
    weight_moves: bool
    weight_differs: bool


def gossip_plan(
    owner: str, graph: Graph, mixing: Mixing | None, *, push_sum: bool, overlap: int
) -> GossipPlan:
    """Check a graph and its mixing over a whole rotation, and return their exchanges.

    Raises:
      ValueError: an invalid mixing; without push-sum, a mixing that is not doubly stochastic; with
        late arrivals, a node that keeps nothing of its value.
    """
    # One rotation is enough: graph and mixing repeat after it.
    rounds = exchange_rounds(graph, mixing)
    if graph.num_nodes == 1:
        return GossipPlan((), False, False)
    moves = weights_move(graph, rounds, push_sum=push_sum)
    # A node that keeps nothing would have weight 0 until the late messages arrive.
    late = overlap > 1
    if late and any(np.any(r.kept == 0) for r in rounds):
        raise ArgumentError(
            "overlap",
            f"{owner}: `overlap`={overlap} needs a mixing in which every node keeps a share > 0, "
            "since what it is sent arrives later; P has a zero on its diagonal.",
        )
    # Messages in flight are missing from w, equally on all nodes if all keep the same share.
    kept_differs = any(np.ptp(r.kept) > 0 for r in rounds)
    return GossipPlan(rounds, late or moves, moves or (late and kept_differs))


def on_graph(
    algorithm: Algorithm,
    graph: Graph | Callable[[int], Graph],
    make_algorithm: Callable[[Graph], Algorithm],
    num_nodes: int | None = None,
) -> Algorithm:
    """Return the algorithm on a graph, which may depend on the number of nodes.

    Args:
      algorithm: the algorithm without its events, which it has while the number is unknown.
      graph: the graph, or a function of the number of nodes.
      make_algorithm: function from the graph to the algorithm with its events.
      num_nodes: the number of nodes, of an earlier binding; None: not known.

    Raises:
      ValueError: a graph of another size, or a function that makes no graph.
    """
    owner, (group,) = algorithm.owner, algorithm.groups

    def bind(
        axis_sizes: Mapping[str, int] | None = None, params: PyTree | None = None
    ) -> Algorithm:
        del params
        size = num_nodes
        if axis_sizes is not None and {*group.axes} <= {*axis_sizes}:
            size = math.prod(axis_sizes[name] for name in group.axes)
        return on_graph(algorithm, graph, make_algorithm, size)

    if not isinstance(graph, Graph) and num_nodes is None:
        needs = (
            "`graph` is chosen when the number of replicas is known, and phases with it: take "
            "those of `transform.bound({axis: size})`, or pass a graph."
        )
        return dataclasses.replace(algorithm, bind=bind, needs=needs)
    sized = graph if isinstance(graph, Graph) else graph(num_nodes or 1)
    if not isinstance(sized, Graph):
        raise ArgumentError(
            "graph",
            f"{owner}: `graph` must be a function that makes a js.topology.Graph, and the "
            f"function returned a {type(sized).__name__}.",
        )
    if num_nodes is not None and sized.num_nodes != num_nodes:
        raise ArgumentError(
            "graph",
            f"{owner}: `graph` must have as many nodes as axis {group.axis_name!r}, which has size "
            f"{num_nodes}, got {sized.name}({sized.num_nodes}).",
        )
    return dataclasses.replace(make_algorithm(sized), bind=bind)


class Arrival(NamedTuple):
    """The values and the weight that a node received in one exchange."""

    mean: PyTree  # like the parameters: weighted mean of the values that the in-peers sent
    weight: jax.Array  # () float32, sum of the push-sum weights that were received


@dataclass(frozen=True)
class Gossip:
    """The exchanges of a plan.

    Attributes:
      group: axis of the nodes, and the pieces in which they send.
      plan: the messages of each exchange.
    """

    group: ReplicaGroup
    plan: GossipPlan

    def exchange(
        self, number: int | jax.Array, values: PyTree, weight: jax.Array, like: PyTree
    ) -> tuple[Arrival, jax.Array]:
        """Send `values` with `weight` to the peers of exchange `number`, in the dtypes of `like`.

        Returns:
          The received values, and the share of its value that this node keeps, () float.

        Communication: for every permutation of the round one collective-permute of each flat buffer
          over `axis_name`, in the dtype of a codec that narrows it, and of 4 bytes of w if weights
          differ.
        """
        group = self.group
        floats = jnp.zeros([], jnp.float32), jnp.zeros([], jnp.result_type(float))
        results = group.local(like), *(group.local(x, [P()]) for x in floats)
        values = jax.tree.map(lambda x, y: cast(x, y.dtype), values, like)
        arguments = [group.local(values), group.local(weight, [P()])]
        known = number if isinstance(number, int) else None
        if known is None:  # the program reads from the state which exchange this is
            arguments.append(group.local(number, [P()]))

        def exchange_blocks(
            group: ReplicaGroup, values: PyTree, weight: jax.Array, *traced_number: Any
        ) -> list[Any]:
            # Not `number`: what is mapped must not close over a tracer.
            gossip = dataclasses.replace(self, group=group)
            index = traced_number[0] if known is None else known
            return gossip._exchange_blocks(index, values, weight)

        mean, received, kept = group.run(exchange_blocks, arguments, *results, packs=True)
        return Arrival(mean, received), kept

    def mix(self, number: int | jax.Array, values: PyTree, weight: jax.Array) -> PyTree:
        """Return the mean of this node's values and those of its in-peers, in their dtypes.

        Communication: that of `exchange`.
        """
        arrival, kept = self.exchange(number, values, weight, like=values)
        after = weight_after(kept, weight, arrival)
        new = params_after_mixing(
            values, values, arrival, kept, weight, after, self.group.codec, like=values
        )
        return jax.tree.map(lambda x, old: x.astype(old.dtype), new, values)

    def mix_statistics(
        self, number: int | jax.Array, statistics: list[Any], weight: jax.Array
    ) -> list[Any]:
        """Return the mixtures of model state, which is sent as it is.

        It is exchanged separately: it results from the forward pass, for which the parameters'
        exchange need not wait.

        Communication: that of `exchange`; none without any.
        """
        if not statistics:
            return statistics
        local = self.group.local_axis_name
        plain = dataclasses.replace(self.group.plain, local_axis_name=local)
        with jax.named_scope(MODEL_STATE):
            return dataclasses.replace(self, group=plain).mix(number, statistics, weight)

    def _exchange_blocks(
        self, number: int | jax.Array, values: PyTree, weight: jax.Array
    ) -> list[Any]:
        """Return the received mean and weight, and the kept share, of this device's blocks."""

        def exchange_flats(
            index: int, operand: tuple[Flats, jax.Array]
        ) -> tuple[Flats, jax.Array, jax.Array]:
            with phase_scope(f"{ROUND} {index}"):
                return self._exchange_flats(self.plan.rounds[index], *operand, packing)

        codec = self.group.codec

        def encode(buffer: Buffer, flat: jax.Array) -> jax.Array:
            if isinstance(codec, Half) and codec.narrows(buffer.dtype):
                return codec.part(flat)[0]
            return flat

        # Packed outside the switch, so that each of its branches holds only a few collectives.
        packing = packing_of(values, self.group)
        size = len(self.plan.rounds)
        flats, received, kept = run_one_of(
            number % size,
            [functools.partial(exchange_flats, i) for i in range(size)],
            (packing.pack(values, encode, role="round"), weight),
            axes=self.group.bound_axes,
        )
        return [packing.unpack(flats), received.astype(jnp.float32), kept]

    def _exchange_flats(
        self, round_: ExchangeRound, flats: Flats, weight: jax.Array, packing: BufferPlan
    ) -> tuple[Flats, jax.Array, jax.Array]:
        """Return the mean and the weight received in a round, and the kept share."""
        # Weights that are equal on all nodes need not be sent.
        weights = [
            permute(weight, self.group.axis_name, p) if self.plan.weight_differs else weight
            for p in round_.permutations
        ]
        shares = jnp.stack(
            [
                (share := self._local_entry(a)) * w.astype(share.dtype)
                for a, w in zip(round_.received, weights, strict=True)
            ]
        )
        received = jnp.sum(shares)
        # A node that receives nothing in this round has no mean, which its weight 0 shows.
        parts = shares / jnp.where(received == 0, 1, received)

        def mean_of_peers(x: jax.Array, dtype: np.dtype) -> jax.Array:
            arrived = [permute(x, self.group.axis_name, p) for p in round_.permutations]
            # Summed in at least float32, and rounded to the parameters' dtype once, at the end.
            first = arrived[0].astype(at_least_float32(dtype))
            mean = first
            for i, other in enumerate(arrived[1:], start=1):
                # Adding differences keeps the exact value of peers that agree.
                mean += parts[i].astype(mean.dtype) * (other.astype(mean.dtype) - first)
            return mean.astype(dtype)

        def exchange_buffer(buffer: Buffer, flat: jax.Array) -> jax.Array:
            # A collective-permute of an empty array is not allowed.
            if flat.size == 0:
                return flat.astype(buffer.dtype)
            local = self.group.local_axis_name
            return exchange_in_slices(flat, local, lambda x: mean_of_peers(x, buffer.dtype))

        return packing.map(exchange_buffer, flats), received, self._local_entry(round_.kept)

    def _local_entry(self, per_node: np.ndarray) -> jax.Array:
        """Return this node's entry, in JAX's default float dtype."""
        # A constant if all nodes have the same: regular graphs then need no table and axis index.
        if np.all(per_node == per_node[0]):
            return jnp.asarray(float(per_node[0]))
        return jnp.asarray(per_node)[lax.axis_index(self.group.axis_name)]


def weight_after(kept: jax.Array, weight: jax.Array, arrival: Arrival) -> jax.Array:
    """Return the push-sum weight after an exchange in which a node keeps the share `kept`."""
    return kept * weight.astype(kept.dtype) + arrival.weight.astype(kept.dtype)


def params_after_mixing(
    params: PyTree,
    local: PyTree,
    arrival: Arrival,
    kept: jax.Array,
    weight: jax.Array,
    after: jax.Array,
    codec: Codec | None,
    *,
    like: PyTree,
) -> PyTree:
    """Return `params` moved as the mixture of `local` with what has arrived moves from `local`.

    With z = `local` and share = (received weight) / (weight afterwards) that is by
    share (z_arrived - z), push-sum's new estimate: the mean of local and received values, each with
    its weight. Equal values do not move.

    With a codec the peers received z - r, r being the residual. The numerator keeps r times the
    weight that was sent with it, so that the sum over all nodes does not change:

        share (z_arrived - z) + sent_share r

    If nodes send as much weight as they receive, the node then has r + (z - r, mixed). A codec that
    `rounds_mixtures` rounds the mixture.

    Args:
      params: the parameters, in at least float32.
      local: the values that this node has sent.
      arrival: the values that it has received.
      kept: () the share of its value that it keeps.
      weight: () push-sum weight of `local`.
      after: () push-sum weight afterwards.
      codec: the codec of the exchange; None: none.
      like: tree of the dtypes in which values are sent.
    """
    share = arrival.weight.astype(after.dtype) / after
    share_as = cached_cast(share)

    def move(u: jax.Array, mine: jax.Array, theirs: jax.Array) -> jax.Array:
        # The difference is taken first, so that nodes that agree move by exactly 0.
        wide = at_least_float32(u.dtype)
        away = subtract(cast(theirs, wide), cast(mine, wide))
        return add(cast(u, wide), share_as(wide) * away)

    if not isinstance(codec, Half):
        return jax.tree.map(move, params, local, arrival.mean)
    sent_share = (1 - kept) * weight.astype(kept.dtype) / after
    residual_share_as = cached_cast(sent_share - share)

    def move_in_codec(u: jax.Array, mine: jax.Array, theirs: jax.Array, x: jax.Array) -> jax.Array:
        wide, is_narrowed = at_least_float32(u.dtype), codec.narrows(x.dtype)
        coded = cast(mine, x.dtype)
        r = cast(codec.part(coded)[1] if is_narrowed else jnp.zeros_like(coded), wide)
        sent = subtract(cast(mine, wide), r)
        away = share_as(wide) * subtract(cast(theirs, wide), sent)
        if codec.rounds_mixtures and is_narrowed:
            away = subtract(codec.round(add(sent, away)), sent)
        return add(cast(u, wide), away + residual_share_as(wide) * r)

    return jax.tree.map(move_in_codec, params, local, arrival.mean, like)


class PushSumState(NamedTuple):
    """The local state of `sgp`."""

    exchanges: jax.Array  # () int32, exchanges so far; equal on all replicas
    weight: jax.Array  # () float32, push-sum weight w; with `in_flight` it sums to the axis size
    in_flight: tuple[Arrival, ...]  # overlap - 1 messages, oldest first; () for overlap 0, 1


def shares_of_gossip(opt_state: PyTree) -> Shares | None:
    """Return the weights of the replicas in their mean, as `shares` of `js.consensus`.

    Args:
      opt_state: stacked states of optax transforms, nested in any way.

    Returns:
      Pairs of push-sum weights (replicas,) and parameters; None as parameters means the replicas'
      current ones. None instead of pairs if all replicas count equally: without a state of
      `js.sgp`, or with states that apply to some leaves only (`optax.masked`, `optax.partition`)
      whose weights are all 1 and which have nothing in flight.

    Raises:
      ValueError: replicas that count differently in some leaves than in others.

    Communication: none if one state applies to all leaves; else one reduction of the weights, a
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
        "`state` holds js.sgp for some leaves only, whose replicas count differently: no weights "
        "hold for all, so take the js.consensus of each part, with `shares` of its transform."
    )


def _states_of_gossip(tree: PyTree) -> tuple[list[PushSumState], list[PushSumState]]:
    """Return the states of `js.sgp` that apply to all leaves, and those that apply to some."""
    kinds = PushSumState | optax.MaskedState
    nodes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kinds))
    everywhere = [x for x in nodes if isinstance(x, PushSumState)]
    masked = [_states_of_gossip(x.inner_state) for x in nodes if isinstance(x, optax.MaskedState)]
    return everywhere, [state for pair in masked for states in pair for state in states]


def _counts_alike(state: PushSumState) -> bool:
    """Return whether all weights are 1 and nothing is in flight; False for traced weights."""
    if state.in_flight or isinstance(state.weight, Tracer):
        return False
    # `jnp.all` also reads arrays over several processes.
    return bool(jnp.all(jnp.asarray(state.weight) == 1))
