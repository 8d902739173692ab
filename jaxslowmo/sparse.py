"""Gradients of embedding tables as row numbers and values, for `js.sparse`."""

from .gradients.sparse import AllReduceRowsState as AllReduceRowsState
from .gradients.sparse import Coalesced as Coalesced
from .gradients.sparse import GatheredRows as GatheredRows
from .gradients.sparse import RowGradient as RowGradient
from .gradients.sparse import TouchedRows as TouchedRows
from .gradients.sparse import all_reduce_rows as all_reduce_rows
from .gradients.sparse import apply_rows as apply_rows
from .gradients.sparse import coalesce as coalesce
from .gradients.sparse import gather_rows as gather_rows
from .gradients.sparse import row_gradient as row_gradient
from .gradients.sparse import row_value_and_grad as row_value_and_grad
