"""Reduction of gradients over replicas, as in torch's Reducer: buckets, hooks, weights."""

from . import hooks as hooks
from ._accumulate import AccumulateState as AccumulateState
from ._accumulate import accumulate as accumulate
from ._all_reduce import AllReduceGradientsState as AllReduceGradientsState
from ._all_reduce import all_reduce_gradients as all_reduce_gradients
from ._all_reduce import mean_gradients as mean_gradients
from ._demo import demo as demo
from ._reduce_buckets import ReadyOrder as ReadyOrder
from ._skip_unused import SkipUnusedState as SkipUnusedState
from ._skip_unused import skip_unused as skip_unused
from ._skip_unused import unused_names as unused_names
