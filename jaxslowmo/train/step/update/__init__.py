"""One update of one replica: from its batch to its new state."""

from ._batch_gradients import INPUT_ROLES as INPUT_ROLES
from ._batch_gradients import ROLES as ROLES
from ._batch_gradients import AnyLookup as AnyLookup
from ._batch_gradients import Dispatched as Dispatched
from ._batch_gradients import GradientWindow as GradientWindow
from ._batch_gradients import NoTables as NoTables
from ._batch_gradients import StepInputs as StepInputs
from ._batch_gradients import WithResults as WithResults
from ._differentiate import Differentiation as Differentiation
from ._differentiate import ModelStateMode as ModelStateMode
from ._metrics import Metrics as Metrics
from ._metrics import averaged as averaged
from ._metrics import joined as joined
from ._optimized import USE_CHAIN as USE_CHAIN
from ._parts import StepParts as StepParts
from ._replica_step import ReplicaStep as ReplicaStep
