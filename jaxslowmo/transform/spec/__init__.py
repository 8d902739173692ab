"""Declarations of gradient transforms, and building blocks of exchanges."""

from .._due import Every as Every
from .._due import phase_scope as phase_scope
from .._due import run_if as run_if
from .._gradients import OwnReductionState as OwnReductionState
from .._gradients import Reduction as Reduction
