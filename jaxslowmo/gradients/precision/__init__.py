"""Mixed precision: the dtype a loss computes in, and a loss scale for gradients in float16."""

from ._loss_scale import dynamic_loss_scale as dynamic_loss_scale
from ._mixed_precision import DynamicLossScaleState as DynamicLossScaleState
from ._mixed_precision import Policy as Policy
from ._mixed_precision import any_over as any_over
from ._mixed_precision import apply_policy as apply_policy
from ._mixed_precision import check_nesting as check_nesting
from ._mixed_precision import did_skip as did_skip
from ._mixed_precision import guard_overflow as guard_overflow
from ._mixed_precision import loss_scale_of as loss_scale_of
from ._mixed_precision import revert_if as revert_if
from ._mixed_precision import scale_metrics as scale_metrics
from ._mixed_precision import scale_state as scale_state
from ._mixed_precision import scaled_value_and_grad as scaled_value_and_grad
from ._mixed_precision import zero_if as zero_if
