"""Parameter transforms: what one says of itself, the class, and how one is assembled."""

from ._assembly import parameter_transform as parameter_transform
from ._spec import CheckpointSpec as CheckpointSpec
from ._spec import ExchangeSpec as ExchangeSpec
from ._spec import LayoutSpec as LayoutSpec
from ._spec import Others as Others
from ._spec import ScheduleSpec as ScheduleSpec
from ._spec import TransformSpec as TransformSpec
from ._transform import ParameterTransform as ParameterTransform
from ._transform import phase_name as phase_name
