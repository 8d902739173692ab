"""The graphs of the library, by structure and by name."""

from ._circulant import bipartite_exponential as bipartite_exponential
from ._circulant import bipartite_linear as bipartite_linear
from ._circulant import complete as complete
from ._circulant import directed_exponential as directed_exponential
from ._circulant import directed_linear as directed_linear
from ._circulant import npeer_directed_exponential as npeer_directed_exponential
from ._circulant import ring as ring
from ._circulant import symmetric_exponential as symmetric_exponential
from ._from_rows import grid_2d as grid_2d
from ._from_rows import hypercube as hypercube
from ._from_rows import inner_outer as inner_outer
from ._from_rows import random_matching as random_matching
from ._from_rows import star as star
from ._from_rows import torus_2d as torus_2d
from ._make_graph import GRAPHS as GRAPHS
from ._make_graph import make_graph as make_graph
