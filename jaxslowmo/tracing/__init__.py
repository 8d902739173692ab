"""What traced programs tell: of a loss about its gradients, of a transform what it sends."""

from ._flat import Atom as Atom
from ._flat import Flat as Flat
from ._flat import flattened as flattened
from ._flat import has_side_effects as has_side_effects
from ._flat import run as run
from ._jaxprs import axes_sent_over as axes_sent_over
from ._jaxprs import called_program as called_program
from ._jaxprs import collective_axes as collective_axes
from ._jaxprs import equations_in as equations_in
from ._jaxprs import interpret as interpret
from ._jaxprs import programs_in as programs_in
from ._jaxprs import run_where_values_vary as run_where_values_vary
from ._jaxprs import scan_operands as scan_operands
from ._jaxprs import scan_options as scan_options
from ._jaxprs import unnamed_exchanges as unnamed_exchanges
from ._losses import FullLoss as FullLoss
from ._losses import as_full_loss as as_full_loss
from ._losses import check_all_used as check_all_used
from ._losses import ready_order as ready_order
from ._losses import unused_parameters as unused_parameters
