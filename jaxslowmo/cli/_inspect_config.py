"""What the commands below `jaxslowmo inspect` are given."""

import dataclasses
import json
from pathlib import Path

from jaxslowmo.topology import (
    GRAPHS,
    Graph,
    GraphAnalysis,
    analyse,
    from_phone_book,
    make_graph,
)

from ._mixing import parse_mixing

# The largest graphs whose analysis takes seconds: it grows with the cube of the nodes, and with
# the entries of all matrices of a rotation.
MOST_NODES = 1024
MOST_ENTRIES = 2**27


@dataclasses.dataclass(frozen=True)
class InspectGraphConfig:
    """One graph: by name, or by its phone book."""

    name: str | None
    nodes: int | None
    phone_book: Path | None
    peers_per_step: int | None
    dedupe: bool | None
    rows: int | None
    group_size: int | None
    num_rounds: int | None
    seed: int | None
    mixing: str
    tolerance: float
    model_bytes: int | None
    parameters: int | None

    def __post_init__(self) -> None:
        if (self.name is None) == (self.phone_book is None):
            raise ValueError(
                f"give the NAME of a graph or --phone-book FILE; the names are {', '.join(GRAPHS)}"
            )
        if self.name is not None and self.nodes is None:
            raise ValueError("--nodes must be given with the name of a graph")
        if self.phone_book is not None:
            for option in ("nodes", "dedupe", "rows", "group_size", "num_rounds", "seed"):
                if getattr(self, option) is not None:
                    raise ValueError(f"--{option.replace('_', '-')} does not go with --phone-book")
        if self.model_bytes is not None and self.parameters is not None:
            raise ValueError("give one of --model-bytes and --parameters")
        for option in ("nodes", "peers_per_step"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise ValueError(f"--{option.replace('_', '-')} must be >= 1, got {value}")
        if self.nodes is not None:
            _check_nodes("--nodes", self.nodes)
        for option in ("model_bytes", "parameters"):
            value = getattr(self, option)
            if value is not None and value < 0:
                raise ValueError(f"--{option.replace('_', '-')} must be >= 0, got {value}")
        _check_tolerance(self.tolerance)

    def analyse(self) -> GraphAnalysis:
        """Builds the graph and finds out about it.

        Raises:
            ValueError: for what the library refuses, or a file that is no phone book.
        """
        size = self.model_bytes
        if self.parameters is not None:
            size = 4 * self.parameters  # float32
        return analyse(
            check_effort("--nodes" if self.phone_book is None else "--phone-book", self._graph()),
            parse_mixing(self.mixing),
            model_bytes=size,
            tolerance=self.tolerance,
        )

    def _graph(self) -> Graph:
        if self.phone_book is not None:
            table = _read_phone_book(self.phone_book)
            return from_phone_book(table, self.peers_per_step or 1, name=self.phone_book.stem)
        assert self.name is not None
        assert self.nodes is not None
        return make_graph(
            self.name,
            self.nodes,
            peers_per_step=self.peers_per_step,
            dedupe=self.dedupe,
            rows=self.rows,
            group_size=self.group_size,
            num_rounds=self.num_rounds,
            seed=self.seed,
        )


@dataclasses.dataclass(frozen=True)
class InspectGraphsConfig:
    """Several graphs at several sizes.

    Attributes:
        graphs: each NAME or NAME:PEERS, with peers per step.
        nodes: numbers of nodes.
        pictured: those of the graphs that the picture shows.
        picture_nodes: the numbers of nodes that it shows.
        mixing: as `parse_mixing` takes it.
        tolerance: consensus error to count rounds to.
    """

    graphs: tuple[str, ...] = (
        "npeer_directed_exponential",
        "npeer_directed_exponential:2",
        "directed_exponential",
        "bipartite_exponential",
        "symmetric_exponential",
        "hypercube",
        "inner_outer",
        "random_matching",
        "directed_linear",
        "directed_linear:2",
        "bipartite_linear",
        "ring",
        "ring:2",
        "torus_2d",
        "grid_2d",
        "star",
        "complete",
    )
    nodes: tuple[int, ...] = (4, 8, 16, 32, 64, 128, 256)
    # More lines would hide each other.
    pictured: tuple[str, ...] = (
        "complete",
        "star",
        "npeer_directed_exponential",
        "inner_outer",
        "symmetric_exponential",
        "random_matching",
        "torus_2d",
        "ring:2",
        "ring",
    )
    picture_nodes: tuple[int, ...] = (16, 64)
    mixing: str = "uniform"
    tolerance: float = 1e-3

    def __post_init__(self) -> None:
        for option, values in (
            ("--graphs", self.graphs),
            ("--nodes", self.nodes),
            ("--picture-nodes", self.picture_nodes),
        ):
            if not values or len(set(values)) < len(values):
                given = ",".join(map(str, values)) or "nothing"
                raise ValueError(f"{option} must list one or more different values, got {given}")
        for option, values in (("--nodes", self.nodes), ("--picture-nodes", self.picture_nodes)):
            if min(values) < 1:
                raise ValueError(f"{option} must be >= 1, got {min(values)}")
            _check_nodes(option, max(values))
        for graph in self.graphs:
            split_graph(graph)
        parse_mixing(self.mixing)
        _check_tolerance(self.tolerance)


def split_graph(text: str) -> tuple[str, int | None]:
    """Name and peers per step of "ring" or "ring:2".

    Raises:
        ValueError: an unknown name, or peers that are no number >= 1.
    """
    name, colon, peers = text.partition(":")
    if name not in GRAPHS:
        raise ValueError(f"--graphs must be of {', '.join(GRAPHS)}, got {name}")
    if not colon:
        return name, None
    if not peers.isdecimal() or int(peers) < 1:
        raise ValueError(
            f"--graphs: peers per step must be a number >= 1, as in {name}:2, got {text}"
        )
    return name, int(peers)


def check_effort(option: str, graph: Graph) -> Graph:
    """`graph`, if analysing it takes seconds.

    Raises:
        ValueError: for one that takes longer, naming the option that it comes from.
    """
    _check_nodes(option, graph.num_nodes)
    most = MOST_ENTRIES // graph.num_nodes**2
    if graph.num_rounds > most:
        raise ValueError(
            f"{option}: {graph.name} with {graph.num_nodes} nodes takes minutes, since its "
            f"rotation has {graph.num_rounds} rounds; with so many nodes at most {most} are "
            "analysed"
        )
    return graph


def _check_nodes(option: str, nodes: int) -> None:
    if nodes > MOST_NODES:
        raise ValueError(
            f"{option}: at most {MOST_NODES} nodes are analysed, since more take minutes; got "
            f"{nodes}"
        )


def _check_tolerance(tolerance: float) -> None:
    if not 0 < tolerance < 1:
        raise ValueError(f"--tolerance must lie strictly between 0 and 1, got {tolerance}")


def _read_phone_book(path: Path) -> list[list[int]]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--phone-book: cannot read {path}: {error.strerror}") from None
    except ValueError as error:  # no UTF-8, no JSON
        raise ValueError(f"--phone-book: {path} is no JSON: {error}") from None
    if not isinstance(table, list) or not all(isinstance(row, list) for row in table):
        raise ValueError(
            f"--phone-book: {path} must hold a list with the list of out-peers of every node, such "
            "as [[1, 2], [0], [1]]"
        )
    return table
