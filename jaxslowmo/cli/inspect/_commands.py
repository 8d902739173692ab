"""The commands below `jaxslowmo inspect`; all but `config` use no device, and load no jax."""

from pathlib import Path
from typing import Annotated, Any

import typer

from jaxslowmo.topology import GRAPHS

from .._errors import usage_errors
from .._help import Command, Group
from ..config._options import folder_option, path_option, with_options
from ..config._train import train_config
from ..config._unused import refuse_unused
from ._config import InspectGraphConfig, InspectGraphsConfig
from ._schedule_config import KINDS, InspectScheduleConfig

_EPILOG = f"Graphs: {', '.join(GRAPHS)}."

# What decides where a run lies and what it sends.
_OF_A_RUN = {
    "preset", "dtype", "tied", "batch", "accumulate", "mesh", "replicas", "devices_per_replica",
    "pipeline", "microbatches", "chunks", "executor", "mode", "algorithm", "graph", "codec",
    "shard_state",
}  # fmt: skip

inspect_app = typer.Typer(
    cls=Group,
    help="Shows what graphs cost, schedules of pipelines, and where runs lie and what they send.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


def _graph(
    *,
    name: Annotated[
        str | None, typer.Argument(help="Of the graph; see below.", show_default=False)
    ] = None,
    **given: Any,
) -> None:
    """Shows who sends to whom, what it costs, and how fast the nodes agree."""
    with usage_errors():
        config = InspectGraphConfig(name, **given)
    from ._graph import inspect_graph

    raise typer.Exit(inspect_graph(config))


def _graphs(
    *,
    page: Annotated[
        Path | None,
        path_option(
            "--page",
            "Markdown file to write the tables into, between its markers; the picture goes "
            "beside it.",
        ),
    ] = None,
    out: Annotated[Path | None, folder_option("graphs")] = None,
    **given: Any,
) -> None:
    """Compares graphs at several sizes: tables and a picture."""
    # The picture shows all graphs that were asked for.
    pictured = {"pictured": given["graphs"]} if "graphs" in given else {}
    with usage_errors():
        config = InspectGraphsConfig(**given, **pictured)
    from ._graphs import inspect_graphs

    raise typer.Exit(inspect_graphs(config, out, page))


def _schedule(
    *,
    kind: Annotated[
        str | None, typer.Argument(help="Of the schedule; see below.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, path_option("--out", "Picture to write, such as schedule.png or .pdf.")
    ] = None,
    **given: Any,
) -> None:
    """Draws the schedule of a pipeline, and compares the kinds: bubble, stash, messages."""
    with usage_errors():
        config = InspectScheduleConfig(kind, **given)
    from ._schedule import inspect_schedule

    raise typer.Exit(inspect_schedule(config, out))


def _config(*, train: dict[str, Any]) -> None:
    """Shows where a run of `train` with these options would lie, and what it would send."""
    with usage_errors():
        config = train_config(train)
        refuse_unused(train, config)
    from ._run import inspect_config

    raise typer.Exit(inspect_config(config))


inspect_app.command("graph", cls=Command, epilog=_EPILOG)(with_options(_graph, InspectGraphConfig))
inspect_app.command("graphs", cls=Command, epilog=_EPILOG)(
    with_options(_graphs, InspectGraphsConfig)
)
inspect_app.command("config", cls=Command)(with_options(_config, train=_OF_A_RUN))
inspect_app.command("schedule", cls=Command, epilog=f"Kinds: {', '.join(KINDS)}.")(
    with_options(_schedule, InspectScheduleConfig)
)
