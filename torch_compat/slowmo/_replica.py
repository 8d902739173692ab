"""The state of one process' replica, and the operations on its module."""

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from ._collectives import Collectives, average_gradients
from ._flat import times
from ._gossip import Averaging, GossipPlan, PushSum
from ._graphs import own_graph
from ._parameters import Groups, may_change
from ._places import Places
from ._slow_momentum import SlowMomentum, SlowSteps
from ._start import check_equal
from .backends import Backend, Kind


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
      averages_buffers: whether floating buffers become their mean instead of rank 0's.

    Attributes:
      places: the place of this process.
      collectives: the collectives between this process and the others.
      push_sum: the push-sum weight, and whether the module holds numerators.
      averaging: averages of parameters with others.
      slow: slow momentum.
      names: names of the parameters that are exchanged.
    """

    def __init__(
        self,
        places: Places,
        backend: Backend,
        plan: GossipPlan,
        *,
        is_sgp: bool,
        is_sharded: bool,
        averages_buffers: bool,
    ) -> None:
        self.places = places
        self.collectives = Collectives(places, backend)
        self.push_sum = PushSum(is_sgp, plan.weight_moves)
        self.averaging = Averaging(self.collectives, plan, self.push_sum)
        self.slow = SlowSteps(self.collectives, self.push_sum, is_sharded=is_sharded)
        self._averages_buffers = averages_buffers
        self.names: frozenset[str] = frozenset()
        self._compared: frozenset[str] | None = None

    # Before and after the module.

    def exchanged_params(
        self, named: Mapping[str, torch.nn.Parameter], *, notices: bool = True
    ) -> dict[str, torch.nn.Parameter]:
        """Return those of the module's parameters that are exchanged, by name, in their order.

        They are those that an optimizer may have changed since the replicas last took an exact
        mean, as they required a gradient or had one. With `notices`, which all processes must use
        alike, those that require one now are added.
        """
        before = self.names
        if notices:
            new = {n: p for n, p in named.items() if may_change(p) and n not in before}
            self.push_sum.follow([*new.values()])
            self.names = before.union(new)
        return {name: param for name, param in named.items() if name in self.names}

    def forget(self, names: Collection[str]) -> None:
        """Exchange these again only if they may change: replicas took an exact mean."""
        self.names -= set(names)

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
        names = self.names
        is_new = self.collectives.num_updates == 0 and self.averaging.exchanges == 0
        if self.places.world_size > 1 and (must or values or names != self._compared):
            params = dict(module.named_parameters())
            values = values and is_new
            check_equal(params, names, self.collectives, device, values=values)
        self._compared = names

    @property
    def waits_for_backward(self) -> bool:
        """True if anything is done after a backward pass."""
        return self.places.nprocs_per_node > 1 or self.push_sum.moves

    # For a join context, in which some processes have no more data.

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
                sent = self.collectives.only_of(self.collectives.first_of_node, tensors, device)
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
                states = self.collectives.backend.from_rank_of_node(
                    [state["state"] for state in local], self.collectives.first_of_node
                )
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
        sent = self.collectives.only_of(self.collectives.first, [both], host)
        with self.collectives.graph(host, Kind.RATES, sent):
            current, since = self.collectives.total(sent)[0].tolist()
        if self.places.rank not in self.collectives.absent:
            return rates
        momentum.rates.since = since
        return current

    # The parts of a step.

    def averaged_buffers(self, buffers: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the `buffers` that are averaged; the others keep this process' values."""
        if not self._averages_buffers:
            return []
        return [b for b in buffers if is_continuous(b) and b.numel()]

    # State.

    def whole(
        self,
        params: Mapping[str, torch.Tensor],
        buffers: Sequence[torch.Tensor],
        device: torch.device,
    ) -> tuple[dict[str, torch.Tensor], list[torch.Tensor], dict[str, torch.Tensor]]:
        """Combine the replicas of all processes into one, without changing them.

        Returns:
          Equal values on every process. The means of `params` over nodes, sum x / sum w, by name.
            The buffers of rank 0, or their means over processes. Whole "anchor" and "velocity",
            and "initial.<name>" for parameters that have no anchor yet; if slow momentum is not
            sharded they are means over nodes.

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
            sent = collectives.only_of(collectives.first, buffers, device)
            averaged = self.averaged_buffers(buffers)
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
        return dict(zip(params, means, strict=True)), copies, of_slow


def is_continuous(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds floating or complex numbers."""
    return tensor.is_floating_point() or tensor.is_complex()
