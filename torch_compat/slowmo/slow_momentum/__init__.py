"""Slow momentum: its view of the optimizer, its anchor and velocity, and its steps."""

from ._groups import Groups as Groups
from ._momentum import SlowMomentum as SlowMomentum
from ._momentum import Span as Span
from ._rates import Rates as Rates
from ._steps import SlowSteps as SlowSteps
