"""Configurations of the commands `jaxslowmo inspect ...`."""

import dataclasses
import functools
import json
from collections.abc import Iterable
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxslowmo.topology import (
    GRAPHS,
    Graph,
    GraphAnalysis,
    analyse,
    from_phone_book,
    make_graph,
)

from .._errors import as_flag, file_errors
from ._algorithms import parse_mixing
from ._fields import Checked, option, parse_integers, parse_names
from ._mesh import PIPELINES

if TYPE_CHECKING:
    from jaxslowmo.pipeline.schedules import Schedule

# The largest graphs whose analysis takes seconds: the time grows with the cube of the number of
# nodes, and with the number of entries of all mixing matrices of a rotation.
MOST_NODES = 1024
MOST_ENTRIES = 2**27
# The search for a lockstep schedule of more operations takes minutes.
MOST = 2**14
# Graphs that are compared with 2 peers per step, too.
_TWICE = ("npeer_directed_exponential", "directed_linear", "ring")
# The graphs that the picture shows by default: more lines would hide each other.
_PICTURED = (
    "complete", "star", "npeer_directed_exponential", "inner_outer", "symmetric_exponential",
    "random_matching", "torus_2d", "ring:2", "ring",
)  # fmt: skip
# Options that go with a graph, or a schedule, that is given by its name.
_OF_NAMED_GRAPHS = ("dedupe", "rows", "group_size", "num_rounds", "seed")
_OF_KINDS = ("memory", "warm_up", "most_stash", "forward_only")


