"""Configurations of the commands `jaxslowmo inspect ...`."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from jaxslowmo.topology import (
    GRAPHS,
    Graph,
    GraphAnalysis,
    analyse,
    from_phone_book,
    make_graph,
)

from .._errors import file_errors
from ._options import Called, Count, NotNegative, OneOf, Options, Range, options_of
from ._training import PIPELINES, MixingName, parse_mixing

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
_OF_NAMED_GRAPHS = "dedupe rows group_size num_rounds seed"
_OF_KINDS = "memory warm_up most_stash forward_only"


def split_graph(text: str, flag: str = "--graphs") -> tuple[str, int | None]:
    """Return name and peers per step of a text like "ring" (peers None) or "ring:2".

    Raises:
      ValueError: the name is unknown, or the peers are not a number >= 1; the message names `flag`.
    """
    name, colon, peers = text.partition(":")
    OneOf(*GRAPHS)(flag, name)
    if not colon:
        return name, None
    if not peers.isdecimal() or int(peers) < 1:
        raise ValueError(f"{flag}: peers per step must be >= 1, as in {name}:2, got {text}")
    return name, int(peers)


def check_effort(flag: str, graph: Graph) -> Graph:
    """Return `graph`, if its analysis takes seconds at most.

    Raises:
      ValueError: it takes longer; the message names `flag`, the option that gave the graph.
    """
    nodes, rounds = graph.num_nodes, graph.num_rounds
    Range(1, MOST_NODES + 1)(flag, nodes)
    if rounds > MOST_ENTRIES // nodes**2:
        raise ValueError(
            f"{flag}: {graph.name} with {nodes} nodes takes minutes, since its rotation has "
            f"{rounds} rounds; with so many nodes at most {MOST_ENTRIES // nodes**2} are analysed"
        )
    return graph


def _check_tolerance(flag: str, tolerance: float) -> None:
    if not 0 < tolerance < 1:
        raise ValueError(f"{flag} must lie strictly between 0 and 1, got {tolerance}")


_Nodes = Annotated[int, Range(1, MOST_NODES + 1)]
_Tolerance = Annotated[float, _check_tolerance]


def _check_source(config: Options, argument: str, file: str, of_names: str) -> None:
    """Raise `ValueError` unless exactly one of a name and a file is given.

    Args:
      config: configuration of the command.
      argument: field that holds the name.
      file: field that holds the file.
      of_names: fields of the options that do not go with a file.
    """
    options, has_file = options_of(type(config)), getattr(config, file) is not None
    name, flag = options[argument], options[file].flag
    if (getattr(config, argument) is not None) == has_file:
        raise ValueError(f"give {name.flag} or {flag}; {name.flag} is of {', '.join(name.choices)}")
    for other in of_names.split() if has_file else ():
        if getattr(config, other) not in (None, False):
            raise ValueError(f"{options[other].flag} does not go with {flag}")


@dataclasses.dataclass(frozen=True)
class InspectGraphConfig(Options):
    """Show who sends to whom, what it costs, and how fast the nodes agree."""

    name: Annotated[str | None, OneOf(*GRAPHS), Called("NAME")] = None
    """Name of the graph."""
    nodes: _Nodes | None = None
    """Number of nodes."""
    peers_per_step: Count | None = None
    """Peers that a node sends to per exchange (default: the graph's)."""
    dedupe: bool = False
    """Keep only the first of equal peers."""
    rows: Count | None = None
    """Only for grid_2d and torus_2d."""
    group_size: Count | None = None
    """Only for inner_outer."""
    num_rounds: Annotated[int | None, Range(1, 2**16)] = None  # more take minutes
    """Only for random_matching."""
    seed: Annotated[int | None, Range(0, 2**63)] = None
    """Only for random_matching."""
    phone_book: Path | None = None
    """JSON file, instead of a name: for every node the list of its peers."""
    mixing: MixingName = "uniform"
    """Either uniform, or self_weighted:SHARE with the share that a node keeps."""
    tolerance: _Tolerance = 1e-3
    """Consensus error to count rounds to."""
    model_bytes: Annotated[int | None, Range(0, 2**63)] = None
    """Size of the parameters."""
    parameters: Annotated[int | None, Range(0, 2**61)] = None
    """Number of float32 parameters."""
    matrices: bool = False
    """Show the mixing matrix of every round, and their product."""
    as_json: Annotated[bool, Called("--json")] = False
    """Print JSON."""

    def __post_init__(self) -> None:
        _check_source(self, "name", "phone_book", f"nodes {_OF_NAMED_GRAPHS}")
        if self.name is not None and self.nodes is None:
            raise ValueError("--nodes must be given with the name of a graph")
        if self.model_bytes is not None and self.parameters is not None:
            raise ValueError("give one of --model-bytes and --parameters")
        super().__post_init__()

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
        names = f"peers_per_step {_OF_NAMED_GRAPHS}".split()
        options: Any = {name: getattr(self, name) for name in names}
        options["dedupe"] = self.dedupe or None  # some graphs deduplicate by default
        source: Any = (self.name, self.nodes)
        return make_graph(*source, **options)


@dataclasses.dataclass(frozen=True)
class InspectGraphsConfig(Options):
    """Compare graphs at several sizes: tables and a picture."""

    nodes: tuple[_Nodes, ...] = (4, 8, 16, 32, 64, 128, 256)
    """Numbers of nodes, separated by commas."""
    graphs: Annotated[tuple[str, ...], lambda flag, text: split_graph(text, flag)] = tuple(
        name
        for graph in GRAPHS
        for name in (graph, f"{graph}:2")
        if name == graph or graph in _TWICE
    )
    """Graphs, separated by commas, each NAME or NAME:PEERS, with names of jaxslowmo inspect graph
    (default: all, some also with 2 peers)."""
    picture_nodes: tuple[_Nodes, ...] = (16, 64)
    """Numbers of nodes that the picture shows."""
    mixing: MixingName = "uniform"
    """Either uniform, or self_weighted:SHARE with the share that a node keeps."""
    tolerance: _Tolerance = 1e-3
    """Consensus error to count rounds to."""
    page: Path | None = None
    """Markdown file to write the first two tables into, between its markers; the picture goes next
    to it."""
    out: Path | None = None
    """Folder for the results (default: a new one in runs, named by the command and the date)."""

    @property
    def pictured(self) -> tuple[str, ...]:
        """The graphs that the picture shows: all of `--graphs`, or some of the default."""
        return _PICTURED if self.graphs is InspectGraphsConfig.graphs else self.graphs


def _read_phone_book(path: Path) -> list[list[int]]:
    with file_errors("--phone-book", "read", path):
        text = path.read_text(encoding="utf-8")
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"--phone-book: {path} is no JSON: {error}") from None


