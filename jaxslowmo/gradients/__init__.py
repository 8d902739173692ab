"""Transforms of gradients before the optimizer: averaging, sums of rows, scaling, clipping."""

from ..tracing import check_all_used as check_all_used
from ..tracing import ready_order as ready_order
from ..tracing import unused_parameters as unused_parameters
from .clipping import ClipByGlobalNormState as ClipByGlobalNormState
from .clipping import clip_by_global_norm as clip_by_global_norm
from .precision import DynamicLossScaleState as DynamicLossScaleState
from .precision import Policy as Policy
from .precision import dynamic_loss_scale as dynamic_loss_scale
from .precision import loss_scale_of as loss_scale_of
from .reducer import AccumulateState as AccumulateState
from .reducer import AllReduceGradientsState as AllReduceGradientsState
from .reducer import SkipUnusedState as SkipUnusedState
from .reducer import accumulate as accumulate
from .reducer import all_reduce_gradients as all_reduce_gradients
from .reducer import demo as demo
from .reducer import skip_unused as skip_unused
from .reducer import unused_names as unused_names
