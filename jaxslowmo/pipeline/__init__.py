"""Pipeline parallelism: train one model in several stages, each on its own devices."""

from ..gradients.tied import TiedGroup as TiedGroup
from ..gradients.tied import TiedGroups as TiedGroups
from ..gradients.tied import sum_tied_gradients as sum_tied_gradients
from . import schedules as schedules
from ._host_pipeline import HostPipeline as HostPipeline
from ._make_pipeline import Executor as Executor
from ._make_pipeline import pipelined as pipelined
from ._partition import LayerFlops as LayerFlops
from ._partition import count_layer_params as count_layer_params
from ._partition import layer_flops as layer_flops
from ._partition import partition_balanced as partition_balanced
from ._partition import partition_by_cost as partition_by_cost
from ._partition import partition_uniform as partition_uniform
from ._pipelined import Pipelined as Pipelined
from ._split_stage import StageProgram as StageProgram
from ._split_stage import split_stage as split_stage
from .model import LayeredModel as LayeredModel
from .model import StageLayout as StageLayout
from .schedules import Schedule as Schedule
