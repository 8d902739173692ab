"""What requests tell of themselves: counts in the metrics of a step, and when they are an error."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ._requests import Requests
from ._table import OWNER, Table

PREFIX = "embeddings/"


def metrics_of(requests: Requests) -> dict[str, jax.Array]:
    """See `Embeddings.metrics`."""
    counts = {
        "asked": requests.asked_for,
        "overflow": requests.overflow,
        "invalid": requests.invalid,
    }
    return {
        f"{PREFIX}{table}/{what}": count[0]
        for what, by_table in counts.items()
        for table, count in by_table.items()
    }


def refuse(
    metrics: Mapping[str, Any],
    tables: Mapping[str, Table],
    capacity: Mapping[str, int | None],
    *,
    drop: bool,
) -> None:
    """See `Embeddings.refuse`."""
    for name, table in tables.items():
        invalid = int(np.sum(metrics.get(f"{PREFIX}{name}/invalid", 0)))
        if invalid:
            raise ValueError(
                f"{OWNER}: {invalid} ids of {_features(name, table)} were not in table {name!r}, "
                f"which has the rows 0 to {table.num_rows - 1}. Batches of the host (NumPy) are "
                "looked at before they are used, and the error names the id."
            )
        overflow = 0 if drop else int(np.sum(metrics.get(f"{PREFIX}{name}/overflow", 0)))
        if overflow:
            raise ValueError(
                f"{OWNER}: {overflow} distinct ids of table {name!r} had no slot: `capacity` is "
                f'{capacity[name]} for each owner (overflow="drop" would count them as zeros).'
            )


def _features(name: str, table: Table) -> str:
    return ", ".join(f"feature {feature!r}" for feature in table.features_of(name))
