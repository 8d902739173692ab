"""Transforms of gradients before the optimizer: averaging, sums of rows, scaling, clipping."""

from ..tracing import check_all_used, ready_order, unused_parameters
from ._accumulate import AccumulateState, accumulate
from ._all_reduce import AllReduceGradientsState, ReadyOrder, all_reduce_gradients, mean_gradients
from ._clip import ClipByGlobalNormState, clip_by_global_norm
from ._demo import demo
from ._skip_unused import SkipUnusedState, skip_unused, unused_names
from .precision import DynamicLossScaleState, Policy, dynamic_loss_scale, loss_scale_of

# What users may use; the rest is for other packages.
__all__ = [
    "AccumulateState",
    "AllReduceGradientsState",
    "ClipByGlobalNormState",
    "DynamicLossScaleState",
    "Policy",
    "SkipUnusedState",
    "accumulate",
    "all_reduce_gradients",
    "check_all_used",
    "clip_by_global_norm",
    "demo",
    "dynamic_loss_scale",
    "loss_scale_of",
    "ready_order",
    "skip_unused",
    "unused_names",
    "unused_parameters",
]
