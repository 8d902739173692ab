"""Meshes of replicas, mapped axes, and stacked trees: how they are built, compared and averaged."""

from .._support.types import axis_names as axis_names
from .._support.varying import varying_axes as varying_axes
from ._axes import axis_size as axis_size
from ._axes import broadcast_from_first as broadcast_from_first
from ._axes import cast_varying as cast_varying
from ._axes import default_generator as default_generator
from ._axes import fold_in_number as fold_in_number
from ._axes import is_between_cpu_processes as is_between_cpu_processes
from ._axes import is_bound as is_bound
from ._axes import is_device_axis as is_device_axis
from ._axes import is_on_tpu as is_on_tpu
from ._axes import is_spmd as is_spmd
from ._axes import key_bits as key_bits
from ._axes import leaf_specs as leaf_specs
from ._axes import match_varying as match_varying
from ._axes import max_over as max_over
from ._axes import per_replica_keys as per_replica_keys
from ._axes import platform as platform
from ._axes import position_key as position_key
from ._axes import require_axes as require_axes
from ._axes import restrict_spec as restrict_spec
from ._axes import specs_key as specs_key
from ._axes import sum_over as sum_over
from ._axes import typed_specs as typed_specs
from ._axes import uniform as uniform
from ._axes import vary_over as vary_over
from ._consensus import Shares as Shares
from ._consensus import consensus as consensus
from ._in_sync import Divergence as Divergence
from ._in_sync import OutOfSyncError as OutOfSyncError
from ._in_sync import SyncReport as SyncReport
from ._in_sync import check_in_sync as check_in_sync
from ._in_sync import fingerprint as fingerprint
from ._meshes import AnyMesh as AnyMesh
from ._meshes import MapWith as MapWith
from ._meshes import Roles as Roles
from ._meshes import VirtualMesh as VirtualMesh
from ._meshes import batch_roles as batch_roles
from ._meshes import cached_program as cached_program
from ._meshes import device_mesh as device_mesh
from ._meshes import has_device_per_position as has_device_per_position
from ._meshes import is_shared_leaf as is_shared_leaf
from ._meshes import make_mesh as make_mesh
from ._meshes import map_replicas as map_replicas
from ._meshes import model_axes as model_axes
from ._meshes import placement as placement
from ._meshes import replica_count as replica_count
from ._meshes import virtual_mesh as virtual_mesh
from ._meshes import with_device_per_position as with_device_per_position
from ._replicas import Description as Description
from ._replicas import Layouts as Layouts
from ._replicas import array_from_host as array_from_host
from ._replicas import check_replica_axis as check_replica_axis
from ._replicas import check_same_tree as check_same_tree
from ._replicas import compare_descriptions as compare_descriptions
from ._replicas import constrain_layout as constrain_layout
from ._replicas import describe as describe
from ._replicas import differences as differences
from ._replicas import digest as digest
from ._replicas import inner_layouts as inner_layouts
from ._replicas import inner_specs as inner_specs
from ._replicas import is_host_local as is_host_local
from ._replicas import name_processes as name_processes
from ._replicas import put_on_all_devices as put_on_all_devices
from ._replicas import replicate as replicate
from ._replicas import replicate_argument as replicate_argument
from ._replicas import shard_like as shard_like
from ._replicas import shard_replicas as shard_replicas

# What users may use; the rest is for other packages.
__all__ = [
    "Divergence",
    "OutOfSyncError",
    "SyncReport",
    "VirtualMesh",
    "check_in_sync",
    "check_same_tree",
    "consensus",
    "make_mesh",
    "replicate",
    "virtual_mesh",
]
