"""Divide the layers of a model among stages, by the costs of layers."""

from ._layer_costs import LayerFlops as LayerFlops
from ._layer_costs import count_layer_params as count_layer_params
from ._layer_costs import layer_flops as layer_flops
from ._partition import blocks_by_bytes as blocks_by_bytes
from ._partition import partition_balanced as partition_balanced
from ._partition import partition_by_cost as partition_by_cost
from ._partition import partition_uniform as partition_uniform
