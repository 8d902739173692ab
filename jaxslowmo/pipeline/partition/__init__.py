"""Which layers of a model each stage holds, and what a layer costs."""

from ._balanced import partition_balanced as partition_balanced
from ._by_cost import blocks_by_bytes as blocks_by_bytes
from ._by_cost import partition_by_cost as partition_by_cost
from ._count import count_layer_params as count_layer_params
from ._flops import LayerFlops as LayerFlops
from ._flops import layer_flops as layer_flops
from ._uniform import partition_uniform as partition_uniform
