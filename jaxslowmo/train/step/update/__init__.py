"""One update as one replica sees it: from its batch to its new state."""

from ._differentiate import Differentiation as Differentiation
from ._given import GIVEN_ROLES as GIVEN_ROLES
from ._given import Ahead as Ahead
from ._given import Carry as Carry
from ._given import Given as Given
from ._loss import WithVectors as WithVectors
from ._loss import of_vectors as of_vectors
from ._model_state import ModelStateMode as ModelStateMode
from ._replica_step import GradientOrder as GradientOrder
from ._replica_step import StepParts as StepParts
from ._replica_step import Validate as Validate
from ._shards import Tables as Tables
from ._shards import on_shards as on_shards
from ._table_chain import table_chain as table_chain
from ._told import USE_CHAIN as USE_CHAIN
from ._window import ROLES as ROLES
from ._window import GradientWindow as GradientWindow
from ._window import Metrics as Metrics
from ._with_tables import TableParts as TableParts
