"""Functions of torch as functions of jax: torch's traces, run by torchax's operations."""

from . import _torchax as _torchax  # first: its error names missing packages
from ._functions import cumulative_averages as cumulative_averages
from ._internals import OptimizedModule as OptimizedModule
from ._internals import as_parameter as as_parameter
from ._internals import has_changed as has_changed
from ._lowerings import Lowerings as Lowerings
from ._lowerings import decompositions as decompositions
from ._lowerings import lowerings as lowerings
from ._program import Input as Input
from ._program import call as call
from ._torchax import torch_dtype as torch_dtype
from ._values import Values as Values
from ._values import constant as constant
