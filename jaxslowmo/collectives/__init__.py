"""Collectives on flat buffers, each stating what it sends."""

from ._local import gather_slices as gather_slices
from ._local import in_slices as in_slices
from ._permute import Permutation as Permutation
from ._permute import permute as permute
from ._reduce import all_mean as all_mean
from ._reduce import all_mean_in_slices as all_mean_in_slices
from ._scatter import all_gather_shards as all_gather_shards
from ._scatter import mean_to_shards as mean_to_shards
from ._scatter import own_shard as own_shard
from ._shard_layout import ShardLayout as ShardLayout
from ._shard_layout import shard_layout as shard_layout
from ._weighted import TotalWeight as TotalWeight
from ._weighted import quotient as quotient
from ._weighted import relative_weight as relative_weight
from ._weighted import scaled as scaled
from ._weighted import total_weight as total_weight
from ._weighted import weighted_means as weighted_means
