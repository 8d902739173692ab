"""Which devices form which axis, and what holds along a mapped axis."""

from ._axes import axis_names as axis_names
from ._axes import axis_size as axis_size
from ._axes import checks_varying as checks_varying
from ._axes import match_varying as match_varying
from ._axes import require_axes as require_axes
from ._axes import settle as settle
from ._axes import uniform as uniform
from ._axes import vary_over as vary_over
from ._axes import varying_axes as varying_axes
from ._broadcast import from_first as from_first
from ._build import VirtualMesh as VirtualMesh
from ._build import make_mesh as make_mesh
from ._build import virtual_mesh as virtual_mesh
from ._in_sync import Divergence as Divergence
from ._in_sync import OutOfSyncError as OutOfSyncError
from ._in_sync import SyncReport as SyncReport
from ._in_sync import check_in_sync as check_in_sync
from ._mapped import AnyMesh as AnyMesh
from ._mapped import map_replicas as map_replicas
from ._mapped import model_axes as model_axes
from ._mapped import replica_count as replica_count
from ._replicas import consensus as consensus
from ._replicas import init as init
from ._replicas import replicate as replicate
from ._verify import check_same_tree as check_same_tree
