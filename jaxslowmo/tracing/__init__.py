"""Facts from traced programs: gradients of a loss, and what a transform sends."""

from ._losses import FullLoss as FullLoss
from ._losses import Quotient as Quotient
from ._losses import as_full_loss as as_full_loss
from ._losses import as_quotient as as_quotient
from ._losses import check_all_used as check_all_used
from ._losses import check_loss as check_loss
from ._losses import ready_order as ready_order
from ._losses import unused_parameters as unused_parameters
from ._programs import CALLS as CALLS
from ._programs import Atom as Atom
from ._programs import InlinedProgram as InlinedProgram
from ._programs import Loop as Loop
from ._programs import UpdateFacts as UpdateFacts
from ._programs import collective_axes as collective_axes
from ._programs import constants_in as constants_in
from ._programs import equations_in as equations_in
from ._programs import has_side_effects as has_side_effects
from ._programs import interpret as interpret
from ._programs import loss_arguments as loss_arguments
from ._programs import read_update as read_update
from ._programs import run as run
from ._programs import scan_operands as scan_operands
from ._programs import state_types as state_types
from ._programs import trace_inline as trace_inline
