"""Temporary."""
from ..split import StageProgram as WholeStage
from ..split import split_stage as whole_stage
