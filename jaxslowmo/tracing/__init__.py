"""What the traced program of a loss tells about its gradients; nothing runs on a device."""

from ._facts import called_program as called_program
from ._facts import scan_operands as scan_operands
from ._full_loss import FullLoss as FullLoss
from ._full_loss import as_full_loss as as_full_loss
from ._ready_order import ready_order as ready_order
from ._unused import check_all_used as check_all_used
from ._unused import unused_parameters as unused_parameters
