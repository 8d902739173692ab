"""The common implementation of slowmo and diloco: an outer optimizer that steps an anchor."""

from ._anchor import shards_state as shards_state
from ._fragments import Fragments as Fragments
from ._outer import Outer as Outer
from ._placement import Placement as Placement
from ._read_anchor import read_anchor as read_anchor
from ._state import ALONE as ALONE
from ._state import NO_RATE as NO_RATE
from ._state import OuterRate as OuterRate
from ._state import OuterState as OuterState
