"""Graphs by name, for command lines and configurations."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from .._phone_book import Graph
from ._circulant import (
    bipartite_exponential,
    bipartite_linear,
    complete,
    directed_exponential,
    directed_linear,
    npeer_directed_exponential,
    ring,
    symmetric_exponential,
)
from ._from_rows import grid_2d, hypercube, inner_outer, random_matching, star, torus_2d

GRAPHS: Mapping[str, Callable[..., Graph]] = MappingProxyType(
    {
        make.__name__: make
        for make in (
            npeer_directed_exponential,
            directed_exponential,
            bipartite_exponential,
            symmetric_exponential,
            hypercube,
            inner_outer,
            random_matching,
            directed_linear,
            bipartite_linear,
            ring,
            torus_2d,
            grid_2d,
            star,
            complete,
        )
    }
)
"""The constructors of graphs by name, for `make_graph`."""


def make_graph(
    name: str, num_nodes: int, *, peers_per_step: int | None = None, **options: Any
) -> Graph:
    """Make a graph by the name of its constructor.

    Args:
      name: a key of `GRAPHS`, such as "ring".
      num_nodes: number of nodes.
      peers_per_step: number of peers that a node sends to per exchange; None: the constructor's
        default.
      **options: more arguments of the constructor, such as `dedupe`; None means its default.

    Returns:
      `GRAPHS[name](num_nodes, ...)`.

    Raises:
      ValueError: an unknown name, an option that the constructor lacks, or an invalid value.

    Example:
      >>> make_graph("ring", 8, peers_per_step=2).phone_book[0]
      (1, 7)
    """
    if name not in GRAPHS:
        raise ValueError(f"unknown graph {name!r}; the graphs are {', '.join(GRAPHS)}.")
    options = {"peers_per_step": peers_per_step, **options}
    options = {option: value for option, value in options.items() if value is not None}
    allowed = list(inspect.signature(GRAPHS[name]).parameters)[1:]
    unknown = [option for option in options if option not in allowed]
    if unknown:
        raise ValueError(f"{name} has no option {_listed(unknown)}; it has {_listed(allowed)}.")
    return GRAPHS[name](num_nodes, **options)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
