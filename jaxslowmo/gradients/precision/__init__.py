"""Mixed precision: in what a loss computes, and the scale that keeps small gradients in float16."""

from ._loss_scale import dynamic_loss_scale as dynamic_loss_scale
from ._overflow import as_before_if as as_before_if
from ._overflow import unless_overflow as unless_overflow
from ._overflow import zero_if as zero_if
from ._policy import Policy as Policy
from ._policy import computing_in as computing_in
from ._scale_of import DynamicLossScaleState as DynamicLossScaleState
from ._scale_of import check_place as check_place
from ._scale_of import loss_scale_of as loss_scale_of
from ._scale_of import scale_metrics as scale_metrics
from ._scale_of import scale_state as scale_state
from ._scale_of import was_skipped as was_skipped
from ._scaled_gradients import scaled_value_and_grad as scaled_value_and_grad
