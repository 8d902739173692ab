"""What the embedding benchmarks train: a DLRM on drawn ids with Zipf's frequencies. Only NumPy."""

import itertools

import numpy as np

HOSTS = 4
TABLES, ROWS, DIM = 8, 200_000, 32  # rows of each table
EXPONENT = 1.05
DENSE, BATCH = 16, 2048  # dense columns; examples of one host
BATCHES = 12  # drawn, and used in turn
BOTTOM, TOP = (128,), (256, 128)
LEARNING_RATE = 0.01

# Steps of a turn.
STEPS = {
    "compute alone": 16,
    "unpipelined": 12,
    "exact": 12,
    "stale": 12,
    "patched": 12,
}


def batches(rank: int) -> list[dict[str, np.ndarray]]:
    """The examples of one host: `dense`, `label`, and ids by the name of their table."""
    rng = np.random.default_rng(rank)
    total = np.cumsum(np.arange(1, ROWS + 1, dtype=np.float64) ** -EXPONENT)
    found = []
    for _ in range(BATCHES):
        draws = rng.random((TABLES, BATCH)) * total[-1]
        ids = np.searchsorted(total, draws).clip(0, ROWS - 1).astype(np.int32)
        found.append(
            {
                "dense": rng.standard_normal((BATCH, DENSE), np.float32),
                "label": rng.integers(0, 2, BATCH).astype(np.float32),
                **{f"t{i}": row for i, row in enumerate(ids)},
            }
        )
    return found


def needed_bytes() -> dict[str, float]:
    """Bytes that a host must send per step: means over batches, without padding and headers."""
    distinct = [
        sum(np.unique(batch[f"t{i}"]).size for i in range(TABLES))
        for rank in range(HOSTS)
        for batch in batches(rank)
    ]
    rows = float(np.mean(distinct)) * (1 - 1 / HOSTS)  # a share of them lies on the host itself
    return {"ids": 4 * rows, "vectors": 4 * DIM * rows, "row gradients": 4 * DIM * rows}


def num_dense_parameters() -> int:
    """Of the DLRM without its tables."""
    vectors = 1 + TABLES
    bottom = (DENSE, *BOTTOM, DIM)
    top = (DIM + vectors * (vectors - 1) // 2, *TOP, 1)
    pairs = [*itertools.pairwise(bottom), *itertools.pairwise(top)]
    return sum(a * b + b for a, b in pairs)
