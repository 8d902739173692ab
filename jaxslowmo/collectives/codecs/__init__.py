"""The formats in which replicas exchange parameters: values of `codec=`."""

from ._blocks import Blocks, Format, fp8, int4, int8
from ._codec import Codec, Half, bfloat16, float16
from ._top_k import TopK, top_k

# What users may use; the rest is for other packages.
__all__ = ["Codec", "bfloat16", "float16", "fp8", "int4", "int8", "top_k"]