def split_graph(text: str) -> tuple[str, int | None]:
    """Return name and peers per step of a text like "ring" (peers None) or "ring:2".

    Raises:
      ValueError: the name is unknown, or the peers are not a number >= 1.
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


def check_effort(flag: str, graph: Graph) -> Graph:
    """Return `graph`, if its analysis takes seconds at most.

    Raises:
      ValueError: it takes longer; the message names `flag`, the option that gave the graph.
    """
    _check_nodes(graph.num_nodes, flag)
    most = MOST_ENTRIES // graph.num_nodes**2
    if graph.num_rounds > most:
        raise ValueError(
            f"{flag}: {graph.name} with {graph.num_nodes} nodes takes minutes, since its "
            f"rotation has {graph.num_rounds} rounds; with so many nodes at most {most} are "
            "analysed"
        )
    return graph


def _check_nodes(nodes: int, flag: str = "--nodes") -> None:
    if nodes > MOST_NODES:
        raise ValueError(
            f"{flag}: at most {MOST_NODES} nodes are analysed, since more take minutes; got {nodes}"
        )


def _check_tolerance(tolerance: float) -> None:
    if not 0 < tolerance < 1:
        raise ValueError(f"--tolerance must lie strictly between 0 and 1, got {tolerance}")


def _mixing() -> str:
    help = "uniform, or self_weighted:SHARE with the share that a node keeps."
    return option("uniform", help, check=parse_mixing)


def _tolerance() -> float:
    return option(1e-3, "Consensus error to count rounds to.", check=_check_tolerance)


def _check_source(
    config: Any, name: str, what: str, file: str, names: Iterable[str], of_names: Iterable[str]
) -> None:
    """Raise `ValueError` unless exactly one of a name and a file is given.

    Args:
      config: configuration of the command.
      name: field that holds the name, an argument.
      what: word for the thing with this name, for messages.
      file: field that holds the file, an option.
      names: all names that exist.
      of_names: fields of the options that do not go with a file.
    """
    flag, has_file = as_flag(file), getattr(config, file) is not None
    if (getattr(config, name) is not None) == has_file:
        raise ValueError(
            f"give the {name.upper()} of a {what} or {flag} FILE; the {name}s are "
            f"{', '.join(names)}"
        )
    for other in of_names if has_file else ():
        value = getattr(config, other)
        if value is not None and value is not False:
            raise ValueError(f"{as_flag(other)} does not go with {flag}")


def _only_for(argument: str) -> str:
    """Return a help text that names the graphs whose constructors take an argument."""
    names = [name for name, make in GRAPHS.items() if argument in signature(make).parameters]
    return f"Only for {' and '.join(names)}."


@dataclasses.dataclass(frozen=True)
class InspectGraphConfig(Checked):
    """One graph, given by its name or by a table of the peers of each node."""

    nodes: int | None = option(None, "Number of nodes.", least=1, check=_check_nodes)
    peers_per_step: int | None = option(
        None, "Peers that a node sends to per exchange (default: the graph's).", least=1
    )
    dedupe: bool = option(False, "Keep only the first of equal peers.")
    rows: int | None = option(None, _only_for("rows"), least=1)
    group_size: int | None = option(None, _only_for("group_size"), least=1)
    num_rounds: int | None = option(None, _only_for("num_rounds"), least=1)
    seed: int | None = option(None, _only_for("seed"), least=0, below=2**63)
    phone_book: Path | None = option(  # noqa: RUF009 - a field, as the others
        None, "JSON file, instead of a name: for every node the list of its peers."
    )
    mixing: str = _mixing()
    tolerance: float = _tolerance()
    model_bytes: int | None = option(None, "Size of the parameters.", least=0, below=2**63)
    parameters: int | None = option(None, "Number of float32 parameters.", least=0, below=2**61)
    matrices: bool = option(False, "Show the mixing matrix of every round, and their product.")
    as_json: bool = option(False, "Print JSON.", flag="--json")
    name: str | None = option(None, "Name of the graph; see below.", flag="NAME")

    def __post_init__(self) -> None:
        _check_source(self, "name", "graph", "phone_book", GRAPHS, ("nodes", *_OF_NAMED_GRAPHS))
        if self.name is not None and self.nodes is None:
            raise ValueError("--nodes must be given with the name of a graph")
        if self.model_bytes is not None and self.parameters is not None:
            raise ValueError("give one of --model-bytes and --parameters")
        super().__post_init__()
        if self.nodes is not None:
            most = MOST_ENTRIES // self.nodes**2
            if self.num_rounds is not None and self.num_rounds > most:
                raise ValueError(
                    f"--num-rounds must be <= {most} with so many nodes, since more take minutes; "
                    f"got {self.num_rounds}"
                )

    def analyse(self) -> GraphAnalysis:
        """Build the graph and return its analysis.

        Raises:
          ValueError: the library refuses an argument, or the file is no phone book.
        """
        size = self.model_bytes if self.parameters is None else 4 * self.parameters  # float32
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
        options = {name: getattr(self, name) for name in _OF_NAMED_GRAPHS}
        options["dedupe"] = self.dedupe or None  # some graphs deduplicate by default
        return make_graph(self.name, self.nodes, peers_per_step=self.peers_per_step, **options)


@dataclasses.dataclass(frozen=True)
class InspectGraphsConfig(Checked):
    """Several graphs at several sizes.

    Attributes:
      nodes: numbers of nodes.
      graphs: each NAME or NAME:PEERS, with peers per step.
      picture_nodes: numbers of nodes that the picture shows.
      mixing: name of the mixing, as `parse_mixing` accepts it.
      tolerance: consensus error to count rounds to.
    """

    nodes: tuple[int, ...] = option(
        "4,8,16,32,64,128,256",
        "Numbers of nodes, separated by commas.",
        parse=parse_integers,
        least=1,
        check=_check_nodes,
    )
    graphs: tuple[str, ...] = option(
        ",".join(f"{name},{name}:2" if name in _TWICE else name for name in GRAPHS),
        "Graphs, separated by commas, each NAME or NAME:PEERS (default: all, some also with 2 "
        "peers).",
        parse=parse_names,
        shows_default=False,
        check=split_graph,
    )
    picture_nodes: tuple[int, ...] = option(
        "16,64",
        "Numbers of nodes that the picture shows.",
        parse=parse_integers,
        least=1,
        check=functools.partial(_check_nodes, flag="--picture-nodes"),
    )
    mixing: str = _mixing()
    tolerance: float = _tolerance()

    @property
    def pictured(self) -> tuple[str, ...]:
        """The graphs that the picture shows: all of `--graphs`, or some of the default."""
        return _PICTURED if self.graphs is InspectGraphsConfig.graphs else self.graphs


def _read_phone_book(path: Path) -> list[list[int]]:
    text = _read("--phone-book", path)
    try:
        table = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--phone-book: {path} is no JSON: {error}") from None
    if not isinstance(table, list) or not all(isinstance(row, list) for row in table):
        raise ValueError(
            f"--phone-book: {path} must hold a list with the list of out-peers of every node, such "
            "as [[1, 2], [0], [1]]"
        )
    return table


def _read(flag: str, path: Path) -> str:
    """Return the text of a file; error messages name the option that gave the file."""
    try:
        with file_errors(flag, "read", path):
            return path.read_text(encoding="utf-8")
    except ValueError:
        raise ValueError(f"{flag}: {path} is no text") from None


def _time(default: float, help: str) -> float:
    return option(default, help, least=0)


@dataclasses.dataclass(frozen=True)
class InspectScheduleConfig(Checked):
    """One pipeline schedule, given by kind and sizes or by a table in a file."""

    stages: int | None = option(None, "Device stages of the pipeline.", least=1)
    microbatches: int | None = option(None, "Microbatches of a step.", least=1)
    chunks: int | None = option(
        None, "Stages of the model per device stage (default: the kind's).", least=1
    )
    forward: float = _time(1.0, "Time of a forward pass (F) on a stage.")
    backward_input: float = _time(1.0, "Time of the gradient of the input (I).")
    backward_weight: float = _time(1.0, "Time of the gradient of the weights (W).")
    send: float = _time(0.0, "Time until what is sent has arrived.")
    lockstep: bool = option(
        False, "All stages begin each tick together, as in one program; else each runs free."
    )
    forward_only: bool = option(False, "No backward passes.")
    memory: int | None = option(None, "Only for zero_bubble: 1 is ZB-H1, 2 is ZB-H2.", least=1)
    warm_up: str | None = option(None, "Only for interleaved: few or all.", choices=("few", "all"))
    most_stash: int | None = option(
        None, "Only for lockstep: most microbatches of a chunk that a stage holds.", least=1
    )
    table: Path | None = option(  # noqa: RUF009 - a field, as the others
        None, "File in torch's notation, instead of a kind: a line per stage."
    )
    whole: bool = option(False, "Show all ticks, however many.")
    orders: bool = option(False, "Print torch's notation, a line per stage, and nothing else.")
    as_json: bool = option(False, "Print JSON.", flag="--json")
    kind: str | None = option(None, "Kind of the schedule; see below.", flag="KIND")

    def __post_init__(self) -> None:
        of_kinds = ("stages", "microbatches", "chunks", *_OF_KINDS)
        _check_source(self, "kind", "schedule", "table", PIPELINES, of_kinds)
        if self.orders and self.as_json:
            raise ValueError("give one of --orders and --json")
        if self.table is None and (self.stages is None or self.microbatches is None):
            raise ValueError("--stages and --microbatches must be given with the kind")
        super().__post_init__()
        size = (self.stages or 1) * (self.microbatches or 1) * (self.chunks or 1)
        if size > MOST:
            raise ValueError(
                f"--stages times --microbatches times --chunks must be <= {MOST}, since more take "
                f"minutes; got {size}"
            )

    @property
    def times(self) -> dict[str, Any]:
        """The durations of operations, as keyword arguments of `Schedule.simulate`."""
        names = ("forward", "backward_input", "backward_weight", "send")
        return {name: getattr(self, name) for name in names}

    def schedule(self) -> "Schedule":
        """Return the schedule that the options describe.

        Raises:
          ValueError: the library refuses an argument, or the file is no table.
        """
        from jaxslowmo.pipeline import schedules

        if self.table is not None:
            rows = _read("--table", self.table).splitlines()
            return schedules.from_table(rows, name=self.table.stem)
        options = {name: getattr(self, name) for name in _OF_KINDS if getattr(self, name)}
        if self.kind == "lockstep":
            options |= self.times
        assert self.kind is not None
        assert self.stages is not None
        assert self.microbatches is not None
        return schedules.by_name(self.kind, self.stages, self.microbatches, self.chunks, **options)
