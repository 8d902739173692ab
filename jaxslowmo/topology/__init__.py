"""Who sends to whom: gossip graphs and mixing weights, in plain Python and NumPy."""

from ._analysis import GraphAnalysis as GraphAnalysis
from ._analysis import analyse as analyse
from ._exponential import bipartite_exponential as bipartite_exponential
from ._exponential import directed_exponential as directed_exponential
from ._exponential import hypercube as hypercube
from ._exponential import npeer_directed_exponential as npeer_directed_exponential
from ._exponential import symmetric_exponential as symmetric_exponential
from ._graph import Graph as Graph
from ._graph import from_phone_book as from_phone_book
from ._linear import bipartite_linear as bipartite_linear
from ._linear import directed_linear as directed_linear
from ._linear import ring as ring
from ._mixing import Mixing as Mixing
from ._mixing import mixing_matrix as mixing_matrix
from ._mixing import self_weighted as self_weighted
from ._mixing import uniform_mixing as uniform_mixing
from ._registry import GRAPHS as GRAPHS
from ._registry import make_graph as make_graph
from ._rounds import ExchangeRound as ExchangeRound
from ._rounds import exchange_rounds as exchange_rounds
from ._static import complete as complete
from ._static import grid_2d as grid_2d
from ._static import star as star
from ._static import torus_2d as torus_2d
from ._varied import inner_outer as inner_outer
from ._varied import random_matching as random_matching
