"""The commands below `jaxslowmo inspect`. They use no device, and load no jax for it."""

from pathlib import Path
from typing import Annotated

import typer

from jaxslowmo.topology import GRAPHS

from ._errors import usage_errors
from ._inspect_config import InspectGraphConfig, InspectGraphsConfig

_NAMES = ", ".join(GRAPHS)

inspect_app = typer.Typer(
    help="Shows what graphs cost and how fast they mix.", no_args_is_help=True, add_completion=False
)

Mixing = Annotated[
    str, typer.Option(help="uniform, or self_weighted:SHARE with the share that a node keeps.")
]
Tolerance = Annotated[float, typer.Option(help="Consensus error to count rounds to.")]


@inspect_app.command("graph", epilog=f"Graphs: {_NAMES}.")
def _graph(
    name: Annotated[
        str | None, typer.Argument(help="Of the graph; see below.", show_default=False)
    ] = None,
    *,
    nodes: Annotated[int | None, typer.Option(help="Number of nodes.", show_default=False)] = None,
    peers_per_step: Annotated[
        int | None,
        typer.Option(
            help="Peers that a node sends to per exchange (default: the graph's).",
            show_default=False,
        ),
    ] = None,
    dedupe: Annotated[
        bool, typer.Option("--dedupe", help="Keep only the first of equal peers.")
    ] = False,
    rows: Annotated[
        int | None, typer.Option(help="Of grid_2d and torus_2d.", show_default=False)
    ] = None,
    group_size: Annotated[
        int | None, typer.Option(help="Of inner_outer.", show_default=False)
    ] = None,
    num_rounds: Annotated[
        int | None, typer.Option(help="Of random_matching.", show_default=False)
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of random_matching.", show_default=False)
    ] = None,
    phone_book: Annotated[
        Path | None,
        typer.Option(
            help="JSON file, instead of a name: for every node the list of its peers.",
            show_default=False,
        ),
    ] = None,
    mixing: Mixing = InspectGraphsConfig.mixing,
    tolerance: Tolerance = InspectGraphsConfig.tolerance,
    model_bytes: Annotated[
        int | None, typer.Option(help="Size of the parameters.", show_default=False)
    ] = None,
    parameters: Annotated[
        int | None, typer.Option(help="Number of float32 parameters.", show_default=False)
    ] = None,
    matrices: Annotated[
        bool,
        typer.Option(
            "--matrices", help="Show the mixing matrix of every round, and their product."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Shows who sends to whom, what it costs, and how fast the nodes agree."""
    with usage_errors():
        config = InspectGraphConfig(
            name=name,
            nodes=nodes,
            phone_book=phone_book,
            peers_per_step=peers_per_step,
            dedupe=dedupe or None,
            rows=rows,
            group_size=group_size,
            num_rounds=num_rounds,
            seed=seed,
            mixing=mixing,
            tolerance=tolerance,
            model_bytes=model_bytes,
            parameters=parameters,
        )
    from ._inspect_graph import inspect_graph

    raise typer.Exit(inspect_graph(config, matrices=matrices, as_json=as_json))


@inspect_app.command("graphs", epilog=f"Graphs: {_NAMES}.")
def _graphs(
    *,
    nodes: Annotated[str, typer.Option(help="Numbers of nodes, separated by commas.")] = ",".join(
        map(str, InspectGraphsConfig.nodes)
    ),
    graphs: Annotated[
        str | None,
        typer.Option(
            help="Separated by commas, each NAME or NAME:PEERS (default: a selection of all).",
            show_default=False,
        ),
    ] = None,
    picture_nodes: Annotated[
        str, typer.Option(help="Numbers of nodes that the picture shows.")
    ] = ",".join(map(str, InspectGraphsConfig.picture_nodes)),
    mixing: Mixing = InspectGraphsConfig.mixing,
    tolerance: Tolerance = InspectGraphsConfig.tolerance,
    page: Annotated[
        Path | None,
        typer.Option(
            help="Markdown file to write the tables into, between its markers; the picture goes "
            "beside it.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the results (default: runs/graphs-DATE).", show_default=False
        ),
    ] = None,
) -> None:
    """Compares graphs at several sizes: tables and a picture."""
    with usage_errors():
        config = InspectGraphsConfig(
            graphs=InspectGraphsConfig.graphs if graphs is None else _listed(graphs),
            nodes=_numbers("--nodes", nodes),
            pictured=InspectGraphsConfig.pictured if graphs is None else _listed(graphs),
            picture_nodes=_numbers("--picture-nodes", picture_nodes),
            mixing=mixing,
            tolerance=tolerance,
        )
    from ._inspect_graphs import inspect_graphs

    raise typer.Exit(inspect_graphs(config, out, page))


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in _listed(text))
    except ValueError:
        raise ValueError(f"{option} must be integers separated by commas, got {text}") from None
