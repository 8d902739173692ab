"""A model as a list of layers: whole, as stages of a pipeline, and stacked over devices."""

from ._buffer_packing import BufferPacking as BufferPacking
from ._layered import LayeredModel as LayeredModel
from ._layered import Loss as Loss
from ._layered import LossTerms as LossTerms
from ._layered import Run as Run
from ._layered import WithState as WithState
from ._layered import quotient as quotient
from ._layered import without_state as without_state
from ._microbatches import KeyedMicrobatch as KeyedMicrobatch
from ._microbatches import local_microbatches as local_microbatches
from ._microbatches import microbatch_specs as microbatch_specs
from ._microbatches import select_microbatch as select_microbatch
from ._microbatches import split_microbatches as split_microbatches
from ._optimizer import StagePacking as StagePacking
from ._stage_layout import Block as Block
from ._stage_layout import StageLayout as StageLayout
from ._stage_layout import model_blocks as model_blocks
