"""A stage of a model as programs: its forward pass, and its backward pass as a whole."""

from ._flat import struct_of as struct_of
from ._program import Part as Part
from ._program import WholeStage as WholeStage
from ._program import check_count as check_count
from ._program import nowhere as nowhere
from ._program import traced as traced
from ._program import whole_stage as whole_stage
