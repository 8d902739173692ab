"""The formats in which replicas exchange parameters: values of `codec=`."""

from ._codec import Codec as Codec
from ._codec import bfloat16 as bfloat16
from ._codec import float16 as float16
