"""Collectives on flat buffers, each with a statement of the bytes it sends."""

from ._means import (
    all_mean,
    async_mean,
    chunk_sizes,
    coded_mean,
    exchange_in_chunks,
    mean_in_codec,
    mean_of_senders,
    quotient,
    relative_weight,
    scale,
    scatter_mean_in_codec,
    total_weight,
    uses_chunks,
    weighted_means,
)
from ._scatter import (
    LARGE_BYTES,
    ShardLayout,
    all_gather_rows,
    exchange_in_slices,
    gather_slices,
    is_scattered_alone,
    permute,
    scatter_mean,
    scatter_mean_along,
    shard_layout,
)
