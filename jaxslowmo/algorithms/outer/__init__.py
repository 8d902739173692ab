"""Outer steps on an anchor: of slowmo, diloco, and local_sgd with fragments, delay or merge."""

from ._aggregate import Aggregate as Aggregate
from ._aggregate import NormWeighted as NormWeighted
from ._aggregate import RadialDirectional as RadialDirectional
from ._aggregate import checked_aggregate as checked_aggregate
from ._aggregate import norm_weighted as norm_weighted
from ._aggregate import rda as rda
from ._fragments import Fragments as Fragments
from ._fragments import Layers as Layers
from ._fragments import layers as layers
from ._outer import ALONE as ALONE
from ._outer import NO_RATE as NO_RATE
from ._outer import OuterRate as OuterRate
from ._outer import outer_algorithm as outer_algorithm
from ._outer import resolve_shard_state as resolve_shard_state
from ._read_anchor import read_anchor as read_anchor
