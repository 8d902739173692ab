"""In which form parameters travel between replicas: values of `codec=`."""

from ._codec import Codec as Codec
from ._half import bfloat16 as bfloat16
from ._half import float16 as float16
