"""The state of one process' replica, and the operations on its module."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ._collectives import Collectives, average_buffers, average_gradients, broadcast
from ._flat import times
from ._gossip import Gossip, GossipPlan
from ._graphs import own_graph
from ._half import may_change
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
      initial: the first values of parameters that have no anchor yet, float32 vectors by name.
      exchanged: names of the parameters that are exchanged; None in FairScale's dicts, whose
        wrapper exchanges all.
      weight: (1,) float32, the push-sum weight.
      is_numerator: whether the module's parameters are x rather than x / w.
    """

    num_updates: int
    exchanges: int
    momentum: SlowMomentum | None
    initial: dict[str, torch.Tensor]
    exchanged: frozenset[str] | None
    weight: torch.Tensor
    is_numerator: bool


@dataclass(frozen=True)
class Whole:
    """The replicas of all processes, combined into one; equal on every process.

    Attributes:
      params: their mean over nodes, sum x / sum w; only those that are exchanged, by name.
      buffers: rank 0's, or their mean over processes.
      slow: whole "anchor" and "velocity", and "initial.<name>" for parameters that have no anchor
        yet. If slow momentum is not sharded they are means over nodes.
    """

    params: dict[str, torch.Tensor]
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
      averaging: averages of parameters with others.
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
        self.averaging = Averaging(self.collectives, gossip, self.push_sum)
        self.slow = SlowSteps(
            self.collectives, self.push_sum, is_sharded=is_sharded, is_bounded=is_bounded
        )
        self._averages_buffers = averages_buffers
        self._exchanged: frozenset[str] = frozenset()
        self._compared: frozenset[str] | None = None

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

    def exchanged(
        self, named: Mapping[str, torch.nn.Parameter], *, notices: bool = True
    ) -> dict[str, torch.nn.Parameter]:
        """Return those of the module's parameters that are exchanged, by name, in their order.

        They are those that an optimizer may have changed since the replicas last took an exact
        mean, as they required a gradient or had one. With `notices`, which all processes must use
        alike, those that require one now are added.
        """
        before = self._exchanged
        if notices:
            new = {n: p for n, p in named.items() if may_change(p) and n not in before}
            self.push_sum.follow([*new.values()])
            self._exchanged = before.union(new)
        return {name: param for name, param in named.items() if name in self._exchanged}

    def forget(self, names: Collection[str]) -> None:
        """Exchange these again only if they may change: replicas took an exact mean."""
        self._exchanged -= set(names)

    def compare(
        self, module: torch.nn.Module, device: torch.device, *, values: bool, must: bool = False
    ) -> None:
        """Call `check_equal` if other parameters are exchanged than at the last call.

        Args:
          module: the module.
          device: the device of this process.
          values: whether to compare values, too; not in a resumed run, where replicas may differ.
          must: whether to compare in any case, as other processes do.

        Communication: one all-gather of 16 bytes per process.
        """
        names = self._exchanged
        is_new = self.num_updates == 0 and self.averaging.exchanges == 0
        if self.places.world_size > 1 and (must or values or names != self._compared):
            params = dict(module.named_parameters())
            values = values and is_new
            check_equal(params, names, self.collectives, device, values=values)
        self._compared = names

    @property
    def waits_for_backward(self) -> bool:
        """True if anything is done after a backward pass."""
        return self.places.nprocs_per_node > 1 or self.push_sum.moves

    def average_gradients(self, params: Iterable[torch.nn.Parameter], device: torch.device) -> None:
        """Average gradients over the node.

        Communication: one all-reduce inside the nodes, where they have several processes.
        """
        if self.places.nprocs_per_node > 1:
            average_gradients(params, self.collectives, device)

    # For a join context, in which some processes have no more data.

    def announce_step(self, device: torch.device) -> None:
        """Notify processes without data that `perform_slowmo` begins.

        Communication: a header.
        """
        with self.collectives.graph(device, Kind.STEP, []):
            pass

    def add_no_gradients(self, params: Sequence[torch.nn.Parameter], device: torch.device) -> None:
        """Take part in `average_gradients` of others in the node; gradients here stay as they are.

        Communication: that of `average_gradients`.
        """
        grads = [param.grad for param in params]
        for param in params:
            param.grad = None
        average_gradients(params, self.collectives, device)
        for param, grad in zip(params, grads, strict=True):
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

    def share_optimizers_in_node(
        self, optimizers: Sequence[torch.optim.Optimizer], device: torch.device
    ) -> None:
        """Load the optimizers' state of the node's process that had data for longest.

        Communication: one broadcast inside the nodes, where they have several processes.
        """
        if self.places.nprocs_per_node > 1:
            local = [optimizer.state_dict() for optimizer in optimizers]
            with self.collectives.graph(device, Kind.OPTIMIZER, []):
                states = self.collectives.of_first_of_node([state["state"] for state in local])
            for optimizer, own, state in zip(optimizers, local, states, strict=False):
                optimizer.load_state_dict({**own, "state": state})

    def rates(self, groups: Groups, momentum: SlowMomentum, device: torch.device) -> list[float]:
        """Return the learning rate of each parameter in slow momentum, of a process with data.

        `momentum` takes that process' learning rates of the updates since the last slow step.

        Communication: one all-reduce of 16 bytes per parameter; nothing while all have data.
        """
        rates = groups.rates(device)
        if not self.collectives.absent:
            return rates
        host = torch.device("cpu")
        both = torch.tensor([rates, momentum.rates.since], dtype=torch.float64)
        sent = self.collectives.only_first([both], host)
        with self.collectives.graph(host, Kind.RATES, sent):
            current, since = self.collectives.total(sent)[0].tolist()
        if self.places.rank not in self.collectives.absent:
            return rates
        momentum.rates.since = since
        return current

    # The parts of a step.

    def averaged(self, buffers: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the `buffers` that are averaged; the others keep this process' values."""
        if not self._averages_buffers:
            return []
        return [b for b in buffers if _is_continuous(b) and b.numel()]

    def average_buffers(self, buffers: Sequence[torch.Tensor], device: torch.device) -> None:
        """Average floating `buffers` in a step whose average of parameters does not include them.

        Communication: one all-reduce of their bytes; nothing without any.
        """
        if buffers and self.places.world_size > 1:
            average_buffers(buffers, self.collectives, device)

    # State.

    def state(self) -> State:
        """Return the current state; its tensors are not copied."""
        return State(
            num_updates=self.num_updates,
            exchanges=self.averaging.exchanges,
            momentum=self.slow.momentum,
            initial=self.slow.initial,
            exchanged=self._exchanged,
            weight=self.push_sum.weight,
            is_numerator=self.push_sum.is_numerator,
        )

    def take_over(self, state: State, module: torch.nn.Module) -> None:
        """Resume from `state`; its tensors may stay on the host until they are needed."""
        self.num_updates = state.num_updates
        self.averaging.exchanges = state.exchanges
        named, names = module.named_parameters(), state.exchanged
        self._exchanged = frozenset(
            n for n, p in named if (_is_continuous(p) if names is None else n in names)
        )
        self.slow.resume(state.momentum, state.initial)
        if self.push_sum.is_on:
            self.push_sum.weight = state.weight
            self.push_sum.is_numerator = state.is_numerator

    def whole(
        self,
        params: Mapping[str, torch.Tensor],
        buffers: Sequence[torch.Tensor],
        device: torch.device,
    ) -> Whole:
        """Combine the replicas of all processes into one, without changing them.

        Communication: one all-reduce of parameters and buffers; an all-gather of anchor and
          velocity if they are sharded, otherwise they are part of the all-reduce.
        """
        collectives, push_sum, momentum = self.collectives, self.push_sum, self.slow.momentum
        slow = {f"initial.{name}": value for name, value in self.slow.initial.items()}
        if momentum is not None and not self.slow.is_sharded:
            slow |= {"anchor": momentum.anchor, "velocity": momentum.velocity}
        with own_graph(device):
            tensors = [*push_sum.numerators([*params.values()]), *slow.values(), push_sum.weight]
            shares = collectives.only_masters(collectives.shares(tensors))
            sent = collectives.only_first(buffers, device)
            averaged = self.averaged(buffers)
            shares_of_all = collectives.shares_of_all(averaged, device)
            parts = dict(zip(map(id, averaged), shares_of_all, strict=True))
            sent = [parts.get(id(b), value) for b, value in zip(buffers, sent, strict=True)]
        gathered: list[torch.Tensor] = []
        with collectives.graph(device, Kind.CONSOLIDATION, [*shares, *sent]):
            *sums, weight = collectives.total(shares)
            sent = collectives.total(sent)
            if momentum is not None and self.slow.is_sharded:
                gathered = [collectives.gather(p) for p in (momentum.anchor, momentum.velocity)]
        with own_graph(device):
            means, of_slow = sums[: len(params)], dict(zip(slow, sums[len(params) :], strict=True))
            of_slow |= dict(zip(("anchor", "velocity"), gathered, strict=False))
            if momentum is not None:
                for name in ("anchor", "velocity"):
                    # A copy: reading a view would launch a separate graph, in no fixed order.
                    of_slow[name] = of_slow[name][: momentum.span.total].clone()
            if push_sum.moves:
                means = [times(mean, 1 / weight) for mean in means]
            copies = [value.to(b.dtype) for b, value in zip(buffers, sent, strict=True)]
        return Whole(dict(zip(params, means, strict=True)), copies, of_slow)


def _is_continuous(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
