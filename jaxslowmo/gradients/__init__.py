"""Transforms of gradients before the optimizer: averaging, sums of rows, scaling, clipping."""

from ..tracing import check_all_used as check_all_used
from ..tracing import ready_order as ready_order
from ..tracing import unused_parameters as unused_parameters
from ._accumulate import AccumulateState as AccumulateState
from ._accumulate import accumulate as accumulate
from ._all_reduce import AllReduceGradientsState as AllReduceGradientsState
from ._all_reduce import all_reduce_gradients as all_reduce_gradients
from ._clip import ClipByGlobalNormState as ClipByGlobalNormState
from ._clip import clip_by_global_norm as clip_by_global_norm
from ._demo import demo as demo
from ._skip_unused import SkipUnusedState as SkipUnusedState
from ._skip_unused import skip_unused as skip_unused
from ._skip_unused import unused_names as unused_names
from .precision import DynamicLossScaleState as DynamicLossScaleState
from .precision import Policy as Policy
from .precision import dynamic_loss_scale as dynamic_loss_scale
from .precision import loss_scale_of as loss_scale_of
