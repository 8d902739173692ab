"""The programs of a stage: its forward pass, and its backward pass as a whole or in two parts."""

from ._program import WholeStage as WholeStage
from ._program import whole_stage as whole_stage
from ._split_stage import StageProgram as StageProgram
from ._split_stage import split_stage as split_stage
