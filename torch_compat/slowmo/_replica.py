"""What one process keeps for its module from step to step, and what is done to the module."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ._collectives import Collectives, average_gradients, broadcast, times
from ._gossip import Gossip, GossipPlan
from ._graphs import own_graph
from ._half import Parameters
from ._places import Places
from ._push_sum import Averaging, PushSum
from ._slow_momentum import SlowMomentum, SlowSteps
from ._start import check_equal
from .backends import Backend


@dataclass(frozen=True)
class State:
    """All that must be saved beside the module, to go on exactly.

    Attributes:
      num_updates: calls of `perform_slowmo`.
      exchanges: exchanges with peers.
      momentum: anchor and velocity; None before there is an anchor.
      initial: (N + 1,) float32, the initial parameters, until they have become the anchor.
      weight: (1,) float32, the push-sum weight.
      is_numerator: whether the module's parameters are x and not x / w.
    """

    num_updates: int
    exchanges: int
    momentum: SlowMomentum | None
    initial: torch.Tensor | None
    weight: torch.Tensor
    is_numerator: bool


@dataclass(frozen=True)
class Whole:
    """What the replicas of all processes are together; the same on every one.

    Attributes:
      params: their mean over nodes, sum x / sum w.
      buffers: rank 0's.
      slow: "anchor" and "velocity" whole, or "initial", the initial parameters, or nothing. What
        is not sharded is the mean over nodes.
    """

    params: list[torch.Tensor]
    buffers: list[torch.Tensor]
    slow: dict[str, torch.Tensor]


class Replica:
    """One process' part in a run: what wrapper, state dict and steps share.

    The wrapper has the module and decides what is due when; this does it. Every method that
    communicates must be called in all processes, in the same order.

    Args:
      places: which process this is.
      backend: what connects it to the others.
      plan: of the exchanges with peers.
      is_sgp: whether the base algorithm is SGP.
      is_sharded: whether slow momentum is sharded over all processes.

    Attributes:
      places: as given.
      push_sum: the weight, and whether the module holds numerators.
      slow: slow momentum.
      num_updates: calls of `perform_slowmo` so far.
    """

    def __init__(
        self,
        places: Places,
        backend: Backend,
        plan: GossipPlan,
        *,
        is_sgp: bool,
        is_sharded: bool,
    ) -> None:
        self.places = places
        self.num_updates = 0
        self._collectives = Collectives(places, backend)
        self.push_sum = PushSum(is_sgp, plan.weight_moves)
        gossip = Gossip(plan, self._collectives)
        self._averaging = Averaging(self._collectives, gossip, self.push_sum)
        self.slow = SlowSteps(self._collectives, self.push_sum, is_sharded)

    # Before and after the module.

    def broadcast(self, buffers: Sequence[torch.Tensor], device: torch.device) -> None:
        """All processes get rank 0's `buffers`, or parameters.

        Communication: one all-reduce of their bytes; nothing without any.
        """
        if buffers and self.places.world_size > 1:
            broadcast(buffers, self._collectives, device)

    def check_start(self, params: Mapping[str, torch.Tensor], device: torch.device) -> None:
        """See `check_equal`; nothing in a run that goes on, where replicas may differ.

        Communication: one all-gather of 16 bytes per process.
        """
        is_new = self.num_updates == 0 and self._averaging.exchanges == 0
        if is_new and self.places.world_size > 1:
            check_equal(params, self._collectives, device)

    @property
    def waits_for_backward(self) -> bool:
        """Whether `after_backward` has anything to do."""
        return self.places.nprocs_per_node > 1 or self.push_sum.moves

    def after_backward(self, params: Sequence[torch.nn.Parameter], device: torch.device) -> None:
        """Gradients become their mean over the processes of the node, parameters numerators.

        Communication: one all-reduce inside the nodes, where they have several processes.
        """
        if self.places.nprocs_per_node > 1:
            trained = [param for param in params if param.requires_grad]
            average_gradients(trained, self._collectives, device)
        self.push_sum.make_numerators(params)

    # The parts of a step.

    def average(self, params: Parameters) -> None:
        """The mean over nodes; see `Averaging.average`."""
        self._averaging.average(params)

    def exchange(self, params: Parameters) -> None:
        """One exchange with peers; see `Averaging.exchange`."""
        self._averaging.exchange(params)

    # State.

    def state(self) -> State:
        """That of this moment; its tensors are no copies."""
        return State(
            num_updates=self.num_updates,
            exchanges=self._averaging.exchanges,
            momentum=self.slow.momentum,
            initial=self.slow.initial,
            weight=self.push_sum.weight,
            is_numerator=self.push_sum.is_numerator,
        )

    def take_over(self, state: State) -> None:
        """Go on from `state`; its tensors may be on the host, until they are needed."""
        self.num_updates = state.num_updates
        self._averaging.exchanges = state.exchanges
        self.slow.momentum, self.slow.initial = state.momentum, state.initial
        if self.push_sum.is_on:
            self.push_sum.weight = state.weight
            self.push_sum.is_numerator = state.is_numerator

    def whole(
        self,
        params: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
        device: torch.device,
    ) -> Whole:
        """The replicas of all processes in one; changes nothing.

        Communication: one all-reduce of parameters and buffers; of anchor and velocity an
          all-gather where they are sharded, otherwise an all-reduce along with the parameters.
        """
        collectives, push_sum, momentum = self._collectives, self.push_sum, self.slow.momentum
        slow = [] if self.slow.initial is None else [self.slow.initial]
        if momentum is not None and not self.slow.is_sharded:
            slow = [momentum.anchor, momentum.velocity]
        with own_graph(device):
            shares = collectives.shares([*push_sum.numerators(params), *slow, push_sum.weight])
            shares = collectives.only_masters(shares)
            spoken = collectives.only_first(buffers)
        with collectives.graph(device):
            *means, weight = collectives.total(shares)
            spoken = collectives.total(spoken)
            if momentum is not None and self.slow.is_sharded:
                slow = [collectives.gather(p) for p in (momentum.anchor, momentum.velocity)]
        with own_graph(device):
            slow = means[len(params) :] or slow
            if momentum is not None:
                # No view: reading one would launch a graph of its own, unordered.
                slow = [value[: momentum.span.total].clone() for value in slow]
            means = means[: len(params)]
            if push_sum.moves:
                means = [times(mean, 1 / weight) for mean in means]
            copies = [value.to(b.dtype) for b, value in zip(buffers, spoken, strict=True)]
        names = ("initial",) if momentum is None else ("anchor", "velocity")
        return Whole(means, copies, dict(zip(names, slow, strict=False)))
