"""Pytree arithmetic and the static plan of flat buffers; no communication."""

from ._buckets import MIB as MIB
from ._buckets import BucketPiece as BucketPiece
from ._buckets import assign_buckets as assign_buckets
from ._buffers import Buffer as Buffer
from ._buffers import BufferNote as BufferNote
from ._buffers import BufferPlan as BufferPlan
from ._buffers import note_buffers as note_buffers
from ._buffers import noted_buffers as noted_buffers
from ._buffers import plan_buffers as plan_buffers
from ._landing import apply_exactly as apply_exactly
from ._landing import landing as landing
from ._landing import updates_to as updates_to
from ._landing import widen_updates as widen_updates
from ._leaves import at_least_float32 as at_least_float32
from ._leaves import check_floating as check_floating
from ._leaves import leaf_names as leaf_names
from ._leaves import tree_bytes as tree_bytes
from ._primitives import added as added
from ._primitives import by_dtype as by_dtype
from ._primitives import cast as cast
from ._primitives import kept_if as kept_if
from ._primitives import reshaped as reshaped
from ._primitives import subtracted as subtracted
from ._primitives import zeros_like as zeros_like
