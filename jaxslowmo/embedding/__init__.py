"""Embedding tables that the devices of a replica share."""

from ._bags import Bags as Bags
from ._bags import bags as bags
from ._bags import jagged as jagged
from ._embeddings import Embeddings as Embeddings
from ._embeddings import embeddings as embeddings
from ._exchange import PREFIX as PREFIX
from ._exchange import Requests as Requests
from ._exchange import read_rows as read_rows
from ._exchange import refresh_vectors as refresh_vectors
from ._exchange import send_rows as send_rows
from ._optimizers import AdamMoments as AdamMoments
from ._optimizers import Kept as Kept
from ._optimizers import RowUpdate as RowUpdate
from ._optimizers import RowwiseOptimizer as RowwiseOptimizer
from ._optimizers import RowwiseState as RowwiseState
from ._optimizers import rowwise_adagrad as rowwise_adagrad
from ._optimizers import rowwise_adam as rowwise_adam
from ._optimizers import rowwise_sgd as rowwise_sgd
from ._step_tables import BatchWithVectors as BatchWithVectors
from ._step_tables import PrefetchedRows as PrefetchedRows
from ._step_tables import PrefetchOptions as PrefetchOptions
from ._step_tables import accumulate_rows as accumulate_rows
from ._step_tables import empty_rows as empty_rows
from ._step_tables import init_table_state as init_table_state
from ._step_tables import replicate_tables as replicate_tables
from ._step_tables import row_means as row_means
from ._step_tables import tables_for_mesh as tables_for_mesh
from ._table import Table as Table
from ._table import WithTables as WithTables

# What users may use; the rest is for other packages.
__all__ = [
    "AdamMoments",
    "Bags",
    "Embeddings",
    "Kept",
    "Requests",
    "RowUpdate",
    "RowwiseOptimizer",
    "RowwiseState",
    "Table",
    "WithTables",
    "bags",
    "embeddings",
    "jagged",
    "rowwise_adagrad",
    "rowwise_adam",
    "rowwise_sgd",
]
