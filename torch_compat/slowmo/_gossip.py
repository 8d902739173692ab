"""Stochastic gradient push: graphs, push-sum weights, and averages of parameters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from jaxslowmo.topology import (
    ExchangeRound,
    Graph,
    exchange_rounds,
    make_graph,
    npeer_directed_exponential,
    weights_move,
)

from ._collectives import Collectives
from ._flat import pack, times, unpack
from ._graphs import device_data, own_graph, to_device, write, write_between_passes
from ._parameters import Parameters
from .backends import Kind


@dataclass(frozen=True)
class GossipPlan:
    """The exchanges that follow from a graph and a mixing.

    Attributes:
      rounds: the exchanges of a rotation; () for a single node.
      weight_moves: whether push-sum weights can differ from 1, so that they must be sent.
    """

    rounds: tuple[ExchangeRound, ...]
    weight_moves: bool


def plan_gossip(
    graph: Any, mixing: Any, num_nodes: int, nprocs_per_node: int, *, push_sum: bool
) -> GossipPlan:
    """Check graph and mixing for a whole rotation.

    Args:
      graph: None, a `jaxslowmo.topology.Graph`, its name, a function from the number of nodes to a
        graph, or an object with FairScale's `phone_book`.
      mixing: None, a callable `(graph, step) -> P[destination, source]`, or an object whose
        `is_uniform()` is true.
      num_nodes: number of nodes.
      nprocs_per_node: processes in each node; FairScale's phone books count processes.
      push_sum: whether weights may differ from 1.

    Raises:
      ValueError: a graph or mixing of another form, a graph of another size, one that
        `jaxslowmo.topology` refuses, push_sum=False with a mixing that is not doubly stochastic,
        weights that would vanish.
    """
    if num_nodes == 1:
        return GossipPlan((), False)
    chosen = _as_graph(graph, num_nodes, nprocs_per_node)
    if chosen.num_nodes != num_nodes:
        raise ValueError(
            f"`graph` must have as many nodes as there are, {num_nodes}, got "
            f"{chosen.name}({chosen.num_nodes})."
        )
    rounds = exchange_rounds(chosen, _as_mixing(mixing))
    return GossipPlan(rounds, weights_move(chosen, rounds, push_sum=push_sum))


def _as_graph(graph: Any, num_nodes: int, nprocs_per_node: int) -> Graph:
    if graph is None:
        return npeer_directed_exponential(num_nodes)
    if isinstance(graph, Graph):
        return graph
    if isinstance(graph, str):
        return make_graph(graph, num_nodes)
    if hasattr(graph, "phone_book"):
        return _from_manager(graph, nprocs_per_node)
    constructed = graph(num_nodes) if callable(graph) else None
    if not isinstance(constructed, Graph):
        raise ValueError(
            "`graph` must be None, a jaxslowmo.topology.Graph or its name or constructor, or an "
            f"object with FairScale's `phone_book`, got {graph!r}."
        )
    return constructed


def _from_manager(manager: Any, nprocs_per_node: int) -> Graph:
    """Convert a FairScale GraphManager: rows of edges whose `dest` is the rank of a master."""
    rows = tuple(
        tuple(int(edge.dest) // nprocs_per_node for edge in row) for row in manager.phone_book
    )
    is_dynamic = getattr(manager, "is_dynamic_graph", lambda: True)()
    peers, name = getattr(manager, "peers_per_itr", 1), type(manager).__name__
    return Graph(len(rows), peers, rows, is_dynamic, name=name)


def _as_mixing(mixing: Any) -> Any:
    """Return None for FairScale's uniform mixing, any other value as it is."""
    is_uniform: Callable[[], bool] | None = getattr(mixing, "is_uniform", None)
    return None if is_uniform is not None and is_uniform() else mixing


