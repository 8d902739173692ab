"""The wrapper that brings the replicas of a module together by SlowMo."""

import warnings
from typing import Any, Literal

import torch
from torch.distributed.algorithms.join import Joinable

from ._backward import AfterBackward
from ._gossip import plan_gossip
from ._half import HALF, Masters, Parameters
from ._options import LOG, Options, SlowMoBaseAlgorithm, settle, show_log
from ._replica import Replica
from ._state import SavesReplica, consolidated
from .backends import Kind
from .interfaces import LikeDDP, NamesOfFairScale
from .slow_momentum import Groups


class SlowMoDistributedDataParallel(SavesReplica, NamesOfFairScale, LikeDDP):
    """Data parallelism with slow momentum over local SGD or stochastic gradient push.

    It has the constructor of FairScale's class of this name, and works for the processes of
    `torch.distributed` and for scripts under torch_xla's `xmp.spawn`. Every process holds a replica
    of `module` on its device and trains it with its own optimizer; `perform_slowmo(optimizer)`
    after `optimizer.step()` brings the replicas together:

    - LOCALSGD: every `localsgd_frequency` steps the parameters become their mean over nodes.
    - SGP: in every step a node sends its parameters to a few peers and mixes in those it receives.
    - slow momentum (on unless slowmo_lr is 1 and slowmo_momentum 0), every `slowmo_frequency`
      steps, gamma the learning rate of the optimizer group and D = anchor - parameters:
      m <- slowmo_momentum * m + D / gamma; anchor <- anchor - slowmo_lr * gamma * m; parameters =
      anchor. The anchor starts as the initial parameters, those of the first forward pass in
      training mode (`_init_global_momentum_buffers` takes the current ones instead).

    A node is a group of `nprocs_per_node` processes whose gradients are averaged after every
    backward pass (None if none of them has one, as in DDP with find_unused_parameters) and whose
    parameters stay equal. All processes must start from equal parameters, which the first forward
    pass in training mode checks, and make the same calls in the same order, including forward
    passes in training mode if there are buffers to broadcast. If their calls differ, all raise an
    error that names each process' call. In eval() mode a forward pass exchanges nothing, so that
    one process may evaluate alone, with its own buffers. The others wait for a late process, and
    log a warning after 30 s. `no_sync()` accumulates gradients and `join()` trains on uneven data,
    as in DistributedDataParallel.

    Args:
      module: module to train; it must be on its device before the first forward pass.
      nprocs_per_node: processes per node; a divisor of their number. Nodes consist of processes of
        one host if it has enough. With a single node the base algorithm is off.
      broadcast_buffers: True gives all processes rank 0's buffers before every forward pass in
        training mode, also under `torch.no_grad()`; a step of a small net with batch norm then
        takes 2.6 times as long, or more. "average", which is advised, replaces floating ones by
        their mean over all processes (variances too) every localsgd_frequency steps (not with SGP)
        and in slow steps. Integer buffers differ between processes, as all do between averages. SGP
        without slow momentum refuses "average". False exchanges none.
      slowmo_base_algorithm: a `SlowMoBaseAlgorithm` or its string.
      slowmo_momentum: factor of the slow momentum, in [0, 1).
      slowmo_memory_efficient: slow steps average exactly over all processes (the base algorithm is
        skipped in these steps), and anchor and momentum are sharded: 2N / processes of memory. If
        False they are kept whole, 2N, and slow steps start from the base algorithm's result.
      slowmo_frequency: steps from one slow step to the next.
      slowmo_lr: step size of the slow step.
      slowmo_num_shards: accepted, but shards are always over all processes; results are equal.
      localsgd_frequency: steps from one average to the next.
      graph: SGP's graph of all nodes: a `jaxslowmo.topology.Graph`, its name ("ring") or
        constructor, or an object with FairScale's `phone_book`. None is FairScale's default,
        `npeer_directed_exponential`.
      mixing: mixing with SGP: a callable `(graph, step) -> P[destination, source]` from
        `jaxslowmo.topology`; None is uniform.
      push_sum: False (PushPull) promises that P is doubly stochastic.
      overlap: not available.
      synch_freq: without effect.
      use_streams: without effect.
      slowmo_sgp_average_params: whether slow steps with SGP start from the exact mean over nodes.
      verbose: log what each step does, at level DEBUG of logger `torch_compat.slowmo`; to stderr
        if the program has set up no logging.
      profile_mode: without effect.
      process_rank: rank of this process, which must be that of the backend, or None.
      process_world_size: number of processes, which must be that of the backend, or None.
      global_group: a process group of `torch.distributed` with the processes of the run, None for
        all.
      master_group: without effect.
      local_node_group: the process group of this node, None to make one.
      comm_device: device on which `torch.distributed` exchanges tensors, None for that of the
        parameters. These last four are without effect over torch_xla.
      broadcast_parameters: give all processes rank 0's parameters and buffers before the first of
        these: a forward pass in training mode, `perform_slowmo`, `_init_global_momentum_buffers`.
      check_start: before the first forward pass in training mode compare the parameters of all
        processes, unless the run resumes from a `state_dict`. False if they are meant to differ.
      backend: "torch_xla" or "torch.distributed"; None takes torch_xla for a module on an XLA
        device, otherwise `torch.distributed` if its default process group is initialised, otherwise
        torch_xla.
      bound_momentum: whether slow momentum is bounded when a learning rate falls and grows again:
        the carried displacement is at most what the current rate would have made, as in
        `js.slowmo`. Every `perform_slowmo` reads the rates, and waits for one that is a tensor on
        an XLA device. False is FairScale's formula, which can diverge after a small rate.

    Attributes:
      num_updates: number of calls of `perform_slowmo` so far.
      ps_weight: (1,) float32, the push-sum weight w. After `perform_slowmo` the module holds the
        estimates x / w, not FairScale's numerators x; from a backward pass until then, and with
        float32 masters until the next forward pass, it holds x.
      old_params: (shard,) float32, this process' part of the anchor; None before there is one.
      global_momentum_buffer: (shard,) float32, its part of m; None before there is one.

    Raises:
      ValueError: invalid arguments (the text names argument, rule and value): numbers out of range,
        a node size that does not divide the world or would split hosts, a rank or world size that
        is not the backend's, overlap=True, an invalid graph or mixing, a module without parameters;
        in the first forward pass processes that start from different parameters.
      RuntimeError: neither torch_xla nor an initialised `torch.distributed`.
      UnlikeCallsError: in an exchange, with gloo and on CPU devices: processes have made different
        calls.
      PeerLostError: in an exchange, with gloo and on CPU devices: another process has ended.
      UserWarning: arguments without effect, a base algorithm that is off, frequencies that are not
        multiples, half precision without masters.

    Communication, N the bytes of the parameters, over XLA in a fixed number of separate graphs:
      local SGD: when due one all-reduce of N. SGP: per step one collective-permute of N
      (`torch.distributed`: an all-to-all in which each process sends N to one other) for each
      permutation of the round, and 4 bytes if weights can differ from 1; an all-reduce of N inside
      the nodes if they have several processes. Slow step: memory efficient one reduce-scatter and
      one all-gather of N, otherwise nothing (with SGP and slowmo_sgp_average_params one all-reduce
      of N). Gradients: one all-reduce of N inside the nodes per backward pass, with several
      processes per node. Buffers: one all-reduce of their bytes per forward pass in training mode;
      with "average" they are part of the all-reduce of the parameters if there is one, otherwise
      they need another one. Once: an all-gather of 16 bytes per process (check_start), an
      all-reduce of N (broadcast_parameters), an all-gather of the hosts (several processes per
      node). Steps in which nothing is due trace and send nothing. Over gloo each of these begins
      with a header of 32 bytes (kind, bytes, updates, wrapper) from every process that takes part
      to each other one: in the node for gradients, along the edges of the graph and in the node for
      SGP, else to all. It takes one network latency, no round trip.

    Source: Wang et al., "SlowMo", ICLR 2020 (arXiv:1910.00643), algorithm 1; Stich, "Local SGD
      Converges Fast and Communicates Little", ICLR 2019 (arXiv:1808.07217); Assran et al.,
      "Stochastic Gradient Push", ICML 2019 (arXiv:1811.10792); FairScale 0.4.13.

    Example:
      >>> net = SlowMoDistributedDataParallel(model.to(device), nprocs_per_node=1)
      >>> loss_fn(net(inputs), targets).backward()
      >>> optimizer.step()
      >>> net.zero_grad(set_to_none=True)
      >>> net.perform_slowmo(optimizer)
      >>> torch_xla.sync()  # over torch_xla
    """

    def __init__(
        self,
        module: torch.nn.Module,
        nprocs_per_node: int,
        broadcast_buffers: bool | Literal["average"] = True,
        slowmo_base_algorithm: SlowMoBaseAlgorithm = SlowMoBaseAlgorithm.LOCALSGD,
        slowmo_momentum: float = 0.5,
        slowmo_memory_efficient: bool = True,
        slowmo_frequency: int = 48,
        slowmo_lr: float = 1.0,
        slowmo_num_shards: int = 32,
        localsgd_frequency: int = 3,
        graph: Any = None,
        mixing: Any = None,
        push_sum: bool = True,
        overlap: bool = False,
        synch_freq: int = 0,
        use_streams: bool = True,
        slowmo_sgp_average_params: bool = False,
        verbose: bool = False,
        profile_mode: bool = False,
        process_rank: int | None = None,
        process_world_size: int | None = None,
        global_group: Any = None,
        master_group: Any = None,
        local_node_group: Any = None,
        comm_device: Any = None,
        *,
        broadcast_parameters: bool = False,
        check_start: bool = True,
        backend: str | None = None,
        bound_momentum: bool = True,
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        options = Options(
            module=module,
            nprocs_per_node=nprocs_per_node,
            broadcast_buffers=broadcast_buffers,
            slowmo_base_algorithm=slowmo_base_algorithm,
            slowmo_momentum=slowmo_momentum,
            slowmo_memory_efficient=slowmo_memory_efficient,
            slowmo_frequency=slowmo_frequency,
            slowmo_lr=slowmo_lr,
            slowmo_num_shards=slowmo_num_shards,
            localsgd_frequency=localsgd_frequency,
            overlap=overlap,
            synch_freq=synch_freq,
            use_streams=use_streams,
            profile_mode=profile_mode,
            process_rank=process_rank,
            process_world_size=process_world_size,
            global_group=global_group,
            master_group=master_group,
            local_node_group=local_node_group,
            comm_device=comm_device,
            backend=backend,
        )
        places, self._backend, base = settle(options)
        if verbose:
            show_log()
        self.module = module
        self.broadcast_buffers = broadcast_buffers
        self.process_rank = places.rank
        self.process_world_size = places.world_size
        self.nprocs_per_node = nprocs_per_node
        self.logical_rank = places.node
        self.logical_world_size = places.num_nodes
        self.slowmo = options.has_slow_momentum
        self.slowmo_lr = slowmo_lr
        self.slowmo_momentum = slowmo_momentum
        self.slowmo_memory_efficient = slowmo_memory_efficient
        self.slowmo_frequency = slowmo_frequency
        self.slowmo_num_shards = places.world_size if slowmo_memory_efficient else 1
        self.slowmo_sgp_average_params = slowmo_sgp_average_params
        self.localsgd_frequency = localsgd_frequency
        self.localsgd = base == SlowMoBaseAlgorithm.LOCALSGD
        self.sgp = base == SlowMoBaseAlgorithm.SGP

        num_nodes = places.num_nodes if self.sgp else 1
        plan = plan_gossip(graph, mixing, num_nodes, nprocs_per_node, push_sum=push_sum)
        self._replica = Replica(
            places,
            self._backend,
            plan,
            is_sgp=self.sgp,
            is_sharded=slowmo_memory_efficient,
            is_bounded=bound_momentum,
            averages_buffers=broadcast_buffers == "average",
        )
        self._after_backward = AfterBackward(self._finish_backward)
        self._must_broadcast, self._must_check = broadcast_parameters, check_start

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the module's output, computed from de-biased parameters.

        Communication: by default rank 0's buffers in training mode; see the class.
        """
        replica, device = self._replica, self._device()
        if self.training:
            self._open_round()
            if self._broadcasts_next:
                self._broadcast_buffers(device)
        params = list(self.module.parameters())
        if self.training and torch.is_grad_enabled():
            self._broadcasts_next = self._averages_gradients
            self._start(device)
            if self.slowmo:
                replica.slow.remember(params, device)
        replica.push_sum.make_estimates(params)
        output = self.module(*inputs, **kwargs)
        if (
            replica.waits_for_backward
            and torch.is_grad_enabled()
            and not self._after_backward.watch(output, device, averages=self._averages_gradients)
            and self.training
        ):
            warnings.warn(
                "SlowMoDistributedDataParallel: the output of the module holds no tensor that "
                "requires gradients, so nothing is done after a backward pass.",
                stacklevel=2,
            )
        return output

    def perform_slowmo(self, optimizer: torch.optim.Optimizer, fp32_params: Any = None) -> None:
        """Bring the replicas together; call it after every `optimizer.step()`, in all processes.

        Args:
          optimizer: optimizer of the parameters; slow momentum applies to those that it holds,
            which must be float32, at the current learning rates of their groups.
          fp32_params: the float32 masters of a half-precision module: one vector of all parameters
            in the module's order, a list with a tensor for each, or a dict with one such value.
            The exchange then runs in half precision; rounding errors are kept in the masters.

        Raises:
          ValueError: no optimizer, masters that do not fit, half-precision parameters under slow
            momentum, optimizer parameters other than those of the first call.
          UserWarning: half precision without masters; no anchor from a forward pass.

        Communication: see the class. Nothing is traced in steps in which nothing is due.
        """
        self._open_round()
        if self._join_config.enable and fp32_params is not None:
            raise ValueError(
                "`fp32_params` cannot be given inside of join(), since a process without data has "
                "no masters of this step; end the data of all processes at the same step."
            )
        replica, groups = self._replica, Groups(optimizer)
        self._remember(optimizer)
        tensors = list(self.module.parameters())
        masters = None if fp32_params is None else Masters(tensors, fp32_params)
        if self.num_updates == 0 and masters is None and any(p.dtype in HALF for p in tensors):
            warnings.warn(
                "Set `fp32_params` in perform_slowmo() for half-precision parameters; accuracy is "
                "lost without.",
                stacklevel=2,
            )
        params = Parameters(tensors, masters, self._device())
        self._start(params.device, may_check=False)  # parameters differ after local steps
        momentum = replica.slow.ready(groups, params) if self.slowmo else None

        update = self.num_updates + 1
        slow = momentum is not None and update % self.slowmo_frequency == 0
        exact = slow and self.slowmo_memory_efficient
        average = not exact and (
            (self.localsgd and update % self.localsgd_frequency == 0)
            or (self.sgp and slow and self.slowmo_sgp_average_params)
        )
        gossip = self.sgp and self.training and not exact and not average
        also_buffers = slow or not (self.sgp or update % self.localsgd_frequency)
        buffers = replica.averaged(self.module.buffers()) if also_buffers else []
        if replica.collectives.absent:
            replica.announce_step(params.device)
            if average or gossip or slow or buffers:
                replica.share_in_node(tensors, params.device, buffers)
        if average:
            replica.average(params, buffers)
        else:
            replica.average_buffers(buffers, params.device)
        if gossip:
            replica.exchange(params)
        if momentum is not None and slow:
            with replica.rates_of_those_with_data(optimizer, momentum):
                replica.slow.step(momentum, groups, params, self.slowmo_momentum, self.slowmo_lr)
        LOG.debug(
            "rank %d, step %d: average %r, gossip %r, slow step %r",
            *(self.process_rank, self.num_updates, average, gossip, slow),
        )
        self.num_updates = update
        self._is_round_open = False

    def consolidated_state_dict(self) -> dict[str, Any]:
        """Return one state for all, which loads on any rank of any number of processes.

        Parameters are the mean over nodes (sum x / sum w), buffers rank 0's (with "average" their
        mean), anchor and momentum whole (not memory efficient: their mean over nodes). Call it in
        all processes; it changes nothing. Loaded right after a slow or averaging step it continues
        as if undisturbed, up to rounding; elsewhere the differences between replicas are lost.

        Returns:
          A dict like that of `state_dict()`, on the host, equal in all processes.

        Communication: one all-reduce of parameters and buffers; memory efficient one all-gather of
          8 bytes per parameter, otherwise one all-reduce of that.
        """
        self._open_round()
        params = [p for p in self.module.parameters() if p.is_floating_point()]
        buffers = list(self.module.buffers())
        whole = self._replica.whole(params, buffers, self._device())
        state = consolidated(self.state_dict(keep_vars=True), params, buffers, whole)
        return {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in state.items()}

    def _init_global_momentum_buffers(self, optimizer: torch.optim.Optimizer) -> None:
        """Anchor slow momentum at the current parameters, each process its own part.

        Without this call the anchor starts as the initial parameters.

        Raises:
          ValueError: parameters in half precision.
        """
        self._remember(optimizer)
        if self.slowmo:
            device = self._device()
            self._open_round()
            self._start(device)
            self._replica.slow.anchor_now(Groups(optimizer), device)

    def _device(self) -> torch.device:
        """Return the device of this process, on which all parameters must be."""
        device = self._backend.device_of(self.module)
        self._replica.push_sum.to(device)
        return device

    def _broadcast_buffers(self, device: torch.device) -> None:
        """Overwrite buffers with those of rank 0, if `broadcast_buffers` is True."""
        if self.broadcast_buffers is True:
            self._replica.broadcast([b for b in self.module.buffers() if b.numel()], device)

    def _start(self, device: torch.device, *, may_check: bool = True) -> None:
        """Make the parameters of all processes equal, or check that they are, once."""
        if self._must_broadcast:
            everything = (*self.module.parameters(), *self.module.buffers())
            tensors = [tensor for tensor in everything if tensor.numel()]
            self._replica.broadcast(tensors, device, Kind.PARAMETERS)
        if self._must_check and may_check:
            if self._backend.may_read():
                self._replica.check_start(dict(self.module.named_parameters()), device)
            else:
                warnings.warn("check_start: values cannot be read in this graph.", stacklevel=3)
        self._must_broadcast = self._must_check = False

    def _finish_backward(self, device: torch.device, averages: bool) -> None:
        params = list(self.module.parameters())
        self._replica.after_backward(params, device, averages=averages)
