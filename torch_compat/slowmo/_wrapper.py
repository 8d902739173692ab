"""The wrapper that brings the replicas of a module together by SlowMo."""

import inspect
import warnings
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal, TypeVar, cast

import torch
from torch.distributed.algorithms.join import Joinable

from ._backward import BackwardHooks
from ._collectives import average_buffers, average_gradients, broadcast
from ._gossip import plan_gossip
from ._interfaces import LikeDDP, NamesOfFairScale
from ._options import LOG, SlowMoBaseAlgorithm, has_slow_momentum, settle, show_log
from ._parameters import HALF, Groups, Masters, Parameters, may_change
from ._replica import Replica
from ._state import SavesReplica, consolidate
from ._steps import Steps
from .backends import Kind

_Method = TypeVar("_Method", bound=Callable[..., Any])
# By module; hooks hold no wrapper, so that modules can be copied and pickled.
_WRAPPERS: weakref.WeakKeyDictionary[torch.nn.Module, Any] = weakref.WeakKeyDictionary()


def _note_load(part: torch.nn.Module, keys: Any) -> None:
    """Note that weights were loaded into a part of a module, other than by its wrapper."""
    del keys
    wrapper = _WRAPPERS[part]() if part in _WRAPPERS else None
    if wrapper is not None:
        wrapper._replica.slow.is_loaded = part is not wrapper  # whose own loading comes last


def _not_compiled(method: _Method) -> _Method:
    """Keep torch.compile from tracing a method that exchanges data or sets hooks."""
    return cast("_Method", torch.compiler.disable(method))


