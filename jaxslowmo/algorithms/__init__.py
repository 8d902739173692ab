"""Algorithms that exchange parameters between replicas, as optax transforms; one file for each."""

from ._des_loc import des_loc
from ._diloco import OuterNesterovState, diloco, outer_nesterov, published_outer_optimizer
from ._gossip import PushSumState, shares_of_gossip
from ._local_sgd import hierarchical_local_sgd, local_sgd
from ._noloco import noloco
from ._only_finite import only_finite
from ._sgp import sgp
from ._slowmo import SlowMomentumState, slow_momentum, slowmo
from ._sparta import sparta
from .outer import NormWeighted, layers, norm_weighted, rda, read_anchor

# What users may use; the rest is for other packages.
__all__ = [
    "OuterNesterovState",
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
    "outer_nesterov",
    "rda",
    "read_anchor",
    "sgp",
    "slow_momentum",
    "slowmo",
    "sparta",
]
