"""Embedding tables that the devices of a replica share."""

from ._bags import Bags, bags, jagged
from ._embeddings import Embeddings, embeddings
from ._exchange import PREFIX, Requests, read_rows, refresh_vectors, send_rows
from ._optimizers import (
    AdamMoments,
    Kept,
    RowUpdate,
    RowwiseOptimizer,
    RowwiseState,
    rowwise_adagrad,
    rowwise_adam,
    rowwise_sgd,
)
from ._step_tables import (
    BatchWithVectors,
    PrefetchedRows,
    PrefetchOptions,
    accumulate_rows,
    empty_rows,
    init_table_state,
    replicate_tables,
    row_means,
    tables_for_mesh,
)
from ._stores import Table, WithTables

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
