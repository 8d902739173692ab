"""What algorithms and gradient transforms of your own are made of."""

from .transform import Carry as Carry
from .transform import Event as Event
from .transform import Every as Every
from .transform import ExchangeState as ExchangeState
from .transform import OwnReductionState as OwnReductionState
from .transform import Reduction as Reduction
from .transform import ReplicaGroup as ReplicaGroup
from .transform import UpdateContext as UpdateContext
from .transform import phase_name as phase_name
from .transform import phase_scope as phase_scope
from .transform import remembers_parameters as remembers_parameters
from .transform import run_if as run_if
