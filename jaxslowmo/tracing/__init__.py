"""What traced programs tell: of a loss about its gradients, of a transform what it sends."""

from ._as_varying import run_where_values_vary as run_where_values_vary
from ._exchanges import unnamed_exchanges as unnamed_exchanges
from ._facts import called_program as called_program
from ._full_loss import FullLoss as FullLoss
from ._full_loss import as_full_loss as as_full_loss
from ._ready_order import ready_order as ready_order
from ._unused import check_all_used as check_all_used
from ._unused import unused_parameters as unused_parameters
