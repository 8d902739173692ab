"""Gradients of embedding tables as row numbers and values."""

from ._all_reduce_rows import AllReduceRowsState as AllReduceRowsState
from ._all_reduce_rows import DivideBy as DivideBy
from ._all_reduce_rows import all_reduce_rows as all_reduce_rows
from ._all_reduce_rows import mean_rows as mean_rows
from ._row_gradient import OUT_OF_RANGE as OUT_OF_RANGE
from ._row_gradient import Coalesced as Coalesced
from ._row_gradient import GatheredRows as GatheredRows
from ._row_gradient import RowGradient as RowGradient
from ._row_gradient import Rows as Rows
from ._row_gradient import TouchedRows as TouchedRows
from ._row_gradient import WithRows as WithRows
from ._row_gradient import add_in_order as add_in_order
from ._row_gradient import apply_rows as apply_rows
from ._row_gradient import arrays_of as arrays_of
from ._row_gradient import coalesce as coalesce
from ._row_gradient import distinct_rows as distinct_rows
from ._row_gradient import gather_rows as gather_rows
from ._row_gradient import is_row_gradient as is_row_gradient
from ._row_gradient import no_rows as no_rows
from ._row_gradient import pad_invalid as pad_invalid
from ._row_gradient import row_gradient as row_gradient
from ._row_gradient import row_value_and_grad as row_value_and_grad
from ._row_gradient import split_rows as split_rows
