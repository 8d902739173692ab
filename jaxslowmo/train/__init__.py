"""Training with the transforms of this library: state, step, loop and hooks."""

from ._batches import own_parts as own_parts
from ._hyperparams import set_hyperparams as set_hyperparams
from ._loop import Evaluate as Evaluate
from ._loop import Hook as Hook
from ._loop import Log as Log
from ._loop import host_mean as host_mean
from ._loop import train_loop as train_loop
from ._train_state import ReplicaState as ReplicaState
from ._train_state import TrainState as TrainState
from ._train_state import update_count as update_count
from ._uneven import WeightedBatch as WeightedBatch
from ._uneven import uneven_batches as uneven_batches
from ._with_exchange import ExchangingStep as ExchangingStep
from ._with_exchange import with_exchange as with_exchange
from .input import InputPipelineReport as InputPipelineReport
from .input import InputStageTimes as InputStageTimes
from .input import StepResult as StepResult
from .input import TrainPipeline as TrainPipeline
from .step import AheadStep as AheadStep
from .step import GradientWindow as GradientWindow
from .step import TrainStep as TrainStep
from .step import bounded as bounded
from .step import make_train_step as make_train_step
from .step import recommended_compiler_options as recommended_compiler_options

# What users may use; the rest is for other packages.
__all__ = [
    "AheadStep",
    "Evaluate",
    "GradientWindow",
    "Hook",
    "InputPipelineReport",
    "InputStageTimes",
    "Log",
    "StepResult",
    "TrainPipeline",
    "TrainState",
    "TrainStep",
    "WeightedBatch",
    "bounded",
    "host_mean",
    "make_train_step",
    "recommended_compiler_options",
    "set_hyperparams",
    "train_loop",
    "uneven_batches",
    "with_exchange",
]
