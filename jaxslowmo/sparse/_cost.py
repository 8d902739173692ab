"""Rows or the whole table: which is fewer bytes on the wire."""

import math
from typing import Literal

import jax

Path = Literal["auto", "rows", "dense"]
PATHS = ("auto", "rows", "dense")


def rows_are_fewer_bytes(table: jax.ShapeDtypeStruct, num_entries: int, num_replicas: int) -> bool:
    """Whether an all-gather of rows sends no more than an all-reduce of the table.

    With w the bytes of a row, a replica sends, in rings, (R - 1) * k * (4 + w) for the rows of R
    replicas and 2 * (R - 1) / R * N * w for the table: rows win up to R * k * (4 + w) = 2 * N * w.
    """
    row_bytes = math.prod(table.shape[1:]) * table.dtype.itemsize
    return num_replicas * num_entries * (4 + row_bytes) <= 2 * table.shape[0] * row_bytes