class SlowMoDistributedDataParallel(SavesReplica, NamesOfFairScale, LikeDDP):
    """Data parallelism with slow momentum over local SGD or stochastic gradient push.

    It has the constructor of FairScale's class of this name, and works for the processes of
    `torch.distributed` and for scripts under torch_xla's `xmp.spawn`. Every process holds a replica
    of `module` on its device and trains it with its own optimizer; `perform_slowmo(optimizer)`
    after `optimizer.step()` brings the replicas together, in all parameters that require a
    gradient:

    - LOCALSGD: every `localsgd_frequency` steps the parameters become their mean over nodes.
    - SGP: in every step a node sends its parameters to a few peers and mixes in those it receives.
    - slow momentum (on unless slowmo_lr is 1 and slowmo_momentum 0), every `slowmo_frequency`
      steps, gamma the learning rate of the optimizer group and D = anchor - parameters:
      m <- slowmo_momentum * m + D / gamma; anchor <- anchor - slowmo_lr * gamma * m; parameters =
      anchor. The anchor starts as the initial parameters, those of the first forward pass in
      training mode (`_init_global_momentum_buffers` takes the current ones instead).

    A node is a group of `nprocs_per_node` processes whose gradients are averaged after every
    backward pass that reaches a parameter (None if none of them has one, as in DDP with
    find_unused_parameters) and whose parameters stay equal. All processes must start from equal
    parameters, which the first forward pass in training mode checks, and make the same calls in the
    same order, including forward passes in training mode if there are buffers to broadcast. If
    their calls differ, all raise an error that names each process' call. In eval() mode forward
    passes, and backward passes through them, exchange nothing, so that one process may evaluate
    alone, with its own buffers. The others wait for a late process, and log a warning after 30 s.
    `no_sync()` accumulates gradients and `join()` trains on uneven data, as in
    DistributedDataParallel.

    Parameters are known by their names in the module, so optimizers may hold them in any order. A
    parameter that does not require a gradient is compared once and then neither sent nor written.
    Frozen later, it leaves slow momentum, and is sent until the next exact mean (an average of
    LOCALSGD or a memory-efficient slow step; with SGP and neither for ever) after its gradient is
    None. One that is unfrozen is sent from then on, and slow momentum starts at its value before.
    So it does for a new parameter under an old name, equal in all processes, which a warning names.
    Weights that are loaded into `module` in between do not reach slow momentum, and the next step
    warns: call `_init_global_momentum_buffers(optimizer)` after loading.

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
      init_sync: as in DistributedDataParallel, but parameters are compared, not sent: before the
        first forward pass in training mode, unless the run resumes from a `state_dict` or is in a
        graph that cannot be read. `torch_compat.broadcast_parameters(module)` makes them equal.
        False if they are meant to differ.
      **ddp: keyword arguments of DistributedDataParallel that mean nothing here are taken, such as
        device_ids and find_unused_parameters; the error of another one names what to use instead.

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
        is not the backend's, overlap=True, an invalid graph or mixing, a module without parameters
        or with uninitialised ones, an argument of DistributedDataParallel without meaning here; in
        the first forward pass processes that start from different parameters.
      RuntimeError: neither torch_xla nor an initialised `torch.distributed`.
      UnlikeCallsError: in an exchange, with gloo and on CPU devices: processes have made different
        calls, or one of them has left out `perform_slowmo` after a step, or called it twice.
      PeerLostError: in an exchange, with gloo and on CPU devices: another process has ended.
      UserWarning: arguments without effect, a base algorithm that is off, frequencies that are not
        multiples, half precision without masters; more than `slowmo_frequency` steps of an
        optimizer without a call of `perform_slowmo`.

    Communication, N the bytes of the parameters that require a gradient, over XLA in a fixed number
      of separate graphs:
      local SGD: when due one all-reduce of N. SGP: per step one collective-permute of N
      (`torch.distributed`: an all-to-all in which each process sends N to one other) for each
      permutation of the round, and 4 bytes if weights can differ from 1; an all-reduce of N inside
      the nodes if they have several processes. Slow step: memory efficient one reduce-scatter and
      one all-gather of N, otherwise nothing (with SGP and slowmo_sgp_average_params one all-reduce
      of N). Gradients: one all-reduce of N inside the nodes per backward pass, with several
      processes per node. Buffers: one all-reduce of their bytes per forward pass in training mode;
      with "average" they are part of the all-reduce of the parameters if there is one, otherwise
      they need another one. Once: an all-gather of the hosts (several processes per node). At the
      start, and when parameters are frozen or unfrozen: an all-gather of 16 bytes per process,
      another one for slow momentum, and two of N if it is sharded and has begun. Steps in which
      nothing is due trace and send nothing.
      Over gloo each of these begins with a header of 40 bytes (kind, bytes, calls, steps, wrapper)
      from every process that takes part to each other one: in the node for gradients, along the
      edges of the graph and in the node for SGP, else to all. It takes one network latency, no
      round trip.

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
        init_sync: bool = True,
        **ddp: Any,
    ) -> None:
        options = SimpleNamespace(**locals())
        super().__init__()
        Joinable.__init__(self)
        parameters = inspect.signature(SlowMoDistributedDataParallel).parameters
        defaults = {name: parameter.default for name, parameter in parameters.items()}
        places, self._backend, base = settle(options, defaults)
        if verbose:
            show_log()
        self.module = module
        self.broadcast_buffers = broadcast_buffers
        self.process_rank = places.rank
        self.process_world_size = places.world_size
        self.nprocs_per_node = nprocs_per_node
        self.logical_rank = places.node
        self.logical_world_size = places.num_nodes
        self.slowmo = has_slow_momentum(options)
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
            averages_buffers=broadcast_buffers == "average",
        )
        for part in (*module.modules(), self):
            _WRAPPERS[part] = weakref.ref(self)
            part.register_load_state_dict_post_hook(_note_load)
        self._hooks = BackwardHooks()
        if self._replica.waits_for_backward:
            self._hooks.on_parameters(self, module.parameters())
        exchanges = places.world_size > 1 and (self.slowmo or places.num_nodes > 1)
        self._steps = Steps(self._replica.collectives, slowmo_frequency if exchanges else None)
        self._was_numerator = False
        self._must_check = init_sync
        self._others: str | None = None
        self._master_names: list[str] = []

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the module's output, computed from de-biased parameters.

        Communication: by default rank 0's buffers in training mode; see the class.
        """
        device = self._before_forward()
        output = self.module(*inputs, **kwargs)
        self._after_forward(output, device)
        return output

    @_not_compiled
    def _before_forward(self) -> torch.device:
        replica, device = self._replica, self._device()
        if self.training:
            self._open_round()
            if self._broadcasts_next:
                self._broadcast_buffers(device)
        # torch.func.functional_call puts other tensors in the place of parameters.
        named = dict(self.module.named_parameters())
        is_own = all(isinstance(param, torch.nn.Parameter) for param in named.values())
        params = replica.exchanged_params(named, notices=self.training and is_own)
        if is_own:
            self._steps.note_forward(params)
        trains = self.training and torch.is_grad_enabled() and is_own
        if trains:
            self._broadcasts_next = self._averages_gradients
            self._start(device)
        replica.push_sum.make_estimates([*params.values()])
        if trains and self.slowmo:
            replica.slow.remember(params, device)
        return device

    @_not_compiled
    def _after_forward(self, output: Any, device: torch.device) -> None:
        if self._replica.waits_for_backward and torch.is_grad_enabled():
            self._hooks.on_parameters(self, self.module.parameters())
            self._hooks.on_output(self, output, device, averages=self.exchanges_gradients)

    @property
    def exchanges_gradients(self) -> bool:
        """True in training mode, outside of `no_sync`: gradients are averaged in the node."""
        return self.training and self._averages_gradients

    def _exchanged_params(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that are exchanged, also in a backward pass before any forward."""
        named = dict(self.module.named_parameters())
        return self._replica.exchanged_params(named, notices=self.training)

    def _begin_backward(self) -> None:
        """Restore the estimates of the forward pass, if another backward pass came in between."""
        push_sum = self._replica.push_sum
        self._was_numerator = push_sum.is_numerator
        push_sum.make_estimates([*self._exchanged_params().values()])

    def _finish_backward(
        self, device: torch.device, *, averages: bool, reached_parameters: bool
    ) -> None:
        push_sum = self._replica.push_sum
        if push_sum.moves and push_sum.is_numerator:
            raise RuntimeError(
                "With push-sum weights that move, backward passes after the first must go through "
                "the output of forward(): add losses up, and call backward() once."
            )
        params = [*self._exchanged_params().values()]
        if averages and reached_parameters:
            average_gradients(params, self._replica.collectives, device)
        if reached_parameters or self._was_numerator:
            push_sum.make_numerators(params)
        self._was_numerator = False

    @_not_compiled
    def perform_slowmo(
        self, optimizer: Any, fp32_params: Any = None, others: Literal["fairscale"] | None = None
    ) -> None:
        """Bring the replicas together; call it after every `optimizer.step()`, in all processes.

        Args:
          optimizer: the optimizer of the parameters, or a list of several, whose groups slow
            momentum takes its learning rates from. Its parameters must be float32.
          fp32_params: the float32 masters of a half-precision module: one vector of all parameters
            in the module's order, a list with a tensor for each, or a dict with one such value;
            those of frozen parameters may be left out. The exchange then runs in half precision;
            rounding errors are kept in the masters.
          others: what slow steps do with parameters that require a gradient and are in none of the
            optimizers. None refuses them; "fairscale" leaves them as they are in each process, as
            FairScale does.

        Raises:
          ValueError: no optimizer, one that leaves out parameters or holds one twice, masters that
            do not fit, half-precision parameters under slow momentum, other parameters on other
            processes.
          UserWarning: half precision without masters; no anchor from a forward pass.

        Communication: see the class. Nothing is traced in steps in which nothing is due.
        """
        self._open_round()
        if self._join_config.enable and fp32_params is not None:
            raise ValueError(
                "`fp32_params` must be None inside of join(), where some processes have no masters."
            )
        replica = self._replica
        params = self._params_of_step(fp32_params)
        groups = self._groups(optimizer, params)
        self._check_covered(groups, params, others)
        if self.process_rank not in replica.collectives.absent:
            self._steps.note_call(groups.optimizers)
        lacks_masters = not params.masters and any(p.dtype in HALF for p in params.tensors)
        if self.num_updates == 0 and lacks_masters:
            text = "Set `fp32_params` in perform_slowmo(): half-precision parameters lose accuracy."
            warnings.warn(text, stacklevel=3)  # torch.compiler.disable adds a call
        self._start(params.device, may_check=False)  # parameters differ after local steps
        if replica.collectives.absent:
            with replica.collectives.graph(params.device, Kind.STEP, []):
                pass  # processes without data hear that it begins
        has_momentum = self.slowmo and groups.names  # none if all is frozen
        momentum = replica.slow.ready(groups, params) if has_momentum else None

        update = self.num_updates + 1
        slow = momentum is not None and update % self.slowmo_frequency == 0
        exact = slow and self.slowmo_memory_efficient
        average = not exact and (
            (self.localsgd and update % self.localsgd_frequency == 0)
            or (self.sgp and slow and self.slowmo_sgp_average_params)
        )
        gossip = self.sgp and self.training and not exact and not average
        also_buffers = slow or not (self.sgp or update % self.localsgd_frequency)
        buffers = replica.averaged_buffers(self.module.buffers()) if also_buffers else []
        if replica.collectives.absent and (average or gossip or slow or buffers):
            replica.share_in_node(params.tensors, params.device, buffers)
        if average:
            replica.averaging.average(params, buffers)
        else:
            average_buffers(buffers, replica.collectives, params.device)
        if gossip:
            replica.averaging.exchange(params)
        if momentum is not None and slow:
            rates = replica.rates(groups, momentum, params.device)
            replica.slow.step(momentum, rates, params, self.slowmo_momentum, self.slowmo_lr)
            if exact and (frozen := params.frozen()).by_name:
                replica.averaging.average(frozen, [])
        if average or self.logical_world_size == 1:
            replica.forget(params.by_name)
        elif exact:
            replica.forget([*groups.names, *params.frozen().by_name])
        LOG.debug(
            "rank %d, step %d: average %r, gossip %r, slow step %r",
            *(self.process_rank, self.num_updates, average, gossip, slow),
        )
        replica.collectives.num_updates = update
        self._is_round_open = False

    def consolidated_state_dict(self, *, for_resuming: bool = False) -> dict[str, Any]:
        """Return one state for all, equal in all processes.

        Parameters are the mean over nodes (sum x / sum w). Buffers are rank 0's (with "average"
        their mean), and so are frozen parameters that differ between processes, since forward()
        writes to them (those of a target network). Call it in all processes; it changes nothing.

        Args:
          for_resuming: False returns a state dict of the module, for
            `module.load_state_dict(state)` in any program. True returns one of this wrapper, which
            loads on any rank of any number of processes: it also holds counters, and anchor and
            momentum whole (not memory efficient: their mean over nodes). Loaded right after a slow
            or averaging step it continues as if undisturbed, up to rounding; elsewhere the
            differences between replicas are lost.

        Returns:
          A dict on the host.

        Communication: one all-reduce of parameters and buffers; memory efficient one all-gather of
          8 bytes per parameter, otherwise one all-reduce of that. Of frozen parameters an
          all-gather of 8 bytes for each tensor; those that differ are part of the all-reduce.
        """
        self._open_round()
        state, device = self.state_dict(keep_vars=True), self._device()
        return consolidate(state, self.module, self._replica, device, for_resuming=for_resuming)

    def _init_global_momentum_buffers(self, optimizer: Any, fp32_params: Any = None) -> None:
        """Anchor slow momentum at the current parameters, each process its own part.

        Without this call the anchor starts as the initial parameters. The arguments are those of
        `perform_slowmo`; an optimizer of one tensor that is no parameter of the module holds the
        vector of all masters.

        Raises:
          ValueError: parameters in half precision.
        """
        params = self._params_of_step(fp32_params)
        groups = self._groups(optimizer, params)
        if not groups.names and groups.foreign == 1:
            (flat,) = (p for o in groups.optimizers for g in o.param_groups for p in g["params"])
            params = self._params_of_step(flat)
            groups = self._groups(optimizer, params)
        if self.slowmo:
            self._open_round()
            self._start(params.device)
            self._replica.slow.anchor_now(groups, params)

    def _params_of_step(self, fp32_params: Any) -> Parameters:
        named = dict(self.module.named_parameters())
        exchanged = self._replica.exchanged_params(named)
        masters = None
        if fp32_params is not None:
            sizes = {name: param.numel() for name, param in named.items()}
            masters = Masters(sizes, [exchanged, self._master_names], fp32_params)
            self._master_names = masters.names
        held = {id(param): [name] for name, param in named.items()}
        return Parameters(exchanged, masters, self._device(), masters.held if masters else held)

    def _groups(self, optimizer: Any, params: Parameters) -> Groups:
        trained = [name for name, param in params.by_name.items() if may_change(param)]
        groups = Groups(optimizer, params.held, trained)
        self._remember(groups.optimizers)
        return groups

    def _check_covered(self, groups: Groups, params: Parameters, others: object) -> None:
        """Raise `ValueError` for parameters that require a gradient and are in no optimizer."""
        if others not in (None, "fairscale"):
            raise ValueError(f'`others` must be None or "fairscale", got {others!r}.')
        self._others = "fairscale" if others else None
        if self.slowmo and groups.twice is not None:
            raise ValueError(
                f"`optimizer` must hold each parameter once, and {groups.twice!r} is in two groups."
            )
        held = {*groups.names}
        left = [n for n, p in params.by_name.items() if p.requires_grad and n not in held]
        if self.slowmo and left and not others:
            raise ValueError(
                "`optimizer` must hold every parameter that requires a gradient; "
                f"{len(left)} are missing, such as {left[0]!r}: pass a list of all optimizers, or "
                'others="fairscale", with which slow steps leave them as they are.'
            )

    def _device(self) -> torch.device:
        """Return the device of this process, on which all parameters must be."""
        device = self._backend.device_of(self.module)
        self._replica.push_sum.move_to(device)
        return device

    def _broadcast_buffers(self, device: torch.device) -> None:
        """Overwrite buffers with those of rank 0, if `broadcast_buffers` is True."""
        if self.broadcast_buffers is True:
            buffers = [b for b in self.module.buffers() if b.numel()]
            broadcast(buffers, self._replica.collectives, device)

    def _start(self, device: torch.device, *, may_check: bool = True, must: bool = False) -> None:
        """Check once that the parameters of all processes are equal.

        Whether names are the same is checked whenever other parameters are exchanged than before.
        """
        if self._backend.may_read():
            values = self._must_check and may_check
            self._replica.compare(self.module, device, values=values, must=must)
        self._must_check = False
