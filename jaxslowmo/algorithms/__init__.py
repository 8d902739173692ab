"""The optax transforms of the library; each algorithm is one file with one state class."""

from ._diloco import diloco as diloco
from ._gossip import SGPState as SGPState
from ._gossip import shares_of_gossip as shares_of_gossip
from ._local_sgd import LocalSGDState as LocalSGDState
from ._local_sgd import hierarchical_local_sgd as hierarchical_local_sgd
from ._local_sgd import local_sgd as local_sgd
from ._only_finite import OnlyFiniteState as OnlyFiniteState
from ._only_finite import only_finite as only_finite
from ._sgp import sgp as sgp
from ._slowmo import SlowMomentumState as SlowMomentumState
from ._slowmo import slow_momentum as slow_momentum
from ._slowmo import slowmo as slowmo
from .outer import OuterState as OuterState
from .outer import read_anchor as read_anchor

# What users may use; the rest is for other packages.
__all__ = [
    "LocalSGDState",
    "OnlyFiniteState",
    "OuterState",
    "SGPState",
    "SlowMomentumState",
    "diloco",
    "hierarchical_local_sgd",
    "local_sgd",
    "only_finite",
    "read_anchor",
    "sgp",
    "slow_momentum",
    "slowmo",
]
