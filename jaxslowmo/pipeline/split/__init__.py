"""A stage of a model as programs: forward, and the backward pass in two parts."""

from ._stage import StageProgram as StageProgram
from ._stage import split_stage as split_stage
