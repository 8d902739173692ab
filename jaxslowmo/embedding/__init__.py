"""Embedding tables that the devices of a replica share."""

from ._bags import Bags as Bags
from ._bags import bags as bags
from ._embeddings import Embeddings as Embeddings
from ._lookup import patched_rows as patched_rows
from ._lookup import read_rows as read_rows
from ._lookup import send_rows as send_rows
from ._lookup import typed_as_equal as typed_as_equal
from ._make import embeddings as embeddings
from ._optimizers import RowwiseOptimizer as RowwiseOptimizer
from ._optimizers import RowwiseState as RowwiseState
from ._optimizers import rowwise_adagrad as rowwise_adagrad
from ._optimizers import rowwise_sgd as rowwise_sgd
from ._requests import Requests as Requests
from ._table import Table as Table
from ._table import WithTables as WithTables
