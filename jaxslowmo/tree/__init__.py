"""Pytree arithmetic and the static plan of flat buffers; no communication."""

from ._arithmetic import added as added
from ._arithmetic import apply_exactly as apply_exactly
from ._arithmetic import by_dtype as by_dtype
from ._arithmetic import cast as cast
from ._arithmetic import kept_if as kept_if
from ._arithmetic import landing as landing
from ._arithmetic import reshaped as reshaped
from ._arithmetic import subtracted as subtracted
from ._arithmetic import updates_to as updates_to
from ._arithmetic import widen_updates as widen_updates
from ._arithmetic import zeros_like as zeros_like
from ._buckets import MIB as MIB
from ._buckets import BucketPiece as BucketPiece
from ._buckets import assign_buckets as assign_buckets
from ._buffers import Buffer as Buffer
from ._buffers import BufferNote as BufferNote
from ._buffers import BufferPlan as BufferPlan
from ._buffers import note_buffers as note_buffers
from ._buffers import noted_buffers as noted_buffers
from ._buffers import plan_buffers as plan_buffers
from ._leaves import at_least_float32 as at_least_float32
from ._leaves import check_arrays as check_arrays
from ._leaves import check_floating as check_floating
from ._leaves import leaf_names as leaf_names
from ._leaves import not_floating as not_floating
from ._leaves import tree_bytes as tree_bytes
