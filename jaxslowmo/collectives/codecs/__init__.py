"""In which form parameters travel between replicas: values of `codec=`."""

from ._codec import Codec as Codec
from ._codec import bfloat16 as bfloat16
from ._codec import float16 as float16
