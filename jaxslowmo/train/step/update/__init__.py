"""One update as one replica sees it: from its batch to its new state."""

from ._differentiate import Differentiation as Differentiation
from ._model_state import ModelStateMode as ModelStateMode
from ._replica_step import GradientOrder as GradientOrder
from ._replica_step import StepParts as StepParts
from ._window import ROLES as ROLES
from ._window import GradientWindow as GradientWindow
from ._window import Metrics as Metrics
