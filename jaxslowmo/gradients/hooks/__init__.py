"""Communication hooks for `all_reduce_gradients(hook=...)`, and the types that hooks use."""

from .._hook import CommHook as CommHook
from .._hook import GradBucket as GradBucket
from .._hook import GradPiece as GradPiece
from .._hook import stateless as stateless
from ._compress import bf16_compress as bf16_compress
from ._compress import fp8 as fp8
from ._compress import fp16_compress as fp16_compress
from ._compress import int8 as int8
from ._compress import mean as mean
from ._compress import noop as noop
from ._compress import top_k as top_k
from ._powersgd import PowerSGDState as PowerSGDState
from ._powersgd import powersgd as powersgd
