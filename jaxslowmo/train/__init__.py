"""Training with the transforms of this library: state, step, loop and hooks."""

from ._batches import addressable_shard_numbers
from ._loop import Evaluate, Hook, Log, host_mean, train_loop
from ._train_pipeline import InputPipelineReport, InputStageTimes, StepResult, TrainPipeline
from ._train_state import ReplicaState, TrainState, set_hyperparams, update_count
from ._uneven import WeightedBatch, uneven_batches
from ._with_exchange import ExchangingStep, with_exchange
from .step import (
    AheadStep,
    GradientWindow,
    TrainStep,
    bounded,
    make_train_step,
    recommended_compiler_options,
)

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
