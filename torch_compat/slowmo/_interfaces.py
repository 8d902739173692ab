"""Interfaces of other classes on the wrapper: FairScale's attributes, DDP's context managers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from ._replica import Replica
from .backends import Backend, Kind


class NamesOfFairScale(torch.nn.Module):
    """The attributes of FairScale's class, read from the wrapper's replica."""

    _replica: Replica

    @property
    def gossip_enable(self) -> bool:
        """True in training mode: only then SGP exchanges."""
        return self.training

    @property
    def num_updates(self) -> int:
        """The number of calls of `perform_slowmo` so far."""
        return self._replica.collectives.num_updates

    @num_updates.setter
    def num_updates(self, number: int) -> None:
        self._replica.collectives.num_updates = number

    @property
    def ps_weight(self) -> torch.Tensor:
        """The push-sum weight w, (1,) float32."""
        return self._replica.push_sum.weight

    @ps_weight.setter
    def ps_weight(self, weight: torch.Tensor) -> None:
        self._replica.push_sum.weight = weight

    @property
    def is_sgp_ps_numerator(self) -> bool:
        """True if the module holds x rather than x / w."""
        return self._replica.push_sum.is_numerator

    @property
    def global_momentum_buffers_initialized(self) -> bool:
        """True if there is an anchor."""
        return self._replica.slow.momentum is not None

    @property
    def old_params(self) -> torch.Tensor | None:
        """This process' part of the anchor, (shard,) float32."""
        momentum = self._replica.slow.momentum
        return None if momentum is None else momentum.anchor

    @property
    def global_momentum_buffer(self) -> torch.Tensor | None:
        """This process' part of m, (shard,) float32; v where the learning rate was 0."""
        momentum = self._replica.slow.momentum
        return None if momentum is None else momentum.momentum_buffer()


if TYPE_CHECKING:
    from ._replica import Replica


# The optimizers of the last call, by wrapper; a process that shadows `perform_slowmo` needs them.
# They are no attribute, so that copies and pickles of a wrapper do not contain them.
_OPTIMIZERS: WeakKeyDictionary["LikeDDP", "list[ref[torch.optim.Optimizer]]"] = WeakKeyDictionary()


