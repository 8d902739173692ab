"""Embedding tables that the devices of a replica share."""

from ._bags import Bags as Bags
from ._bags import bags as bags
from ._bags import jagged as jagged
from ._embeddings import Embeddings as Embeddings
from ._embeddings import embeddings as embeddings
from ._exchange import PREFIX as PREFIX
from ._exchange import Requests as Requests
from ._exchange import patched_rows as patched_rows
from ._exchange import read_rows as read_rows
from ._exchange import send_rows as send_rows
from ._optimizers import AdamMoments as AdamMoments
from ._optimizers import Kept as Kept
from ._optimizers import RowUpdate as RowUpdate
from ._optimizers import RowwiseOptimizer as RowwiseOptimizer
from ._optimizers import RowwiseState as RowwiseState
from ._optimizers import rowwise_adagrad as rowwise_adagrad
from ._optimizers import rowwise_adam as rowwise_adam
from ._optimizers import rowwise_sgd as rowwise_sgd
from ._step_tables import Ahead as Ahead
from ._step_tables import Carry as Carry
from ._step_tables import WithVectors as WithVectors
from ._step_tables import added_rows as added_rows
from ._step_tables import empty_rows as empty_rows
from ._step_tables import row_means as row_means
from ._step_tables import stacked_table_state as stacked_table_state
from ._step_tables import stacked_tables as stacked_tables
from ._step_tables import tables_on as tables_on
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
