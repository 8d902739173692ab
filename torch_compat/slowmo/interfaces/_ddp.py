"""What torch's DistributedDataParallel offers beside the module: `no_sync` and `join`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from ..backends import Backend, Kind

if TYPE_CHECKING:
    from .._replica import Replica


# By wrapper, that of the last call; who shadows `perform_slowmo` needs it. Copies and pickles of a
# wrapper do without.
_OPTIMIZERS: WeakKeyDictionary["LikeDDP", "ref[torch.optim.Optimizer]"] = WeakKeyDictionary()


class LikeDDP(Joinable):
    """The context managers of DistributedDataParallel.

    In a join context the calls between two ends of `perform_slowmo` are a round. It begins with the
    news who still has data, and who has not shadows what the headers of the others announce.
    """

    _replica: "Replica"
    _backend: Backend
    # Whether backward passes through the outputs of forward passes of this moment average.
    _averages_gradients = True
    # Whether the next forward pass in training mode broadcasts buffers.
    _broadcasts_next = True
    _is_round_open = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients in each process, as DistributedDataParallel's does.

        Backward passes through outputs of forward passes inside of the context do not average
        gradients in the node. The first one through an output of a forward pass after the context
        averages what has accumulated. As with DistributedDataParallel a forward pass that comes
        after one inside of the context broadcasts no buffers.
        """
        before, self._averages_gradients = self._averages_gradients, False
        try:
            yield
        finally:
            self._averages_gradients = before

    @contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Train on data of which some processes have less, as DistributedDataParallel's does.

        A process that leaves its loop waits at the end of the context, and takes part in whatever
        the others still exchange, until all have left theirs. Then all hold the buffers of a
        process that had data to the end (with broadcast_buffers=True), and the processes of each
        node the same parameters and the same state of the optimizer; learning rates and schedulers
        stay where each process left them. All processes must enter the context.

        Args:
          divide_by_initial_world_size: True: a process that has no more data counts as one whose
            gradients are 0. It counts in the average of gradients in its node, and the parameters
            of a node without data count as they are. False: averages are over those that have data;
            not with SGP.
          enable: False: without effect, for data known to be even.
          throw_on_early_termination: raise a `RuntimeError` in all processes when the first one
            has no more data.

        Raises:
          ValueError: over torch_xla or nccl; `divide_by_initial_world_size=False` with SGP; in
            `perform_slowmo` inside of the context: `fp32_params`; a process without data that has
            never had an optimizer, which slow momentum and nodes of several processes need.

        Communication: per call of `perform_slowmo` one all-reduce of 4 bytes and a header. As long
          as some have no more data: headers go to all; another header per call of `perform_slowmo`;
          before an exchange of parameters one all-reduce of N inside the nodes, where they have
          several processes, before a slow step one of 16 bytes per optimizer group. At the end one
          all-reduce of the buffers (with broadcast_buffers=True), and inside the nodes one of N and
          a broadcast of the optimizer's state.
        """
        if not enable:
            yield
            return
        context = Join(
            [self],
            throw_on_early_termination=throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )
        try:
            with context:
                yield
                self._end_round()
        finally:
            self._leave_join_context()

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What `torch.distributed.algorithms.Join` calls in a process without data.

        In `Join([net, ...])` each process must call `perform_slowmo` after its last forward pass,
        and the joinables must exchange in the order of the list, one after the other.
        """
        divides_by_all = kwargs.get("divide_by_initial_world_size", True)
        if not divides_by_all and self._replica.push_sum.is_on:
            raise ValueError(
                "join(divide_by_initial_world_size=False) is not available with SGP, where each "
                "node mixes with a few others that must all take part; leave it True."
            )
        self._backend.join_group()  # refuses what cannot shadow
        self._replica.collectives.averages_over_all = divides_by_all
        return _Shadow(self)

    @property
    def join_device(self) -> torch.device:
        """Where the join context exchanges what it needs."""
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        """The processes of the run."""
        return self._backend.join_group()

    def _remember(self, optimizer: torch.optim.Optimizer) -> None:
        _OPTIMIZERS[self] = ref(optimizer)

    def _open_round(self) -> None:
        """In a join context, once per round: say that this process has data, hear who has not."""
        if not self._join_config.enable or self._is_round_open:
            return
        work = Join.notify_join_context(self)
        if work is not None:
            self._backend.wait_for(work)
        self._is_round_open = True
        self._replica.collectives.open_round(has_data=True, can_step=True)

    def _end_round(self) -> None:
        """Release those who shadow this process from a round that ends without perform_slowmo."""
        if self._is_round_open and self._replica.collectives.absent:
            with self._replica.collectives.graph(torch.device("cpu"), Kind.ROUND_ENDS, []):
                pass
        self._is_round_open = False

    def _leave_join_context(self) -> None:
        self._is_round_open = False
        self._join_config = self._join_config._replace(enable=False)
        self._replica.collectives.forget_absent()


class _Shadow(JoinHook):
    """What a process does that has no more data.

    Args:
      net: the wrapper.
    """

    def __init__(self, net: Any) -> None:
        self._net = net

    def main_hook(self) -> None:
        """Take part in one round of those who have data."""
        net = self._net
        net._is_round_open = True
        optimizer = self._optimizer()
        if optimizer is None and not net.slowmo and net.nprocs_per_node == 1:
            # Averages need none; it is never stepped.
            optimizer = torch.optim.SGD(net.module.parameters(), lr=0.0)
        collectives = net._replica.collectives
        collectives.open_round(has_data=False, can_step=optimizer is not None)
        while net._is_round_open:
            kind, device = collectives.hear(), net._device()
            if kind == Kind.STEP:
                net.perform_slowmo(optimizer)
            elif kind == Kind.ROUND_ENDS:
                net._end_round()
            elif kind == Kind.BUFFERS:
                net._broadcast_buffers(device)
            elif kind == Kind.GRADIENTS:
                net._replica.add_no_gradients(list(net.module.parameters()), device)
            elif kind == Kind.CONSOLIDATION:
                net.consolidated_state_dict()
            else:
                net._start(device)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Make equal what the last rounds have left unequal; all have left their loops."""
        del is_last_joiner  # who had data in the last round is known
        net = self._net
        if net._replica.collectives.absent:
            device = net._device()
            params = list(net.module.parameters())
            net._replica.share_in_node(params, device)
            net._replica.push_sum.make_estimates(params)
            net._replica.share_optimizer_in_node(self._optimizer(), device)
            net._broadcast_buffers(device)
        net._leave_join_context()

    def _optimizer(self) -> torch.optim.Optimizer | None:
        reference = _OPTIMIZERS.get(self._net)
        return None if reference is None else reference()
