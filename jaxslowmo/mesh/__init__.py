"""Meshes of replicas, mapped axes, and stacked trees: how they are built, compared and averaged."""

from .._support.types import axis_names as axis_names
from .._support.varying import varying_axes as varying_axes
from ._axes import axis_size as axis_size
from ._axes import between_cpu_processes as between_cpu_processes
from ._axes import default_generator as default_generator
from ._axes import from_first as from_first
from ._axes import is_bound as is_bound
from ._axes import is_of_devices as is_of_devices
from ._axes import is_on_tpu as is_on_tpu
from ._axes import is_spmd as is_spmd
from ._axes import key_bits as key_bits
from ._axes import match_varying as match_varying
from ._axes import max_over as max_over
from ._axes import numbered_key as numbered_key
from ._axes import only_over as only_over
from ._axes import own_keys as own_keys
from ._axes import place_key as place_key
from ._axes import platform as platform
from ._axes import require_axes as require_axes
from ._axes import specs_key as specs_key
from ._axes import specs_of_leaves as specs_of_leaves
from ._axes import sum_over as sum_over
from ._axes import typed_specs as typed_specs
from ._axes import uniform as uniform
from ._axes import varied as varied
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
from ._meshes import device_mesh as device_mesh
from ._meshes import has_a_device_each as has_a_device_each
from ._meshes import is_shared as is_shared
from ._meshes import kept_with as kept_with
from ._meshes import make_mesh as make_mesh
from ._meshes import map_replicas as map_replicas
from ._meshes import model_axes as model_axes
from ._meshes import placement as placement
from ._meshes import replica_count as replica_count
from ._meshes import roles_of_batch as roles_of_batch
from ._meshes import virtual_mesh as virtual_mesh
from ._meshes import with_a_device_each as with_a_device_each
from ._replicas import Description as Description
from ._replicas import Layouts as Layouts
from ._replicas import array_from_host as array_from_host
from ._replicas import check_same_tree as check_same_tree
from ._replicas import check_stacked as check_stacked
from ._replicas import compare_descriptions as compare_descriptions
from ._replicas import describe as describe
from ._replicas import differences as differences
from ._replicas import digest as digest
from ._replicas import inner_specs as inner_specs
from ._replicas import is_of_host as is_of_host
from ._replicas import laid_out as laid_out
from ._replicas import layouts_of as layouts_of
from ._replicas import name_processes as name_processes
from ._replicas import on_every_device as on_every_device
from ._replicas import on_mesh as on_mesh
from ._replicas import replicate as replicate
from ._replicas import replicate_as as replicate_as
from ._replicas import sharded_like as sharded_like

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
