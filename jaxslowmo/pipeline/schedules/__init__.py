"""Pipeline schedules as data: what each stage computes, and in which order. Needs no jax."""

from ._from_text import KINDS as KINDS
from ._from_text import by_name as by_name
from ._from_text import from_table as from_table
from ._kinds import gpipe as gpipe
from ._kinds import interleaved as interleaved
from ._kinds import one_f_one_b as one_f_one_b
from ._kinds import zbv as zbv
from ._kinds import zero_bubble as zero_bubble
from ._lockstep import lockstep as lockstep
from ._operations import Operation as Operation
from ._operations import Simulation as Simulation
from ._operations import Tick as Tick
from ._schedule import Schedule as Schedule
