"""Checks of the constructor's arguments, and warnings for arguments without effect."""

import inspect
import logging
import warnings
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ..checks import as_count, is_finite
from ._places import Places
from .backends import Backend

LOG = logging.getLogger("torch_compat.slowmo")
# Arguments of DistributedDataParallel that are refused, and what to do; others mean nothing here.
_INSTEAD = {
    "process_group": "pass `global_group`, the processes of the run",
    "device_mesh": "pass `global_group`, the processes of the run, and `nprocs_per_node`",
    "forward_sync_buffers": "pass `broadcast_buffers`",
    "mixed_precision": "use torch.autocast, or a half-precision module with `fp32_params`",
    "delay_all_reduce_named_params": "parameters are exchanged in perform_slowmo()",
    "param_to_hook_all_reduce": "parameters are exchanged in perform_slowmo()",
}


class SlowMoBaseAlgorithm(str, Enum):  # noqa: UP042  FairScale's prints its name
    """The algorithm that averages the nodes between two slow steps: local SGD or gossip."""

    LOCALSGD = "localsgd"
    SGP = "sgp"


def has_slow_momentum(options: Any) -> bool:
    """Return whether slow steps change anything."""
    return options.slowmo_lr != 1 or options.slowmo_momentum != 0


def settle(
    options: Any, defaults: Mapping[str, Any]
) -> tuple[Places, Backend, SlowMoBaseAlgorithm | None]:
    """Check the arguments of the constructor, and warn about those without effect.

    The `stacklevel` of warnings is that of the caller of the constructor.

    Args:
      options: the arguments of the constructor, as attributes.
      defaults: the defaults of its arguments, by name.

    Returns:
      The place of this process, the backend, and the base algorithm; None if it is off.

    Raises:
      ValueError: an invalid argument; the text names argument, rule and value.
      RuntimeError: neither torch_xla nor an initialised `torch.distributed`.

    Communication: with several processes per node and several nodes one all-gather of the hosts'
      names.
    """
    module = options.module
    check_has_parameters(module)
    lazy = [name for name, param in module.named_parameters() if is_lazy(param)]
    if lazy:
        raise ValueError(f"`module` must be called once before it is wrapped: {lazy[0]!r} is lazy.")
    if options.overlap:
        raise ValueError(
            "`overlap`=True is not available, as in FairScale; in JAX jaxslowmo.sgp has it."
        )
    _check_ddp(options.ddp)
    _check_numbers(options)
    base = SlowMoBaseAlgorithm(options.slowmo_base_algorithm)
    is_averaged = base == SlowMoBaseAlgorithm.LOCALSGD or has_slow_momentum(options)
    _check_buffers(options.broadcast_buffers, is_averaged=is_averaged)
    groups = ("global_group", "local_node_group", "comm_device")
    backend = choose_backend(module, **{name: getattr(options, name) for name in groups})
    rank, world, size = backend.rank, backend.world_size, options.nprocs_per_node
    for name, actual in (("process_rank", rank), ("process_world_size", world)):
        if getattr(options, name) not in (None, actual):
            raise ValueError(
                f"`{name}` must be None or that of {backend.name}, {actual}, got "
                f"{getattr(options, name)!r}."
            )
    places = Places(rank, world, size)
    if 1 < size < world:
        places = replace(places, hosts=backend.hosts())
    backend.join_nodes(places)

    _mention_unused(options, defaults, places, backend)
    if world == 1:
        _mention("SlowMoDistributedDataParallel: there is one process, so nothing is exchanged.")
    if size > 1 and places.num_nodes == 1:
        _mention(
            f"`nprocs_per_node`={size} makes one node of all processes, whose gradients are "
            "averaged: LocalSGD and SGP are off."
        )
        return places, backend, None
    slow, local = options.slowmo_frequency, options.localsgd_frequency
    if has_slow_momentum(options) and base == SlowMoBaseAlgorithm.LOCALSGD and slow % local:
        _mention(
            f"`slowmo_frequency`={slow} is not a multiple of `localsgd_frequency`={local}: slow "
            "steps and averages fall in different steps."
        )
    return places, backend, base


