"""One update as one replica sees it: from its batch to its new state."""

from ._differentiate import Differentiation as Differentiation
from ._differentiate import ModelStateMode as ModelStateMode
from ._loss import Dispatched as Dispatched
from ._loss import WithResults as WithResults
from ._optimized import USE_CHAIN as USE_CHAIN
from ._parts import GradientOrder as GradientOrder
from ._parts import StepParts as StepParts
from ._parts import Validate as Validate
from ._replica_step import ReplicaStep as ReplicaStep
from ._window import GIVEN_ROLES as GIVEN_ROLES
from ._window import ROLES as ROLES
from ._window import Given as Given
from ._window import GradientWindow as GradientWindow
from ._window import Metrics as Metrics