@dataclasses.dataclass(frozen=True)
class InspectScheduleConfig(Options):
    """Show the costs of a pipeline's schedule, and compare the kinds: bubble, stash, messages."""

    kind: Annotated[str | None, OneOf(*PIPELINES), Called("KIND")] = None
    """Kind of the schedule."""
    stages: Count | None = None
    """Device stages of the pipeline."""
    microbatches: Count | None = None
    """Microbatches of a step."""
    chunks: Count | None = None
    """Stages of the model per device stage (default: the kind's)."""
    forward: NotNegative = 1.0
    """Time of a forward pass (F) on a stage."""
    backward_input: NotNegative = 1.0
    """Time of the gradient of the input (I)."""
    backward_weight: NotNegative = 1.0
    """Time of the gradient of the weights (W)."""
    send: NotNegative = 0.0
    """Time until what is sent has arrived."""
    lockstep: bool = False
    """All stages begin each tick together, as in one program; else each runs free."""
    forward_only: bool = False
    """No backward passes."""
    memory: Count | None = None
    """Only for zero_bubble: 1 is ZB-H1, 2 is ZB-H2."""
    warm_up: Annotated[str | None, OneOf("few", "all")] = None
    """Only for interleaved: few or all."""
    most_stash: Count | None = None
    """Only for lockstep: most microbatches of a chunk that a stage holds."""
    table: Path | None = None
    """File in torch's notation, instead of a kind: a line per stage."""
    orders: bool = False
    """Print torch's notation, a line per stage, and nothing else."""
    as_json: Annotated[bool, Called("--json")] = False
    """Print JSON."""
    out: Path | None = None
    """Picture to write, such as schedule.png or .pdf."""

    def __post_init__(self) -> None:
        _check_source(self, "kind", "table", f"stages microbatches chunks {_OF_KINDS}")
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
            with file_errors("--table", "read", self.table):
                rows = self.table.read_text(encoding="utf-8").splitlines()
            return schedules.from_table(rows, name=self.table.stem)
        options = {name: getattr(self, name) for name in _OF_KINDS.split() if getattr(self, name)}
        if self.kind == "lockstep":
            options |= self.times
        source: Any = (self.kind, self.stages, self.microbatches, self.chunks)
        return schedules.by_name(*source, **options)
