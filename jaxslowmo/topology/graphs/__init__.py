"""The graphs that come with the library, by what they look like, and by name."""

from ._by_name import GRAPHS as GRAPHS
from ._by_name import make_graph as make_graph
from ._exponential import bipartite_exponential as bipartite_exponential
from ._exponential import directed_exponential as directed_exponential
from ._exponential import hypercube as hypercube
from ._exponential import npeer_directed_exponential as npeer_directed_exponential
from ._exponential import symmetric_exponential as symmetric_exponential
from ._linear import bipartite_linear as bipartite_linear
from ._linear import directed_linear as directed_linear
from ._linear import ring as ring
from ._static import complete as complete
from ._static import grid_2d as grid_2d
from ._static import star as star
from ._static import torus_2d as torus_2d
from ._varied import inner_outer as inner_outer
from ._varied import random_matching as random_matching
