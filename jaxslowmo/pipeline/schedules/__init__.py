"""Schedules of a pipeline as data: which stage computes what, in which order. No jax here."""

from ._by_name import KINDS as KINDS
from ._by_name import by_name as by_name
from ._flat import gpipe as gpipe
from ._flat import one_f_one_b as one_f_one_b
from ._interleaved import interleaved as interleaved
from ._operation import Operation as Operation
from ._schedule import Schedule as Schedule
from ._simulate import Simulation as Simulation
from ._ticks import Tick as Tick
from ._zero_bubble import zero_bubble as zero_bubble
