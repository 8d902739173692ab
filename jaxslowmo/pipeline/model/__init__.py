"""A model as a list of layers: whole, as stages of a pipeline, and stacked over devices."""

from ._blocks import Block as Block
from ._blocks import model_blocks as model_blocks
from ._check import as_axes as as_axes
from ._check import check_pipeline as check_pipeline
from ._keyed import Keyed as Keyed
from ._keyed import keyed_microbatch as keyed_microbatch
from ._layered import LayeredModel as LayeredModel
from ._layered import Loss as Loss
from ._layout import StageLayout as StageLayout
from ._slots import Place as Place
from ._slots import SlotPlan as SlotPlan
from ._slots import specs_of as specs_of
