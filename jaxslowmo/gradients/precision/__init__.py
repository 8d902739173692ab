"""Mixed precision: the dtype a loss computes in, and a loss scale for gradients in float16."""

from ._loss_scale import dynamic_loss_scale as dynamic_loss_scale
from ._mixed_precision import DynamicLossScaleState as DynamicLossScaleState
from ._mixed_precision import Policy as Policy
from ._mixed_precision import anywhere as anywhere
from ._mixed_precision import as_before_if as as_before_if
from ._mixed_precision import check_place as check_place
from ._mixed_precision import computing_in as computing_in
from ._mixed_precision import loss_scale_of as loss_scale_of
from ._mixed_precision import scale_metrics as scale_metrics
from ._mixed_precision import scale_state as scale_state
from ._mixed_precision import scaled_value_and_grad as scaled_value_and_grad
from ._mixed_precision import unless_overflow as unless_overflow
from ._mixed_precision import was_skipped as was_skipped
from ._mixed_precision import zero_if as zero_if
