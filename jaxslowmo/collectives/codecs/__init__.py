"""The formats in which replicas exchange parameters: values of `codec=`."""

from ._blocks import Blocks as Blocks
from ._blocks import Format as Format
from ._blocks import fp8 as fp8
from ._blocks import int4 as int4
from ._blocks import int8 as int8
from ._codec import Codec as Codec
from ._codec import Half as Half
from ._codec import bfloat16 as bfloat16
from ._codec import float16 as float16
from ._top_k import TopK as TopK
from ._top_k import top_k as top_k

# What users may use; the rest is for other packages.
__all__ = ["Codec", "bfloat16", "float16", "fp8", "int4", "int8", "top_k"]
