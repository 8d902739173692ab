"""A model as a list of layers: whole, as stages of a pipeline, and stacked over devices."""

from ._blocks import Block as Block
from ._blocks import Run as Run
from ._blocks import equal_layers as equal_layers
from ._blocks import model_blocks as model_blocks
from ._calls import Keyed as Keyed
from ._calls import Loss as Loss
from ._calls import LossTerms as LossTerms
from ._calls import call_signature as call_signature
from ._calls import keyed_microbatch as keyed_microbatch
from ._calls import quotient as quotient
from ._layered import LayeredModel as LayeredModel
from ._layered import WithState as WithState
from ._layout import StageLayout as StageLayout
from ._layout import refuse_keys as refuse_keys
from ._optimizer import StagePacking as StagePacking
from ._packing import Packing as Packing
from ._packing import Place as Place
