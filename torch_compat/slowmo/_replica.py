"""The state of one process' replica, and the operations on its module."""

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
    """The state that must be saved with the module to resume exactly.

    Attributes:
      num_updates: number of calls of `perform_slowmo`.
      exchanges: number of exchanges with peers.
      momentum: anchor and velocity; None before there is an anchor.
      initial: (N + 1,) float32, the initial parameters, until they have become the anchor.
      weight: (1,) float32, the push-sum weight.
      is_numerator: whether the module's parameters are x rather than x / w.
    """

    num_updates: int
    exchanges: int
    momentum: SlowMomentum | None
    initial: torch.Tensor | None
    weight: torch.Tensor
    is_numerator: bool


@dataclass(frozen=True)
class Whole:
    """The replicas of all processes, combined into one; equal on every process.

    Attributes:
      params: their mean over nodes, sum x / sum w.
      buffers: rank 0's, or their mean over processes.
      slow: whole "anchor" and "velocity", or "initial", the initial parameters, or nothing. If
        slow momentum is not sharded they are means over nodes.
    """

    params: list[torch.Tensor]
    buffers: list[torch.Tensor]
    slow: dict[str, torch.Tensor]


class Replica:
    """The part of one process in a run; wrapper, state dict and steps use it.

    The wrapper holds the module and decides which operation is due; this class executes it. Every
    method that communicates must be called in all processes, in the same order.

    Args:
      places: the place of this process.
      backend: its connection to the others.
      plan: plan of the exchanges with peers.
      is_sgp: whether the base algorithm is SGP.
      is_sharded: whether slow momentum is sharded over all processes.
      is_bounded: whether the carried velocity is bounded when learning rates grow again.
      averages_buffers: whether floating buffers become their mean instead of rank 0's.

    Attributes:
      places: the place of this process.
      collectives: the collectives between this process and the others.
      push_sum: the push-sum weight, and whether the module holds numerators.
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
        """The number of calls of `perform_slowmo` so far; headers of exchanges contain it."""
        return self.collectives.num_updates

    @num_updates.setter
    def num_updates(self, number: int) -> None:
        self.collectives.num_updates = number

    # Before and after the module.

    def broadcast(
        self, tensors: Sequence[torch.Tensor], device: torch.device, kind: Kind = Kind.BUFFERS
    ) -> None:
        """Overwrite tensors with those of rank 0: buffers, or parameters too, as `kind` says.

        Communication: one all-reduce of their bytes; nothing without any.
        """
        if tensors and self.places.world_size > 1:
            broadcast(tensors, self.collectives, device, kind)

    def check_start(self, params: Mapping[str, torch.Tensor], device: torch.device) -> None:
        """Call `check_equal` in a new run; in a resumed one replicas may differ.

        Communication: one all-gather of 16 bytes per process.
        """
        is_new = self.num_updates == 0 and self._averaging.exchanges == 0
        if is_new and self.places.world_size > 1:
            check_equal(params, self.collectives, device)

    @property
    def waits_for_backward(self) -> bool:
        """True if `after_backward` changes anything."""
        return self.places.nprocs_per_node > 1 or self.push_sum.moves

    def after_backward(
        self, params: Sequence[torch.nn.Parameter], device: torch.device, *, averages: bool
    ) -> None:
        """Make parameters numerators; with `averages` average gradients over the node first.

        Communication: one all-reduce inside the nodes, where they have several processes.
        """
        if averages and self.places.nprocs_per_node > 1:
            trained = [param for param in params if param.requires_grad]
            average_gradients(trained, self.collectives, device)
        self.push_sum.make_numerators(params)

    # For a join context, in which some processes have no more data.

    def announce_step(self, device: torch.device) -> None:
        """Notify processes without data that `perform_slowmo` begins.

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
        """Overwrite these tensors with those of the node's process that had data for longest.

        Communication: one all-reduce inside the nodes, where they have several processes.
        """
        if self.places.nprocs_per_node > 1:
            # Processes with data may hold numerators, the others estimates.
            self.push_sum.make_numerators(params)
            tensors = [*params, *buffers]
            with own_graph(device):
                sent = self.collectives.only_first_of_node(tensors, device)
            with self.collectives.graph(device, Kind.NODE, sent) as writes:
                writes.extend(zip(tensors, self.collectives.total_in_node(sent), strict=True))

    def share_optimizer_in_node(
        self, optimizer: torch.optim.Optimizer | None, device: torch.device
    ) -> None:
        """Load the optimizer's state of the node's process that had data for longest.

        Communication: one broadcast inside the nodes, where they have several processes.
        """
        if self.places.nprocs_per_node > 1:
            local_state = None if optimizer is None else optimizer.state_dict()
            with self.collectives.graph(device, Kind.OPTIMIZER, []):
                state = self.collectives.of_first_of_node(local_state and local_state["state"])
            if optimizer is not None and local_state is not None and state is not None:
                optimizer.load_state_dict({**local_state, "state": state})

    @contextmanager
    def rates_of_those_with_data(
        self, optimizer: torch.optim.Optimizer, momentum: SlowMomentum
    ) -> Iterator[None]:
        """Run the block with `optimizer` at the learning rates of a process that has data.

        `momentum` has that process' learning rates of the updates since the last slow step.

        Communication: one all-reduce of 16 bytes per group; nothing while all have data.
        """
        if not self.collectives.absent:
            yield
            return
        host = torch.device("cpu")
        groups = [group for group in optimizer.param_groups if group["params"]]
        rates = [Groups(optimizer).rates(host), momentum.rates.since]
        sent = self.collectives.only_first([torch.tensor(rates, dtype=torch.float64)], host)
        with self.collectives.graph(host, Kind.RATES, sent):
            current, since = self.collectives.total(sent)[0].tolist()
        before = [group["lr"] for group in groups]
        if self.places.rank in self.collectives.absent:
            momentum.rates.since = since
            for group, rate in zip(groups, current, strict=True):
                group["lr"] = rate
        try:
            yield
        finally:
            for group, rate in zip(groups, before, strict=True):
                group["lr"] = rate

    # The parts of a step.

    def average(self, params: Parameters, buffers: Sequence[torch.Tensor]) -> None:
        """Average over nodes; see `Averaging.average`."""
        self._averaging.average(params, buffers)

    def averaged(self, buffers: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the `buffers` that are averaged; the others keep this process' values."""
        if not self._averages_buffers:
            return []
        return [b for b in buffers if b.is_floating_point() and b.numel()]

    def average_buffers(self, buffers: Sequence[torch.Tensor], device: torch.device) -> None:
        """Average floating `buffers` in a step whose average of parameters does not include them.

        Communication: one all-reduce of their bytes; nothing without any.
        """
        if buffers and self.places.world_size > 1:
            average_buffers(buffers, self.collectives, device)

    def exchange(self, params: Parameters) -> None:
        """Exchange with peers; see `Averaging.exchange`."""
        self._averaging.exchange(params)

    # State.

    def state(self) -> State:
        """Return the current state; its tensors are not copied."""
        return State(
            num_updates=self.num_updates,
            exchanges=self._averaging.exchanges,
            momentum=self.slow.momentum,
            initial=self.slow.initial,
            weight=self.push_sum.weight,
            is_numerator=self.push_sum.is_numerator,
        )

    def take_over(self, state: State) -> None:
        """Resume from `state`; its tensors may stay on the host until they are needed."""
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
        """Combine the replicas of all processes into one, without changing them.

        Communication: one all-reduce of parameters and buffers; an all-gather of anchor and
          velocity if they are sharded, otherwise they are part of the all-reduce.
        """
        collectives, push_sum, momentum = self.collectives, self.push_sum, self.slow.momentum
        slow = [] if self.slow.initial is None else [self.slow.initial]
        if momentum is not None and not self.slow.is_sharded:
            slow = [momentum.anchor, momentum.velocity]
        with own_graph(device):
            shares = collectives.shares([*push_sum.numerators(params), *slow, push_sum.weight])
            shares = collectives.only_masters(shares)
            sent = collectives.only_first(buffers, device)
            averaged = self.averaged(buffers)
            shares_of_all = collectives.shares_of_all(averaged, device)
            parts = dict(zip(map(id, averaged), shares_of_all, strict=True))
            sent = [parts.get(id(b), value) for b, value in zip(buffers, sent, strict=True)]
        with collectives.graph(device, Kind.CONSOLIDATION, [*shares, *sent]):
            *means, weight = collectives.total(shares)
            sent = collectives.total(sent)
            if momentum is not None and self.slow.is_sharded:
                slow = [collectives.gather(p) for p in (momentum.anchor, momentum.velocity)]
        with own_graph(device):
            slow = means[len(params) :] or slow
            if momentum is not None:
                # A copy: reading a view would launch a separate graph, in no fixed order.
                slow = [value[: momentum.span.total].clone() for value in slow]
            means = means[: len(params)]
            if push_sum.moves:
                means = [times(mean, 1 / weight) for mean in means]
            copies = [value.to(b.dtype) for b, value in zip(buffers, sent, strict=True)]
        names = ("initial",) if momentum is None else ("anchor", "velocity")
        return Whole(means, copies, dict(zip(names, slow, strict=False)))
