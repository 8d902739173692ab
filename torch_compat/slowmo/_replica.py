"""What one process keeps for its module from step to step, and what is done to the module."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ._collectives import Collectives, average_buffers, average_gradients, broadcast
from ._flat import times
from ._gossip import Gossip, GossipPlan
from ._graphs import own_graph
from ._half import Parameters
from ._places import Places
from ._push_sum import Averaging, PushSum
from ._start import check_equal
from .backends import Backend, Kind
from .slow_momentum import Groups, SlowMomentum, SlowSteps


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
      buffers: rank 0's, or their mean over processes.
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
      is_bounded: whether what it carries is bounded where learning rates grow again.
      averages_buffers: whether floating buffers become their mean, and are not rank 0's.

    Attributes:
      places: as given.
      collectives: between this process and the others.
      push_sum: the weight, and whether the module holds numerators.
      slow: slow momentum.
    """

    def __init__(
        self,
        places: Places,
        backend: Backend,
        plan: GossipPlan,
        *,
        is_sgp: bool,
        is_sharded: bool,
        is_bounded: bool,
        averages_buffers: bool,
    ) -> None:
        self.places = places
        self.collectives = Collectives(places, backend)
        self.push_sum = PushSum(is_sgp, plan.weight_moves)
        gossip = Gossip(plan, self.collectives)
        self._averaging = Averaging(self.collectives, gossip, self.push_sum)
        self.slow = SlowSteps(
            self.collectives, self.push_sum, is_sharded=is_sharded, is_bounded=is_bounded
        )
        self._averages_buffers = averages_buffers

    @property
    def num_updates(self) -> int:
        """Calls of `perform_slowmo` so far, which the headers of exchanges tell."""
        return self.collectives.num_updates

    @num_updates.setter
    def num_updates(self, number: int) -> None:
        self.collectives.num_updates = number

    # Before and after the module.

    def broadcast(
        self, tensors: Sequence[torch.Tensor], device: torch.device, kind: Kind = Kind.BUFFERS
    ) -> None:
        """All processes get rank 0's buffers, or parameters too, as `kind` says.

        Communication: one all-reduce of their bytes; nothing without any.
        """
        if tensors and self.places.world_size > 1:
            broadcast(tensors, self.collectives, device, kind)

    def check_start(self, params: Mapping[str, torch.Tensor], device: torch.device) -> None:
        """See `check_equal`; nothing in a run that goes on, where replicas may differ.

        Communication: one all-gather of 16 bytes per process.
        """
        is_new = self.num_updates == 0 and self._averaging.exchanges == 0
        if is_new and self.places.world_size > 1:
            check_equal(params, self.collectives, device)

    @property
    def waits_for_backward(self) -> bool:
        """Whether `after_backward` has anything to do."""
        return self.places.nprocs_per_node > 1 or self.push_sum.moves

    def after_backward(
        self, params: Sequence[torch.nn.Parameter], device: torch.device, *, averages: bool
    ) -> None:
        """Parameters become numerators, and with `averages` gradients their mean over the node.

        Communication: one all-reduce inside the nodes, where they have several processes.
        """
        if averages and self.places.nprocs_per_node > 1:
            trained = [param for param in params if param.requires_grad]
            average_gradients(trained, self.collectives, device)
        self.push_sum.make_numerators(params)

    # In a join context, where some processes have no more data.

    def announce_step(self, device: torch.device) -> None:
        """Tell those without data that `perform_slowmo` begins.

        Communication: a header.
        """
        with self.collectives.graph(device, Kind.STEP, []):
            pass

    def add_no_gradients(self, params: Sequence[torch.nn.Parameter], device: torch.device) -> None:
        """Take part in `after_backward` of others in the node; gradients here stay as they are.

        Communication: that of `after_backward`.
        """
        trained = [param for param in params if param.requires_grad]
        grads = [param.grad for param in trained]
        for param in trained:
            param.grad = None
        average_gradients(trained, self.collectives, device)
        for param, grad in zip(trained, grads, strict=True):
            param.grad = grad

    def share_in_node(
        self,
        params: Sequence[torch.nn.Parameter],
        device: torch.device,
        buffers: Sequence[torch.Tensor] = (),
    ) -> None:
        """All processes of a node get these tensors of the one that has had data for longest.

        Communication: one all-reduce inside the nodes, where they have several processes.
        """
        if self.places.nprocs_per_node > 1:
            # Those with data may hold numerators, the others estimates.
            self.push_sum.make_numerators(params)
            tensors = [*params, *buffers]
            with own_graph(device):
                spoken = self.collectives.only_first_of_node(tensors, device)
            with self.collectives.graph(device, Kind.NODE, spoken) as writes:
                writes.extend(zip(tensors, self.collectives.total_in_node(spoken), strict=True))

    def share_optimizer_in_node(
        self, optimizer: torch.optim.Optimizer | None, device: torch.device
    ) -> None:
        """All processes of a node get the optimizer's state of the same process.

        Communication: one broadcast inside the nodes, where they have several processes.
        """
        if self.places.nprocs_per_node > 1:
            own = None if optimizer is None else optimizer.state_dict()
            with self.collectives.graph(device, Kind.OPTIMIZER, []):
                state = self.collectives.of_first_of_node(own and own["state"])
            if optimizer is not None and own is not None and state is not None:
                optimizer.load_state_dict({**own, "state": state})

    @contextmanager
    def rates_of_those_with_data(
        self, optimizer: torch.optim.Optimizer, momentum: SlowMomentum
    ) -> Iterator[None]:
        """Inside, `optimizer` has the learning rates of a process that still has data.

        So has `momentum` those of the updates since the last slow step.

        Communication: one all-reduce of 16 bytes per group; nothing while all have data.
        """
        if not self.collectives.absent:
            yield
            return
        host = torch.device("cpu")
        groups = [group for group in optimizer.param_groups if group["params"]]
        rates = [Groups(optimizer).rates(host), momentum.rates.since]
        spoken = self.collectives.only_first([torch.tensor(rates, dtype=torch.float64)], host)
        with self.collectives.graph(host, Kind.RATES, spoken):
            now, since = self.collectives.total(spoken)[0].tolist()
        before = [group["lr"] for group in groups]
        if self.places.rank in self.collectives.absent:
            momentum.rates.since = since
            for group, rate in zip(groups, now, strict=True):
                group["lr"] = rate
        try:
            yield
        finally:
            for group, rate in zip(groups, before, strict=True):
                group["lr"] = rate

    # The parts of a step.

    def average(self, params: Parameters, buffers: Sequence[torch.Tensor]) -> None:
        """The mean over nodes; see `Averaging.average`."""
        self._averaging.average(params, buffers)

    def averaged(self, buffers: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those of `buffers` that become their mean; the others keep what this process has."""
        if not self._averages_buffers:
            return []
        return [b for b in buffers if b.is_floating_point() and b.numel()]

    def average_buffers(self, buffers: Sequence[torch.Tensor], device: torch.device) -> None:
        """Average floating `buffers` alone, in a step that averages no parameters, or shards them.

        Communication: one all-reduce of their bytes; nothing without any.
        """
        if buffers and self.places.world_size > 1:
            average_buffers(buffers, self.collectives, device)

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
        collectives, push_sum, momentum = self.collectives, self.push_sum, self.slow.momentum
        slow = [] if self.slow.initial is None else [self.slow.initial]
        if momentum is not None and not self.slow.is_sharded:
            slow = [momentum.anchor, momentum.velocity]
        with own_graph(device):
            shares = collectives.shares([*push_sum.numerators(params), *slow, push_sum.weight])
            shares = collectives.only_masters(shares)
            spoken = collectives.only_first(buffers, device)
            averaged = self.averaged(buffers)
            shares_of_all = collectives.shares_of_all(averaged, device)
            parts = dict(zip(map(id, averaged), shares_of_all, strict=True))
            spoken = [parts.get(id(b), value) for b, value in zip(buffers, spoken, strict=True)]
        with collectives.graph(device, Kind.CONSOLIDATION, [*shares, *spoken]):
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
