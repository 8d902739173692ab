"""Collectives on flat buffers, each with a statement of the bytes it sends."""

from ._means import all_mean as all_mean
from ._means import async_mean as async_mean
from ._means import block_sizes as block_sizes
from ._means import coded_mean as coded_mean
from ._means import exchange_in_blocks as exchange_in_blocks
from ._means import mean_in_codec as mean_in_codec
from ._means import mean_of_senders as mean_of_senders
from ._means import quotient as quotient
from ._means import relative_weight as relative_weight
from ._means import scale as scale
from ._means import scatter_mean_in_codec as scatter_mean_in_codec
from ._means import total_weight as total_weight
from ._means import uses_blocks as uses_blocks
from ._means import weighted_means as weighted_means
from ._scatter import LARGE_BYTES as LARGE_BYTES
from ._scatter import ShardLayout as ShardLayout
from ._scatter import all_gather_rows as all_gather_rows
from ._scatter import exchange_in_slices as exchange_in_slices
from ._scatter import gather_slices as gather_slices
from ._scatter import is_scattered_alone as is_scattered_alone
from ._scatter import permute as permute
from ._scatter import scatter_mean as scatter_mean
from ._scatter import scatter_mean_along as scatter_mean_along
from ._scatter import shard_layout as shard_layout
