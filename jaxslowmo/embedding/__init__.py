"""Embedding tables that the devices of a replica share."""

from ._bags import Bags as Bags
from ._bags import bags as bags
from ._embeddings import Embeddings as Embeddings
from ._make import embeddings as embeddings
from ._optimizers import RowwiseOptimizer as RowwiseOptimizer
from ._optimizers import RowwiseState as RowwiseState
from ._optimizers import rowwise_adagrad as rowwise_adagrad
from ._optimizers import rowwise_sgd as rowwise_sgd
from ._requests import Requests as Requests
from ._table import Table as Table
from ._table import WithTables as WithTables
from .lookup import Ahead as Ahead
from .lookup import Carry as Carry
from .lookup import Lookup as Lookup
from .lookup import WithVectors as WithVectors
from .lookup import added_rows as added_rows
from .lookup import empty_rows as empty_rows
from .lookup import lookup_of as lookup_of
from .lookup import rows_are_finite as rows_are_finite
from .lookup import summed as summed