class PushSum:
    """Conversions between numerators x and estimates x / w; no-ops while weights stay 1.

    Args:
      is_on: whether the base algorithm is SGP.
      moves: whether weights can differ from 1.

    Attributes:
      weight: (1,) float32, w.
      is_numerator: whether the module holds x.

    Source: Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019
      (arXiv:1811.10792), algorithm 1.
    """

    def __init__(self, is_on: bool, moves: bool) -> None:
        self.is_on = is_on
        self.moves = moves
        self.weight = torch.ones(1, dtype=torch.float32)  # whatever torch's default dtype is
        self.is_numerator = False

    def move_to(self, device: torch.device) -> None:
        """Move a weight that was made or loaded on the host to the device of the parameters."""
        if self.weight.device != device:
            (self.weight,) = to_device([self.weight], device)

    def numerators(self, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return x = w * estimate of every parameter, whichever of both the module holds."""
        if self.is_numerator or not self.moves:
            return [param.detach() for param in params]
        return [times(param.detach(), self.weight) for param in params]

    def estimates(self, numerators: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return x / w of every numerator."""
        if not self.moves:
            return list(numerators)
        return [times(x.detach(), 1 / self.weight) for x in numerators]

    def make_numerators(self, params: Sequence[torch.Tensor]) -> None:
        """Overwrite parameters with x, on which optimizer and exchange work."""
        if not self.is_numerator and self.moves:
            write_between_passes(zip(params, self.numerators(params), strict=True))
        self.is_numerator = self.is_on

    def follow(self, params: Sequence[torch.Tensor]) -> None:
        """Overwrite estimates with x if the parameters exchanged so far hold x."""
        if params and self.is_numerator and self.moves:
            write((param, times(param.detach(), self.weight)) for param in params)

    def make_estimates(self, params: Sequence[torch.Tensor]) -> None:
        """Overwrite parameters with x / w, which forward and backward passes need."""
        if self.is_numerator and self.moves:
            write_between_passes(zip(params, self.estimates(params), strict=True))
        self.is_numerator = False


class Averaging:
    """Averages of this process' parameters with those of others; all must call the same methods.

    Attributes:
      exchanges: number of exchanges with peers so far; it determines the next round.
    """

    def __init__(self, collectives: Collectives, plan: GossipPlan, push_sum: PushSum) -> None:
        self._collectives, self._plan, self._push_sum = collectives, plan, push_sum
        self.exchanges = 0
        self._shares: dict[tuple[int, torch.dtype, torch.device], torch.Tensor] = {}

    def average(self, params: Parameters, buffers: Sequence[torch.Tensor]) -> None:
        """Overwrite parameters with their mean over nodes; the push-sum weight becomes 1.

        Args:
          params: the module's parameters.
          buffers: floating buffers, which become their mean over all processes.

        Communication: one all-reduce of the bytes of both, and of 4 more if weights can differ from
          1; nothing with a single node.
        """
        places, push_sum = self._collectives.places, self._push_sum
        if places.num_nodes == 1:
            return
        weights = [push_sum.weight] if push_sum.moves else []
        with own_graph(params.device):
            numerators = push_sum.numerators(params.tensors)
            shares = self._collectives.shares([*numerators, *weights])
            sent = [] if params.masters is None else shares[: len(numerators)]
            shares = self._collectives.only_masters(shares)
            shares += self._collectives.shares_of_all(buffers, params.device)
        residuals = []
        if params.masters is not None:
            # Residuals must be computed from shares as they were rounded to half precision. After
            # the graph they are values, which XLA cannot recompute at another precision.
            with own_graph(params.device):
                sent = [share.float() * places.num_nodes for share in sent]
                residuals = params.residuals(sent)
        with self._collectives.graph(params.device, Kind.AVERAGE, shares):
            sums = self._collectives.total(shares)
        with own_graph(params.device) as writes:
            means, others = sums[: len(numerators)], sums[len(numerators) :]
            if push_sum.moves:
                weight = others.pop(0)
                means = [times(mean, 1 / weight) for mean in means]
                push_sum.weight = torch.ones_like(weight)
            writes.extend(zip(buffers, others, strict=True))
            writes.extend(params.become(means, residuals))
        push_sum.is_numerator = False

    def exchange(self, params: Parameters) -> None:
        """Send to the peers of this round, and mix in the values that arrive.

        x <- P x and w <- P w, the rows of this process' node; all processes of a node then hold
        the result of its master. The plan repeats after its last round.

        Source: Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019
          (arXiv:1811.10792), algorithm 1.

        Communication: nothing with a single node; otherwise per dtype one collective-permute
          between masters for every permutation of the round, of the bytes of the parameters; 4
          bytes of w if weights can differ from 1; then `Collectives.total_in_node` of the same.
        """
        push_sum = self._push_sum
        if not self._plan.rounds:
            return
        with own_graph(params.device):
            numerators = push_sum.numerators(params.tensors)
            residuals = params.residuals(numerators)
            flats = pack(numerators)
        index = self.exchanges % len(self._plan.rounds)
        edges = [edge for edges in self._plan.rounds[index].permutations for edge in edges]
        with self._collectives.graph(params.device, Kind.GOSSIP, flats, edges):
            flats = [self._mix(index, flat) for flat in flats]
            if push_sum.moves:
                push_sum.weight = self._mix(index, push_sum.weight)
        with own_graph(params.device) as writes:
            new = unpack(params.tensors, flats)
            values = new if params.masters else push_sum.estimates(new)
            writes.extend(params.become(values, residuals))
        # Masters stay numerators, and so do parameters until the next forward pass.
        push_sum.is_numerator = params.masters is not None
        self.exchanges += 1

    def _mix(self, index: int, value: torch.Tensor) -> torch.Tensor:
        """Return this node's row of P times `value` of all nodes, computed in at least float32."""
        collectives, round_ = self._collectives, self._plan.rounds[index]
        wide = torch.promote_types(value.dtype, torch.float32)
        key = index, wide, value.device
        if key not in self._shares:
            # The share that this node keeps, then its share of what each permutation brings.
            node = collectives.places.node
            shares = [round_.kept[node], *round_.received[:, node]]
            self._shares[key] = device_data(shares, wide, value.device)
        kept, *received = self._shares[key].split(1)
        mixed = kept * value.to(wide)
        for share, edges in zip(received, round_.permutations, strict=True):
            mixed.addcmul_(share, collectives.permute(value, edges).to(wide))
        of_master = collectives.only_masters([mixed.to(value.dtype)])
        return collectives.total_in_node(of_master)[0]
