"""The optax transforms: one algorithm, one file, one state class."""

from ._base import ParameterTransform as ParameterTransform
from ._base import check_axis_argument as check_axis_argument
from ._base import check_weight as check_weight
from ._base import increment as increment
from ._base import phase_name as phase_name
from ._base import phase_scope as phase_scope
from ._base import run_if as run_if
from ._base import unless_idle as unless_idle
from ._blocks import replica_mean as replica_mean
from ._carry import Placement as Placement
from ._carry import carry_leaf as carry_leaf
from ._carry import stacked as stacked
from ._diloco import diloco as diloco
from ._hierarchical import hierarchical_local_sgd as hierarchical_local_sgd
from ._local_sgd import LocalSGDState as LocalSGDState
from ._local_sgd import local_sgd as local_sgd
from ._outer import OuterState as OuterState
from ._read_anchor import read_anchor as read_anchor
from ._schedule import Every as Every
from ._schedule import as_schedule as as_schedule
from ._schedule import every as every
from ._sgp import SGPState as SGPState
from ._sgp import sgp as sgp
from ._slow_momentum import SlowMomentumState as SlowMomentumState
from ._slow_momentum import slow_momentum as slow_momentum
from ._slowmo import slowmo as slowmo
