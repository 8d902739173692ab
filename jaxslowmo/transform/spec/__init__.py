"""What algorithms and gradient transforms of your own are made of."""

from .._algorithm import Carry as Carry
from .._algorithm import Event as Event
from .._algorithm import UpdateContext as UpdateContext
from .._due import Every as Every
from .._due import phase_scope as phase_scope
from .._due import run_if as run_if
from .._gradients import OwnReductionState as OwnReductionState
from .._gradients import Reduction as Reduction
from .._optax_states import remembers_parameters as remembers_parameters
from .._parameter_transform import ExchangeState as ExchangeState
from .._parameter_transform import phase_name as phase_name
from .._replica_group import ReplicaGroup as ReplicaGroup
