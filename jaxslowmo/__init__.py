"""Training one model on many machines with a slow network between them.

`import jaxslowmo as js` gives optax transforms that communicate rarely (`local_sgd`, `slowmo`,
`diloco`), a bucketed gradient all-reduce, a training step that uses them, and a report of the bytes
that a step sends (`comm_report`).
"""

import sys as _sys
from importlib import import_module as _import_module
from typing import TYPE_CHECKING
from warnings import warn as _warn

from ._version import __version__ as __version__

# A package is imported at the first use of one of its names: all of them take a second, and
# programs without jax, such as those with torch, also use `jaxslowmo.topology`.
if TYPE_CHECKING:
    from . import algorithms as algorithms
    from . import embedding as embedding
    from . import gradients as gradients
    from . import islands as islands
    from . import mesh as mesh
    from . import pipeline as pipeline
    from . import reports as reports
    from . import sparse as sparse
    from . import spec as spec
    from . import topology as topology
    from . import train as train
    from .algorithms import des_loc as des_loc
    from .algorithms import diloco as diloco
    from .algorithms import hierarchical_local_sgd as hierarchical_local_sgd
    from .algorithms import layers as layers
    from .algorithms import local_sgd as local_sgd
    from .algorithms import noloco as noloco
    from .algorithms import norm_weighted as norm_weighted
    from .algorithms import only_finite as only_finite
    from .algorithms import rda as rda
    from .algorithms import read_anchor as read_anchor
    from .algorithms import sgp as sgp
    from .algorithms import slow_momentum as slow_momentum
    from .algorithms import slowmo as slowmo
    from .algorithms import sparta as sparta
    from .collectives import codecs as codecs
    from .embedding import Table as Table
    from .embedding import embeddings as embeddings
    from .embedding import rowwise_adagrad as rowwise_adagrad
    from .embedding import rowwise_adam as rowwise_adam
    from .embedding import rowwise_sgd as rowwise_sgd
    from .gradients import all_reduce_gradients as all_reduce_gradients
    from .gradients import clip_by_global_norm as clip_by_global_norm
    from .gradients import demo as demo
    from .gradients import dynamic_loss_scale as dynamic_loss_scale
    from .gradients import hooks as hooks
    from .gradients import loss_scale_of as loss_scale_of
    from .mesh import check_in_sync as check_in_sync
    from .mesh import consensus as consensus
    from .mesh import make_mesh as make_mesh
    from .mesh import replicate as replicate
    from .mesh import virtual_mesh as virtual_mesh
    from .pipeline import LayeredModel as LayeredModel
    from .pipeline import partition_balanced as partition_balanced
    from .pipeline import partition_by_cost as partition_by_cost
    from .pipeline import partition_uniform as partition_uniform
    from .pipeline import pipelined as pipelined
    from .pipeline import schedules as schedules
    from .reports import comm_report as comm_report
    from .reports import comm_report_of as comm_report_of
    from .sparse import row_value_and_grad as row_value_and_grad
    from .train import TrainPipeline as TrainPipeline
    from .train import TrainState as TrainState
    from .train import bounded as bounded
    from .train import host_mean as host_mean
    from .train import make_train_step as make_train_step
    from .train import recommended_compiler_options as recommended_compiler_options
    from .train import set_hyperparams as set_hyperparams
    from .train import train_loop as train_loop
    from .train import with_exchange as with_exchange
    from .transform import Algorithm as Algorithm
    from .transform import GradientSpec as GradientSpec
    from .transform import GradientTransform as GradientTransform
    from .transform import ParameterTransform as ParameterTransform
    from .transform import chain as chain
    from .transform import every as every
    from .transform import gradient_transform as gradient_transform
    from .transform import init as init
    from .tree import assign_buckets as assign_buckets
else:  # hidden from type checkers, to which `__getattr__` would make every name a valid one
    # Which package has which of the names above.
    _NAMES = {
        "algorithms": (
            "des_loc diloco hierarchical_local_sgd layers local_sgd noloco norm_weighted "
            "only_finite rda read_anchor sgp slow_momentum slowmo sparta"
        ),
        "embedding": "Table embeddings rowwise_adagrad rowwise_adam rowwise_sgd",
        "gradients": (
            "all_reduce_gradients clip_by_global_norm demo dynamic_loss_scale loss_scale_of"
        ),
        "mesh": "check_in_sync consensus make_mesh replicate virtual_mesh",
        "pipeline": "LayeredModel partition_balanced partition_by_cost partition_uniform pipelined",
        "reports": "comm_report comm_report_of",
        "sparse": "row_value_and_grad",
        "train": (
            "TrainPipeline TrainState bounded host_mean make_train_step "
            "recommended_compiler_options set_hyperparams train_loop with_exchange"
        ),
        "transform": (
            "Algorithm GradientSpec GradientTransform ParameterTransform chain every "
            "gradient_transform init"
        ),
        "tree": "assign_buckets",
    }
    # Where the modules above are.
    _MODULES = {
        "algorithms": "algorithms",
        "codecs": "collectives.codecs",
        "embedding": "embedding",
        "gradients": "gradients",
        "hooks": "gradients.hooks",
        "islands": "islands",
        "mesh": "mesh",
        "pipeline": "pipeline",
        "reports": "reports",
        "schedules": "pipeline.schedules",
        "sparse": "sparse",
        "spec": "spec",
        "topology": "topology",
        "train": "train",
    }
    # Names of 0.2 that these modules have now: they warn, and go in 0.5.
    _MOVED = {
        "embedding": "Bags WithTables bags",
        "gradients": (
            "Policy accumulate check_all_used ready_order skip_unused unused_names "
            "unused_parameters"
        ),
        "mesh": "check_same_tree",
        "reports": "measured",
        "sparse": "all_reduce_rows",
        "spec": (
            "Carry Event ExchangeState ReplicaGroup UpdateContext phase_name remembers_parameters"
        ),
        "train": "Evaluate Log WeightedBatch uneven_batches",
    }
    _HOMES = _MODULES | {name: home for home, names in _NAMES.items() for name in names.split()}
    __all__ = sorted(_HOMES)

    _MOVED_TO = {name: home for home, names in _MOVED.items() for name in names.split()}

    def __getattr__(name: str) -> object:
        """Import and return a name of `_HOMES`, or one that has moved."""
        if home := _MOVED_TO.get(name):
            message = f"jaxslowmo.{name} is jaxslowmo.{home}.{name}; the older name goes in 0.5."
            _warn(message, DeprecationWarning, stacklevel=2)
            return getattr(_import_module(f".{home}", __name__), name)
        if name not in _HOMES:
            message = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(message, name=name, obj=_sys.modules[__name__])
        try:
            home = _import_module(f".{_HOMES[name]}", __name__)
        except AttributeError as error:  # `hasattr` and `from` would hide it
            raise ImportError(f"cannot import jaxslowmo.{_HOMES[name]}: {error}") from error
        value = home if name in _MODULES else getattr(home, name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*_HOMES, *globals()} - {"TYPE_CHECKING"})
