"""What a schedule is: a table of operations, checked, ordered, and how long it takes."""

from ._costs import Costs as Costs
from ._costs import CostTable as CostTable
from ._costs import as_time as as_time
from ._costs import cost_table as cost_table
from ._rows import TORCH_LETTERS as TORCH_LETTERS
from ._rows import Cell as Cell
from ._rows import Kind as Kind
from ._rows import Operation as Operation
from ._schedule import Schedule as Schedule
from ._simulate import Simulation as Simulation
from ._simulate import Timed as Timed
from ._sizes import as_size as as_size
from ._sizes import as_sizes as as_sizes
from ._sizes import check_chunks as check_chunks
from ._ticks import Tick as Tick
