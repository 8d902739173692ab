"""Traces of torch's operations as jax's: torchax, plus what its own environment lacks."""

from . import _torchax as _torchax  # first: its error names missing packages
from ._batch_norm import cumulative_averages as cumulative_averages
from ._environment import TracingEnvironment as TracingEnvironment
from ._environment import environment as environment
from ._environment import tracing as tracing
from ._torchax import Tensor as Tensor
from ._views import View as View