def check_has_parameters(module: Any) -> None:
    """Raise `ValueError` unless `module` is one with parameters."""
    if not isinstance(module, torch.nn.Module) or not any(True for _ in module.parameters()):
        raise ValueError(f"`module` must be a torch.nn.Module with parameters, got {module!r}.")


def choose_backend(module: torch.nn.Module, **groups: Any) -> Backend:
    """Return the connection to the other processes.

    It is torch_xla for a module on an XLA device; otherwise `torch.distributed` if its default
    process group is initialised and not torch_xla's own; otherwise torch_xla.

    Args:
      module: module to exchange.
      **groups: arguments of the constructor that only `torch.distributed` uses.

    Raises:
      ValueError: groups that `DistributedBackend` refuses.
      RuntimeError: neither torch_xla nor an initialised `torch.distributed`.
    """
    on_xla = any(param.device.type == "xla" for param in module.parameters())
    is_ready = dist.is_available() and dist.is_initialized() and dist.get_backend() != "xla"
    if is_ready and not on_xla:
        from .backends._distributed import DistributedBackend

        return DistributedBackend(**groups)
    if find_spec("torch_xla") is None:
        raise RuntimeError(
            "There is neither torch_xla nor an initialised torch.distributed: call "
            "torch.distributed.init_process_group() first."
        )
    from .backends._xla import XlaBackend

    return XlaBackend()


def _check_numbers(options: Any) -> None:
    """Raise `ValueError` unless frequencies are >= 1, momentum in [0, 1), slow lr >= 0."""
    for name in ("slowmo_frequency", "localsgd_frequency", "slowmo_num_shards"):
        as_count(name, getattr(options, name))
    momentum, slow_lr = options.slowmo_momentum, options.slowmo_lr
    if not (is_finite(momentum) and 0 <= momentum < 1):
        raise ValueError(f"`slowmo_momentum` must lie in [0, 1), got {momentum!r}.")
    if not (is_finite(slow_lr) and slow_lr >= 0):
        raise ValueError(f"`slowmo_lr` must be a finite number >= 0, got {slow_lr!r}.")


def _check_ddp(arguments: Mapping[str, Any]) -> None:
    """Raise `ValueError` for arguments of DistributedDataParallel that cannot be followed here."""
    # An argument that neither class has is Python's `TypeError`.
    inspect.signature(DistributedDataParallel).bind(None, **arguments)
    for name, instead in _INSTEAD.items():
        if arguments.get(name) is not None:
            raise ValueError(f"`{name}` must be None, got {arguments[name]!r}: {instead}.")


def _check_buffers(mode: object, *, is_averaged: bool) -> None:
    """Check that `broadcast_buffers` is a bool, or "average" if some step averages.

    Raises:
      ValueError: another value, or no step would ever average.
    """
    if not isinstance(mode, bool) and mode != "average":
        raise ValueError(f'`broadcast_buffers` must be True, False or "average", got {mode!r}.')
    if mode == "average" and not is_averaged:
        raise ValueError(
            '`broadcast_buffers`="average" needs slow momentum or LocalSGD, in whose steps buffers '
            "are averaged: turn one on, or pass True or False."
        )


def _mention_unused(
    options: Any, defaults: Mapping[str, Any], places: Places, backend: Backend
) -> None:
    """Warn once with the names of arguments that have no effect here but are not defaults."""
    names = backend.unused
    if options.slowmo_memory_efficient and options.slowmo_num_shards < places.world_size:
        names = (*names, "slowmo_num_shards")
    unused = [f"`{name}`" for name in names if getattr(options, name) is not defaults[name]]
    if unused:
        _mention(f"{', '.join(unused)} without effect over {backend.name}.", stacklevel=5)


def _mention(message: str, stacklevel: int = 4) -> None:
    warnings.warn(message, UserWarning, stacklevel=stacklevel)


def show_log() -> None:
    """Log what each step does; to stderr if the program has set up no logging."""
    LOG.setLevel(logging.DEBUG)
    if not LOG.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        LOG.addHandler(handler)
