"""The kinds of schedules: each a function that makes the table."""

from ._build import round_robin as round_robin
from ._flat import gpipe as gpipe
from ._flat import one_f_one_b as one_f_one_b
from ._interleaved import interleaved as interleaved
from ._lockstep import lockstep as lockstep
from ._zbv import zbv as zbv
from ._zero_bubble import zero_bubble as zero_bubble
