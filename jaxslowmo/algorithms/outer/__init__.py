"""The machinery of slowmo and diloco: an outer optimizer on an anchor."""

from ._anchor import shards_state as shards_state
from ._element_wise import element_wise as element_wise
from ._read import read_anchor as read_anchor
from ._state import ALONE as ALONE
from ._state import OuterState as OuterState
from ._step import NO_RATE as NO_RATE
from ._step import Outer as Outer
from ._step import OuterRate as OuterRate
