"""The optax transforms of the library; each algorithm is one file with one state class."""

from ._des_loc import des_loc as des_loc
from ._diloco import diloco as diloco
from ._gossip import PushSumState as PushSumState
from ._gossip import shares_of_gossip as shares_of_gossip
from ._local_sgd import hierarchical_local_sgd as hierarchical_local_sgd
from ._local_sgd import local_sgd as local_sgd
from ._noloco import noloco as noloco
from ._only_finite import only_finite as only_finite
from ._sgp import sgp as sgp
from ._slowmo import SlowMomentumState as SlowMomentumState
from ._slowmo import slow_momentum as slow_momentum
from ._slowmo import slowmo as slowmo
from ._sparta import sparta as sparta
from .outer import NormWeighted as NormWeighted
from .outer import layers as layers
from .outer import norm_weighted as norm_weighted
from .outer import rda as rda
from .outer import read_anchor as read_anchor

# What users may use; the rest is for other packages.
__all__ = [
    "PushSumState",
    "SlowMomentumState",
    "des_loc",
    "diloco",
    "hierarchical_local_sgd",
    "layers",
    "local_sgd",
    "noloco",
    "norm_weighted",
    "only_finite",
    "rda",
    "read_anchor",
    "sgp",
    "slow_momentum",
    "slowmo",
    "sparta",
]
