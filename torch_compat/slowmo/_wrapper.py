"""The module that keeps the processes of `xmp.spawn` together by SlowMo."""

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr

from ._backward import AfterBackward
from ._base_algorithm import SlowMoBaseAlgorithm
from ._collectives import Collectives, own_graph, write
from ._flat import flatten, pack, times, unflatten, unpack
from ._gossip import Gossip
from ._graphs import plan_gossip
from ._half import HALF, Masters
from ._optimizer import ends_of, groups_of, rate_of
from ._options import (
    OVERLAP,
    check_numbers,
    check_place,
    mention_alone,
    mention_schedule,
    mention_unused,
)
from ._places import Places
from ._slow_momentum import SlowMomentum, Span
from ._state import State, consolidate, entries_of, is_own_key, parse

_UNUSED = {
    "synch_freq": 0,
    "use_streams": True,
    "profile_mode": False,
    "global_group": None,
    "master_group": None,
    "local_node_group": None,
    "comm_device": None,
}
_log = logging.getLogger(__name__)


class SlowMoDistributedDataParallel(torch.nn.Module):
    """Data parallelism with slow momentum over local SGD or stochastic gradient push.

    For scripts under `torch_xla`'s `xmp.spawn`, with the constructor of FairScale's class of this
    name. Every process holds a replica of `module` on its XLA device and trains it with its own
    optimizer; `perform_slowmo(optimizer)` after `optimizer.step()` brings the replicas together:

    - LOCALSGD: every `localsgd_frequency` steps the parameters become their mean over nodes.
    - SGP: in every step a node sends its parameters to a few peers and mixes in what arrives.
    - slow momentum (on unless slowmo_lr is 1 and slowmo_momentum 0), every `slowmo_frequency`
      steps, gamma the learning rate of the optimizer group and D = anchor - parameters:
      m <- slowmo_momentum * m + D / gamma; anchor <- anchor - slowmo_lr * gamma * m; parameters =
      anchor. The anchor starts as the initial parameters, those that the first forward pass in
      training mode sees (`_init_global_momentum_buffers` takes those of the moment instead).

    A node is a group of `nprocs_per_node` processes whose gradients are averaged after every
    backward pass and whose parameters stay equal. Nothing makes initial parameters equal: load the
    same, or seed alike, in all processes. All processes must make the same calls in the same order:
    forward passes too where there are buffers to broadcast, in evaluation as well.

    Args:
      module: to be trained; on its XLA device before the first forward pass.
      nprocs_per_node: processes per node; a divisor of their number. With one node alone the base
        algorithm is off.
      broadcast_buffers: give all processes rank 0's buffers before every forward pass.
      slowmo_base_algorithm: a `SlowMoBaseAlgorithm` or its string.
      slowmo_momentum: in [0, 1).
      slowmo_memory_efficient: slow steps average exactly over all processes (the base algorithm is
        skipped in these steps), and anchor and momentum are sharded: 2N / processes of memory. If
        False they are kept whole, 2N, and start from what the base algorithm left.
      slowmo_frequency: steps from one slow step to the next.
      slowmo_lr: step size of the slow step.
      slowmo_num_shards: always all processes; the number changes no result.
      localsgd_frequency: steps from one average to the next.
      graph: for SGP, a `jaxslowmo.topology.Graph` of as many nodes as there are, its name ("ring")
        or constructor, or an object with FairScale's `phone_book`. None is FairScale's default,
        `npeer_directed_exponential`.
      mixing: for SGP, a callable `(graph, step) -> P[destination, source]` from
        `jaxslowmo.topology`; None is uniform.
      push_sum: False (PushPull) promises that P is doubly stochastic.
      overlap: not available.
      synch_freq: without effect.
      use_streams: without effect.
      slowmo_sgp_average_params: for SGP, slow steps start from the exact mean over nodes.
      verbose: log what each step does, at level DEBUG of logger `torch_compat.slowmo`.
      profile_mode: without effect.
      process_rank: as torch_xla has it, or None.
      process_world_size: as torch_xla has it, or None.
      global_group: without effect.
      master_group: without effect.
      local_node_group: without effect.
      comm_device: without effect.

    Attributes:
      num_updates: calls of `perform_slowmo` so far.
      ps_weight: (1,) float32, the push-sum weight w. After `perform_slowmo` the module holds the
        estimates x / w, not FairScale's numerators x; from a backward pass until then, and with
        float32 masters until the next forward pass, it holds x.
      old_params: (shard,) float32, this process' part of the anchor; None before there is one.
      global_momentum_buffer: (shard,) float32, its part of m; None before there is one.

    Raises:
      ValueError: naming argument, rule and value: numbers out of range, a world that the node size
        does not divide, a rank or world size that is not torch_xla's, overlap=True, a graph or
        mixing that cannot work, a module without parameters.
      UserWarning: arguments without effect on XLA, a base algorithm that is off, frequencies out
        of step, half precision without masters.

    Communication, N the bytes of the parameters, in graphs of their own, whose number is fixed:
      local SGD: when due one all-reduce of N. SGP: per step one collective-permute of N for each
      permutation of the round, and 4 bytes where weights can differ from 1; an all-reduce of N
      inside the nodes where they have several processes. Slow step: memory efficient one
      reduce-scatter and one all-gather of N, otherwise nothing (with SGP and
      slowmo_sgp_average_params one all-reduce of N). Gradients: one all-reduce of N inside the
      nodes per backward pass, with several processes per node. Buffers: one all-reduce of their
      bytes per forward pass. Steps in which nothing is due trace and send nothing.

    Source: Wang et al., "SlowMo", ICLR 2020 (arXiv:1910.00643), algorithm 1; Stich, "Local SGD
      Converges Fast and Communicates Little", ICLR 2019 (arXiv:1808.07217); Assran et al.,
      "Stochastic Gradient Push", ICML 2019 (arXiv:1811.10792); FairScale 0.4.13.

    Example:
      >>> net = SlowMoDistributedDataParallel(model.to(torch_xla.device()), nprocs_per_node=1)
      >>> loss_fn(net(inputs), targets).backward()
      >>> optimizer.step()
      >>> net.zero_grad(set_to_none=True)
      >>> net.perform_slowmo(optimizer)
      >>> torch_xla.sync()
    """

    def __init__(
        self,
        module: torch.nn.Module,
        nprocs_per_node: int,
        broadcast_buffers: bool = True,
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
    ) -> None:
        super().__init__()
        if not isinstance(module, torch.nn.Module) or not any(True for _ in module.parameters()):
            raise ValueError(f"`module` must be a torch.nn.Module with parameters, got {module!r}.")
        if overlap:
            raise ValueError(OVERLAP)
        check_numbers(
            slowmo_frequency=slowmo_frequency,
            localsgd_frequency=localsgd_frequency,
            slowmo_num_shards=slowmo_num_shards,
            slowmo_momentum=slowmo_momentum,
            slowmo_lr=slowmo_lr,
        )
        check_place("process_rank", process_rank, xr.global_ordinal())
        check_place("process_world_size", process_world_size, xr.world_size())
        base = SlowMoBaseAlgorithm.of(slowmo_base_algorithm)
        places = Places(xr.global_ordinal(), xr.world_size(), nprocs_per_node)
        given = locals()
        shards_differ = slowmo_memory_efficient and slowmo_num_shards < places.world_size
        unused = {**_UNUSED, "slowmo_num_shards": 32} if shards_differ else _UNUSED
        mention_unused({name: given[name] for name in unused}, unused)
        if places.world_size == 1:
            mention_alone()
        if verbose:
            _log.setLevel(logging.DEBUG)

        self.module = module
        self.broadcast_buffers = broadcast_buffers
        self.process_rank = places.rank
        self.process_world_size = places.world_size
        self.nprocs_per_node = nprocs_per_node
        self.logical_rank = places.node
        self.logical_world_size = places.num_nodes
        self.slowmo = slowmo_lr != 1 or slowmo_momentum != 0
        self.slowmo_lr = slowmo_lr
        self.slowmo_momentum = slowmo_momentum
        self.slowmo_memory_efficient = slowmo_memory_efficient
        self.slowmo_frequency = slowmo_frequency
        self.slowmo_num_shards = places.world_size if slowmo_memory_efficient else 1
        self.slowmo_sgp_average_params = slowmo_sgp_average_params
        self.localsgd_frequency = localsgd_frequency
        self.localsgd = base == SlowMoBaseAlgorithm.LOCALSGD
        self.sgp = base == SlowMoBaseAlgorithm.SGP
        if nprocs_per_node > 1 and places.num_nodes == 1:
            self.localsgd = self.sgp = False
            warnings.warn(
                f"`nprocs_per_node`={nprocs_per_node} makes one node of all processes: LocalSGD "
                "and SGP are off, since averaging gradients inside the node does all.",
                stacklevel=2,
            )
            if self.slowmo:
                warnings.warn("SlowMo is used without LocalSGD and SGP.", stacklevel=2)
        if self.slowmo and self.localsgd:
            mention_schedule(slowmo_frequency, localsgd_frequency)

        self.num_updates = 0
        self.ps_weight = torch.ones(1)
        self.is_sgp_ps_numerator = False
        self._exchanges = 0
        self._slow: SlowMomentum | None = None
        self._initial: torch.Tensor | None = None
        self._collectives = Collectives(places)
        num_nodes = places.num_nodes if self.sgp else 1
        plan = plan_gossip(graph, mixing, num_nodes, nprocs_per_node, push_sum=push_sum)
        self._gossip = Gossip(plan, self._collectives)
        self._after_backward = AfterBackward(self._finish_backward)

    @property
    def gossip_enable(self) -> bool:
        """Whether SGP exchanges: in training mode only."""
        return self.training

    @property
    def global_momentum_buffers_initialized(self) -> bool:
        """Whether there is an anchor."""
        return self._slow is not None

    @property
    def old_params(self) -> torch.Tensor | None:
        """This process' part of the anchor, (shard,) float32."""
        return None if self._slow is None else self._slow.anchor

    @property
    def global_momentum_buffer(self) -> torch.Tensor | None:
        """This process' part of m, (shard,) float32; v where the learning rate was 0."""
        return None if self._slow is None else self._slow.momentum_buffer()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's output; it sees rank 0's buffers and de-biased parameters.

        Communication: buffers, where there are any; see the class.
        """
        device = self._device()
        buffers = [b for b in self.module.buffers() if b.numel()]
        if self.broadcast_buffers and buffers and self.process_world_size > 1:
            with own_graph(device):
                spoken = self._collectives.only_first(buffers)
            with own_graph(device) as writes:
                writes.extend(zip(buffers, self._collectives.total(spoken), strict=True))
        trains = self.training and torch.is_grad_enabled()
        if self.slowmo and trains and self._slow is None and self._initial is None:
            with own_graph(device):
                self._initial = self._copy_of_parameters()
        self._to_estimates()
        output = self.module(*inputs, **kwargs)
        needed = self.nprocs_per_node > 1 or self._weight_moves
        if (
            needed
            and torch.is_grad_enabled()
            and not self._after_backward.watch(output, device)
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
          optimizer: that of the parameters; slow momentum applies to those it holds, which must be
            float32, at their groups' learning rates of this moment.
          fp32_params: for half-precision modules the float32 masters: one vector of all parameters
            in the module's order, a list with a tensor for each, or a dict with one such value.
            The exchange then runs in half precision, and what rounding loses stays in the masters.

        Raises:
          ValueError: no optimizer, masters that do not fit, half-precision parameters under slow
            momentum, optimizer parameters other than those of the first call.
          UserWarning: half precision without masters; no anchor from a forward pass.

        Communication: see the class. Nothing is traced in steps in which nothing is due.
        """
        groups = groups_of(optimizer)
        params = list(self.module.parameters())
        masters = None if fp32_params is None else Masters(params, fp32_params)
        if self.num_updates == 0 and masters is None and any(p.dtype in HALF for p in params):
            warnings.warn(
                "Set `fp32_params` in perform_slowmo() for half-precision parameters; accuracy is "
                "lost without.",
                stacklevel=2,
            )
        self._ready_slow_momentum(groups, masters)

        update = self.num_updates + 1
        slow = self.slowmo and update % self.slowmo_frequency == 0
        exact = slow and self.slowmo_memory_efficient
        average = not exact and (
            (self.localsgd and update % self.localsgd_frequency == 0)
            or (self.sgp and slow and self.slowmo_sgp_average_params)
        )
        gossip = self.sgp and self.training and not exact and not average
        if average and self.logical_world_size > 1:
            self._average(params, masters)
        elif gossip and self._gossip.plan.rounds:
            self._exchange(params, masters)
        if slow:
            self._slow_step(groups, params, masters, exact)
        _log.debug(
            "rank %d, step %d: average %r, gossip %r, slow step %r",
            *(self.process_rank, self.num_updates, average, gossip, slow),
        )
        self.num_updates = update

    def consolidated_state_dict(self) -> dict[str, Any]:
        """One state for all: loads on any rank of any number of processes.

        Parameters are the mean over nodes (sum x / sum w), buffers rank 0's, anchor and momentum
        whole (not memory efficient: their mean over nodes). Call it in all processes; it changes
        nothing. Loaded right after a slow or averaging step it continues as if undisturbed, up to
        rounding; elsewhere the differences between replicas are given up.

        Returns:
          A dict like that of `state_dict()`, on the host, equal on all processes.

        Communication: one all-reduce of parameters and buffers; memory efficient one all-gather of
          8 bytes per parameter, otherwise one all-reduce of that.
        """
        state = consolidate(self)
        return {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in state.items()}

    def _init_global_momentum_buffers(self, optimizer: torch.optim.Optimizer) -> None:
        """Anchor slow momentum at the parameters of this moment, each process its own part.

        Without this call the anchor are the initial parameters.

        Raises:
          ValueError: parameters in half precision.
        """
        if self.slowmo:
            self._initial = None
            self._anchor_at(groups_of(optimizer), dict)

    @property
    def _weight_moves(self) -> bool:
        return self._gossip.plan.weight_moves

    def _device(self) -> torch.device:
        """The device of this process, on which all parameters must be."""
        devices = {param.device for param in self.module.parameters()}
        here = torch_xla.device()
        if devices != {here}:
            raise ValueError(
                f"`module` must have all its parameters on the device of this process, {here}, "
                f"found {', '.join(sorted(map(str, devices)))}."
            )
        if self.ps_weight.device != here:
            (self.ps_weight,) = xm.send_cpu_data_to_device([self.ps_weight], here)
        return here

    def _finish_backward(self, device: torch.device) -> None:
        if self.nprocs_per_node > 1:
            # Another process may have a gradient where this one has none, and all must send alike.
            trained = [param for param in self.module.parameters() if param.requires_grad]
            with torch.no_grad():
                grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
                shares = [grad.detach() / self.nprocs_per_node for grad in grads]
            del grads
            with own_graph(device):
                means = self._collectives.total_in_node(shares)
            for param, mean in zip(trained, means, strict=True):
                param.grad = mean
        self._to_numerators()

    def _to_numerators(self) -> None:
        """Parameters become x = w * estimate, on which optimizer and exchange work."""
        params = list(self.module.parameters())
        if not self.is_sgp_ps_numerator and self._weight_moves:
            write(zip(params, self._numerators(params), strict=True))
        self.is_sgp_ps_numerator = self.sgp

    def _to_estimates(self) -> None:
        params = list(self.module.parameters())
        if self.is_sgp_ps_numerator and self._weight_moves:
            write(zip(params, self._over_weight(params), strict=True))
        self.is_sgp_ps_numerator = False

    def _average(self, params: list[torch.nn.Parameter], masters: Masters | None) -> None:
        """Parameters become their mean over nodes, the push-sum weight 1."""
        device = self._device()
        weights = [self.ps_weight] if self._weight_moves else []
        with own_graph(device):
            shares = self._collectives.shares([*self._numerators(params), *weights])
            sent = shares[: len(params)] if masters else None
            shares = self._collectives.only_masters(shares)
        if masters is not None:
            # Shares in half precision are rounded, and the residual must know how: only now are
            # they values, which no optimisation computes again at another precision.
            with own_graph(device):
                sent = [share.float() * self.logical_world_size for share in sent]
                residuals = masters.residuals(sent)
        with own_graph(device):
            sums = self._collectives.total(shares)
        with own_graph(device) as writes:
            means = sums[: len(params)]
            if self._weight_moves:
                means = [times(mean, 1 / sums[-1]) for mean in means]
                self.ps_weight = torch.ones_like(self.ps_weight)
            writes.extend(
                zip(params, means, strict=True)
                if masters is None
                else masters.restored(residuals, means)
            )
        self.is_sgp_ps_numerator = False

    def _exchange(self, params: list[torch.nn.Parameter], masters: Masters | None) -> None:
        """One exchange with the peers of the round."""
        device = self._device()
        with own_graph(device):
            numerators = self._numerators(params)
            residuals = masters.residuals(numerators) if masters else []
            flats = pack(numerators)
        with own_graph(device):
            flats, self.ps_weight = self._gossip.exchange(self._exchanges, flats, self.ps_weight)
        with own_graph(device) as writes:
            new = unpack(params, flats)
            writes.extend(
                zip(params, self._over_weight(new), strict=True)
                if masters is None
                else masters.restored(residuals, new)
            )
        # Masters stay numerators, and parameters with them until the next forward pass.
        self.is_sgp_ps_numerator = masters is not None
        self._exchanges += 1

    def _slow_step(
        self,
        groups: list[dict[str, Any]],
        params: list[torch.nn.Parameter],
        masters: Masters | None,
        exact: bool,
    ) -> None:
        """Slow momentum on the optimizer's parameters."""
        device, slow = self._device(), self._slow
        rates = [rate_of(group, i, device) for i, group in enumerate(groups)]
        held = [param for group in groups for param in group["params"]]
        with own_graph(device) as writes:
            scale = unscale = None
            present = {id(param): param.detach() for param in params}
            if self._weight_moves and exact:
                present = dict(zip(present, self._numerators(params), strict=True))
                weights = self._collectives.shares([self.ps_weight])
                weights = self._collectives.only_masters(weights)
                # w becomes 1, and parameters without slow momentum must not notice.
                estimates = self._over_weight(list(present.values()))
                writes.extend(zip(params, estimates, strict=True))
            elif self._weight_moves and masters:
                scale, unscale = 1 / self.ps_weight, self.ps_weight
            elif self._weight_moves and self.is_sgp_ps_numerator:
                present = dict(zip(present, self._over_weight(params), strict=True))
                writes.extend(zip(params, present.values(), strict=True))
            values = [present.get(id(param), param.detach()) for param in held]
            flat = flatten(values, slow.span.padded)
        with own_graph(device):
            if self._weight_moves and exact:
                scale = 1 / self._collectives.total(weights)[0]
                self.ps_weight = torch.ones_like(self.ps_weight)
            collectives = self._collectives if exact else None
            momentum, slow_lr = self.slowmo_momentum, self.slowmo_lr
            flat = slow.step(flat, rates, momentum, slow_lr, collectives, scale, unscale)
        with own_graph(device) as writes:
            new = unflatten(held, flat)
            writes.extend(zip(held, new, strict=True))
            if masters:
                writes.extend(masters.rounded(dict(zip(map(id, held), new, strict=True))))
        self.is_sgp_ps_numerator = unscale is not None

    def _numerators(self, params: list[torch.nn.Parameter]) -> list[torch.Tensor]:
        """x = w * estimate of every parameter, whichever of both the module holds."""
        if self.is_sgp_ps_numerator or not self._weight_moves:
            return [param.detach() for param in params]
        return [times(param.detach(), self.ps_weight) for param in params]

    def _over_weight(self, numerators: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The estimates x / w."""
        if not self._weight_moves:
            return list(numerators)
        return [times(x.detach(), 1 / self.ps_weight) for x in numerators]

    def _copy_of_parameters(self) -> torch.Tensor:
        """All parameters in float32, and one element more, so that it never is a view of one."""
        params = [param.detach().float() for param in self.module.parameters()]
        return flatten(params, 1 + sum(param.numel() for param in params))

    def _ready_slow_momentum(self, groups: list[dict[str, Any]], masters: Masters | None) -> None:
        if not self.slowmo:
            return
        if self._slow is None:
            if self._initial is None:
                warnings.warn(
                    "Slow momentum is anchored at the parameters of this moment, since no forward "
                    "pass in training mode came before the first perform_slowmo(). To anchor it at "
                    "the initial ones call _init_global_momentum_buffers(optimizer) before "
                    "training.",
                    stacklevel=3,
                )
            self._anchor_at(groups, lambda: self._initial_by_id(masters))
            self._initial = None
        if ends_of(groups) != self._slow.span.ends:
            raise ValueError(
                "`optimizer` must hold the parameters that slow momentum was started with, in "
                f"groups that end at elements {self._slow.span.ends}, got {ends_of(groups)}; after "
                "adding parameters call _init_global_momentum_buffers(optimizer)."
            )
        self._slow.to(self._device())

    def _initial_by_id(self, masters: Masters | None) -> dict[int, torch.Tensor]:
        """Initial values of parameters and masters, by the tensors' ids; {} if not remembered."""
        if self._initial is None:
            return {}
        params = list(self.module.parameters())
        sizes = [param.numel() for param in params]
        values = self._initial.to(self._device())[: sum(sizes)].split(sizes)
        return {
            **{id(param): value for param, value in zip(params, values, strict=True)},
            **(masters.initial(values) if masters else {}),
        }

    def _anchor_at(
        self, groups: list[dict[str, Any]], initial: Callable[[], dict[int, torch.Tensor]]
    ) -> None:
        """Start slow momentum at `initial()`, by id; elsewhere at the values of this moment."""
        held = [param for group in groups for param in group["params"]]
        wrong = next((p for p in held if p.dtype != torch.float32), None)
        if wrong is not None:
            raise ValueError(
                "`optimizer` must hold float32 parameters under slow momentum, got "
                f"{wrong.dtype}: give it float32 masters, and those to perform_slowmo as "
                "`fp32_params`; or set slowmo_momentum=0 and slowmo_lr=1."
            )
        span = self._span(ends_of(groups))
        with own_graph(self._device()):
            values = initial()
            self._slow = span.started_at([values.get(id(param), param) for param in held])
        if values and any(id(param) not in values for param in held):
            warnings.warn(
                "`optimizer` holds parameters that are not those of the module: slow momentum is "
                "anchored at their values of this moment.",
                stacklevel=4,
            )

    def _span(self, ends: tuple[int, ...]) -> Span:
        """The part of slow momentum that this process keeps."""
        rank = self.process_rank if self.slowmo_memory_efficient else 0
        return Span(ends, self.slowmo_num_shards, rank)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({prefix + key: value for key, value in entries_of(self).items()})

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Refuses the state of another rank or number of processes with a ValueError."""
        own: dict[str, Any] = {}
        others: dict[str, Any] = {}
        for key, value in state_dict.items():
            mine = key.startswith(prefix) and is_own_key(key[len(prefix) :])
            if mine:
                own[key[len(prefix) :]] = value
            else:
                others[key] = value
        state: State = parse(own, self)
        unexpected_keys.extend(prefix + key for key in state.unexpected if strict)
        super()._load_from_state_dict(
            others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        state.apply(self)
