"""Schedules of a pipeline as data: which stage computes what, in which order. No jax here."""

from ._by_name import KINDS as KINDS
from ._by_name import by_name as by_name
from ._from_table import from_table as from_table
from .drawing import grid as grid
from .drawing import picture as picture
from .kinds import gpipe as gpipe
from .kinds import interleaved as interleaved
from .kinds import lockstep as lockstep
from .kinds import one_f_one_b as one_f_one_b
from .kinds import zbv as zbv
from .kinds import zero_bubble as zero_bubble
from .table import Operation as Operation
from .table import Schedule as Schedule
from .table import Simulation as Simulation
from .table import Tick as Tick