class LikeDDP(Joinable):
    """The context managers of DistributedDataParallel for the wrapper.

    In a join context a round is the calls from one end of `perform_slowmo` to the next. At its
    begin all exchange which processes still have data. A process without data then shadows the
    others: it reads the header of their next exchange, and takes part in it.
    """

    _replica: "Replica"
    _backend: Backend
    # Whether backward passes through the outputs of current forward passes average gradients.
    _averages_gradients = True
    # Whether the next forward pass in training mode broadcasts buffers.
    _broadcasts_next = True
    _is_round_open = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients in each process within the block, as in DistributedDataParallel.

        Backward passes through outputs of forward passes inside of the context do not average
        gradients in the node. The first one through an output of a forward pass after the context
        averages the accumulated gradients. As in DistributedDataParallel, a forward pass that
        follows one inside of the context broadcasts no buffers.
        """
        previous, self._averages_gradients = self._averages_gradients, False
        try:
            yield
        finally:
            self._averages_gradients = previous

    @contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Run the block on data of which some processes have less, as in DistributedDataParallel.

        A process that leaves its loop waits at the end of the context, and takes part in all
        exchanges of the others until they have left theirs. Then all hold the buffers of a process
        that had data to the end (with broadcast_buffers=True), and the processes of a node hold the
        same parameters and optimizer state; learning rates and schedulers stay where each process
        left them. All processes must enter the context.

        Args:
          divide_by_initial_world_size: if True, a process without data counts as one whose
            gradients are 0 in the average of its node, and the parameters of a node without data
            count as they are. If False, averages are over processes with data; not with SGP.
          enable: if False, the context has no effect, for data known to be even.
          throw_on_early_termination: whether all processes raise a `RuntimeError` when the first
            one has no more data.

        Raises:
          ValueError: the backend is torch_xla or nccl; `divide_by_initial_world_size=False` with
            SGP; `fp32_params` in `perform_slowmo` inside of the context; a process without data
            that has never had an optimizer, which slow momentum and nodes of several processes
            need.

        Communication: per call of `perform_slowmo` one all-reduce of 4 bytes and a header. As long
          as some have no more data: headers to all processes; another header per call of
          `perform_slowmo`; one all-reduce of N inside the nodes before an exchange of parameters,
          with several processes per node; one of 16 bytes per parameter before a slow step.
          At the end one all-reduce of the buffers (with broadcast_buffers=True), and inside the
          nodes one of N and a broadcast of the optimizer's state.
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
        """Return the hook that `torch.distributed.algorithms.Join` calls in a process without data.

        In `Join([net, ...])` each process must call `perform_slowmo` after its last forward pass,
        and the joinables must exchange in the order of the list, one after the other.
        """
        divides_by_all = kwargs.get("divide_by_initial_world_size", True)
        if not divides_by_all and self._replica.push_sum.is_on:
            raise ValueError(
                "join(divide_by_initial_world_size=False) is not available with SGP, in which "
                "all nodes must take part; leave it True."
            )
        self._replica.collectives.averages_over_all = divides_by_all
        return _Shadow(self)

    @property
    def join_device(self) -> torch.device:
        """The device on which the join context exchanges its own data."""
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        """The processes of the run."""
        group = self._backend.join_group()
        if group is None:
            raise ValueError(
                f"join() is available over gloo alone, not {self._backend.name}: give all "
                "processes the same number of batches, as DistributedSampler does."
            )
        return group

    def _remember(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        _OPTIMIZERS[self] = [ref(optimizer) for optimizer in optimizers]

    def _open_round(self) -> None:
        """Exchange which processes have data, once per round of a join context."""
        if not self._join_config.enable or self._is_round_open:
            return
        work = Join.notify_join_context(self)
        if work is not None:
            self._backend.wait_for(work)
        self._is_round_open = True
        self._replica.collectives.open_round(has_data=True, can_step=True)

    def _end_round(self) -> None:
        """End a round without perform_slowmo for processes that shadow this one."""
        if self._is_round_open and self._replica.collectives.absent:
            with self._replica.collectives.graph(torch.device("cpu"), Kind.ROUND_ENDS, []):
                pass
        self._is_round_open = False

    def _leave_join_context(self) -> None:
        self._is_round_open = False
        self._join_config = self._join_config._replace(enable=False)
        self._replica.collectives.forget_absent()


class _Shadow(JoinHook):
    """The calls that a process without data makes to match those of the others.

    Args:
      net: the wrapper.
    """

    def __init__(self, net: Any) -> None:
        self._net = net

    def main_hook(self) -> None:
        """Take part in one round of the processes with data."""
        net = self._net
        net._is_round_open = True
        optimizers = self._optimizers()
        if not optimizers and not net.slowmo and net.nprocs_per_node == 1:
            # Averages need no optimizer; this one takes no steps.
            optimizers = [torch.optim.SGD(net.module.parameters(), lr=0.0)]
        collectives = net._replica.collectives
        collectives.open_round(has_data=False, can_step=bool(optimizers))
        while net._is_round_open:
            kind, device = collectives.hear(), net._device()
            if kind == Kind.STEP:
                net.perform_slowmo(optimizers, others=net._others)
            elif kind == Kind.ROUND_ENDS:
                net._end_round()
            elif kind == Kind.BUFFERS:
                net._broadcast_buffers(device)
            elif kind == Kind.GRADIENTS:
                net._replica.add_no_gradients([*net._exchanged_params().values()], device)
            elif kind == Kind.CONSOLIDATION:
                net.consolidated_state_dict()
            else:
                net._exchanged_params()  # as others do before they come here
                net._start(device, must=True)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Make state equal that the last rounds left unequal, when all have left their loops."""
        del is_last_joiner  # `absent` says which processes had data in the last round
        net = self._net
        if net._replica.collectives.absent:
            device = net._device()
            params = [*net._exchanged_params().values()]
            net._replica.share_in_node(params, device)
            net._replica.push_sum.make_estimates(params)
            net._replica.share_optimizers_in_node(self._optimizers(), device)
            net._broadcast_buffers(device)
        net._leave_join_context()

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        alive = (reference() for reference in _OPTIMIZERS.get(self._net, []))
        return [optimizer for optimizer in alive if optimizer is not None]
