"""Training with torch when the network, or the host, is the slow part.

Names are loaded when they are used: `SlowMoDistributedDataParallel` over `torch.distributed` needs
only torch; names that drive XLA devices need torch_xla.
"""

import sys as _sys
from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec
from typing import TYPE_CHECKING

from .errors import PeerLostError as PeerLostError
from .errors import TPUWorkerError as TPUWorkerError
from .errors import UnlikeCallsError as UnlikeCallsError
from .messages import StepStatistics as StepStatistics

if TYPE_CHECKING:
    from . import on_jax as on_jax
    from . import runtime as runtime
    from .manager import TPUManager as TPUManager
    from .slowmo import SlowMoBaseAlgorithm as SlowMoBaseAlgorithm
    from .slowmo import SlowMoDistributedDataParallel as SlowMoDistributedDataParallel
    from .slowmo import broadcast_parameters as broadcast_parameters
    from .xla_worker import TPUDataManager as TPUDataManager
    from .xla_worker import TPUSynchronizer as TPUSynchronizer
else:
    # Maps a name to the module that defines it; a module's name maps to itself.
    _HOMES = {
        "SlowMoBaseAlgorithm": "slowmo",
        "SlowMoDistributedDataParallel": "slowmo",
        "TPUDataManager": "xla_worker",
        "TPUManager": "manager",
        "TPUSynchronizer": "xla_worker",
        "broadcast_parameters": "slowmo",
        "on_jax": "on_jax",
        "runtime": "runtime",
    }

    def __getattr__(name: str) -> object:
        """Import and return a name of `_HOMES` from its module."""
        if name not in _HOMES:
            message = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(message, name=name, obj=_sys.modules[__name__])
        if _find_spec("torch") is None:
            from .errors import not_installed

            raise not_installed("torch", "torchax" if name == "on_jax" else "torch")
        home = _import_module(f".{_HOMES[name]}", __name__)
        value = home if name == _HOMES[name] else getattr(home, name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*_HOMES, *globals()} - {"TYPE_CHECKING"})
