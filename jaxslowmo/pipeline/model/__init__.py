"""A model as a list of layers: whole, as stages of a pipeline, and stacked over devices."""

from ._blocks import Block as Block
from ._blocks import model_blocks as model_blocks
from ._check import as_axes as as_axes
from ._check import check_pipeline as check_pipeline
from ._keyed import Keyed as Keyed
from ._keyed import call_signature as call_signature
from ._keyed import keyed_microbatch as keyed_microbatch
from ._layered import LayeredModel as LayeredModel
from ._layered import WithState as WithState
from ._layout import StageLayout as StageLayout
from ._layout import refuse_keys as refuse_keys
from ._loss import Loss as Loss
from ._loss import LossTerms as LossTerms
from ._loss import quotient as quotient
from ._optimizer import StagePacking as StagePacking
from ._packing import Packing as Packing
from ._packing import Place as Place
from ._runs import Run as Run
from ._runs import equal_layers as equal_layers
from ._specs import specs_of as specs_of
