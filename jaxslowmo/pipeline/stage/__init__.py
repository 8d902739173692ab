"""The programs of a stage: its forward pass, and its backward pass as a whole or in two parts."""

from ._split_stage import StageProgram as StageProgram
from ._split_stage import split_stage as split_stage
