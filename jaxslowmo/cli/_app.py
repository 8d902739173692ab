"""The commands: each parses and checks its options, then calls the function that does the work."""

import dataclasses
import signal
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

import jaxslowmo
from jaxslowmo.topology import GRAPHS

from ._errors import CommandError, in_options, usage_errors
from .config._cluster import ClusterConfig
from .config._commands import CompareConfig, SampleConfig, TuneBucketsConfig, TuneOuterConfig
from .config._inspect import InspectGraphConfig, InspectGraphsConfig, InspectScheduleConfig
from .config._mesh import PIPELINES
from .config._options import (
    Command,
    Group,
    path_option,
    refuse_unused,
    same_option,
    with_options,
)
from .config._training import (
    PRESET_DEFAULTS,
    CheckpointConfig,
    TrainConfig,
    train_config,
    train_options,
)
from .processes._address import refuse_taken_port
from .processes._launch import check_launched, launch
from .processes._peers import is_child, is_one_of_several, known_processes, started_by
from .processes._supervise import end_with_parent, supervise

_GRAPHS = f"Graphs: {', '.join(GRAPHS)}."
# Options that decide the placement and the communication of a run.
_OF_A_RUN = {
    "preset", "dtype", "attention", "tied", "batch", "accumulate", "mesh", "replicas",
    "devices_per_replica", "pipeline", "microbatches", "chunks", "executor", "mode", "algorithm",
    "graph", "codec", "shard_state",
}  # fmt: skip
# Options on which the time of a step depends.
_OF_A_STEP = {
    "preset", "dtype", "attention", "batch", "accumulate", "seed", "replicas",
    "devices_per_replica", "optimizer",
}  # fmt: skip
# Options of runs whose slow steps are tuned, over virtual replicas.
_OF_SLOW_STEPS = {
    "preset", "tied", "steps", "batch", "data", "eval_every", "eval_batches", "replicas",
    "algorithm", "sync_every", "graph", "peers_per_step", "overlap", "mixing", "nesterov",
    "fragments", "delay", "merge",
    "optimizer", "learning_rate", "warmup", "schedule", "weight_decay", "clip",
}  # fmt: skip
# Options that `compare` sets itself, or that are about a single run.
_ONLY_TRAIN = {
    *("algorithm", "seed", "patience", "statistics", "statistics_rate"),
    *(field.name for cls in (CheckpointConfig, ClusterConfig) for field in dataclasses.fields(cls)),
}


def _group(help: str) -> typer.Typer:
    return typer.Typer(
        cls=Group, help=help, no_args_is_help=True, add_completion=False, rich_markup_mode=None
    )


app = _group("Data-parallel training whose replicas communicate rarely.")
inspect_app = _group(
    "Show costs of graphs, schedules of pipelines, and placement and communication of runs."
)
tune_app = _group("Measure settings on the available devices: bucket sizes, slow steps.")


def run(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Raises:
      CommandError: the command line is wrong.
    """
    command = typer.main.get_command(app)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            # `--dtype float16` adds a loss scale, unless the user gives `--loss-scale 0`.
            warnings.filterwarnings("ignore", ".*`optimizer` has no loss scale", UserWarning)
            result = command.main(args=argv, prog_name="jaxslowmo", standalone_mode=False)
    except Exception as error:
        # Usage errors of typer, or of click in versions of typer that use click.
        if not hasattr(error, "format_message"):
            raise
        message = error.format_message()  # pyright: ignore[reportAttributeAccessIssue]
        if type(error).__name__ == "NoArgsIsHelpError":
            print(message)
            return 0
        raise CommandError(f"{message.rstrip('.')}; see jaxslowmo --help") from error
    return int(result or 0)


def _train(*, train: dict[str, Any], out: Path | None) -> int:
    """Train a byte-level language model with one algorithm."""
    if (parent := started_by()) is not None:
        end_with_parent(parent)
    if is_child():
        # The parent passes Ctrl-C on as SIGTERM, which ends all processes. A KeyboardInterrupt in
        # one of them would leave the others waiting.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    config = _checked(out, train)
    if is_one_of_several(config.cluster) and not is_child():
        with usage_errors():  # before any process waits for the others
            config.mesh.check_processes(known_processes(config.cluster) or 1)
        refuse_taken_port(config.cluster)
        return supervise(sys.argv[1:], out or Path(), restarts=config.cluster.restarts)
    # Imported here, as in all commands, since `--help` should not wait for jax and matplotlib.
    from ._train import train as run_train

    return run_train(config, out)


def _checked(out: Path | None, options: Mapping[str, Any]) -> TrainConfig:
    """Return the configuration of a run; raise `CommandError` for wrong options."""
    with usage_errors():
        config = train_config(options)
        refuse_unused(options, config)
        _check_folder(out, options)
    return config


def _check_folder(out: Path | None, options: Mapping[str, Any]) -> None:
    """Raise `ValueError` for --resume or --overwrite without --out, since a new folder is empty."""
    for name, what in (("resume", "go on with"), ("overwrite", "delete")):
        if out is None and options.get(name):
            raise ValueError(f"--{name} needs --out, the folder of the run to {what}")


def _compare(*, train: dict[str, Any], out: Path | None, **options: Any) -> int:
    """Train with several algorithms at equal steps and seeds: a table and a figure."""
    with usage_errors():
        config = CompareConfig(train_config(train), **options)
        refuse_unused(train, config.train, config.base_algorithms)
        _check_folder(out, train)
    from ._compare import compare

    return compare(config, out)


def _sample(
    *,
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="Folder of a run with checkpoints, or of an exported model.",
            show_default=False,
        ),
    ],
    config: SampleConfig,
) -> int:
    """Write text from the trained model of a run."""
    from ._sample import sample

    return sample(config, run)


def _launch(
    context: typer.Context,
    processes: Annotated[int, typer.Option(help="Processes to start on this machine.")],
    restarts: Annotated[
        int,
        typer.Option(
            help="How often to start all again when one failed, before a newer checkpoint.",
            min=0,
        ),
    ] = 0,
    heartbeat_timeout: Annotated[
        int, same_option(ClusterConfig, "heartbeat_timeout")
    ] = ClusterConfig.heartbeat_timeout,
) -> int:
    """Train in several processes of this machine: launch --processes 4 -- train --out ..."""
    command, arguments = context.args, context.args[1:]
    check_launched(processes, command)
    # The options of train are checked here once, and not first in every process.
    train: Any = typer.main.get_command(app)
    with train.commands["train"].make_context("train", list(arguments)) as parsed:
        out = parsed.params.pop("out")
        if out is None:
            raise CommandError("train needs --out where there are several processes: they share it")
        config = _checked(out, parsed.params)
    with usage_errors():
        config.mesh.check_processes(processes)
    return launch(processes, restarts, heartbeat_timeout, command, out)


def _graph(*, config: InspectGraphConfig) -> int:
    """Show who sends to whom, what it costs, and how fast the nodes agree."""
    from ._inspect_graph import inspect_graph

    return inspect_graph(config)


def _graphs(
    *,
    page: Annotated[
        Path | None,
        path_option(
            "--page",
            "Markdown file to write the tables into, between its markers; the picture goes "
            "next to it.",
        ),
    ] = None,
    config: InspectGraphsConfig,
    out: Path | None,
) -> int:
    """Compare graphs at several sizes: tables and a picture."""
    from ._inspect_graphs import inspect_graphs

    return inspect_graphs(config, out, page)


def _schedule(
    *,
    out: Annotated[
        Path | None, path_option("--out", "Picture to write, such as schedule.png or .pdf.")
    ] = None,
    config: InspectScheduleConfig,
) -> int:
    """Draw the schedule of a pipeline, and compare the kinds: bubble, stash, messages."""
    from ._inspect_schedule import inspect_schedule

    return inspect_schedule(config, out)


def _config(*, train: dict[str, Any]) -> int:
    """Show devices and memory of a run of `train` with these options, and what it would send."""
    config = _checked(None, train)
    from ._inspect_config import inspect_config

    return inspect_config(config)


def _buckets(*, train: dict[str, Any], out: Path | None, **options: Any) -> int:
    """Measure bucket limits of the gradient reduction, and print the best.

    It times whole training steps of data parallelism: loss, gradients, reduction, optimizer.
    """
    with usage_errors():
        fixed = {"algorithm": "all_reduce", "execution": "devices"}
        config = TuneBucketsConfig(train_config(train | fixed), **options)
    from ._tune_buckets import tune_buckets

    return tune_buckets(config, out)


def _outer(*, train: dict[str, Any], out: Path | None, **options: Any) -> int:
    """Try momenta and rates of slow steps with several seeds, and print the best.

    All settings and seeds of a period train in one program, with virtual replicas on one device.
    """
    with usage_errors():
        config = TuneOuterConfig(train_config(train | {"execution": "virtual"}), **options)
        refuse_unused(train, config.train)
    from ._tune_outer import tune_outer

    return tune_outer(config, out)


app.command("train", cls=Command)(with_options(_train, train=train_options().keys(), out="train"))
app.command("compare", cls=Command)(
    with_options(_compare, CompareConfig, train=train_options().keys() - _ONLY_TRAIN, out="compare")
)
app.command(
    "launch",
    cls=Command,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)(_launch)
app.command("sample", cls=Command)(with_options(_sample, SampleConfig))
inspect_app.command("graph", cls=Command, epilog=_GRAPHS)(with_options(_graph, InspectGraphConfig))
inspect_app.command("graphs", cls=Command, epilog=_GRAPHS)(
    with_options(_graphs, InspectGraphsConfig, out="graphs")
)
inspect_app.command("config", cls=Command)(with_options(_config, train=_OF_A_RUN))
inspect_app.command("schedule", cls=Command, epilog=f"Kinds: {', '.join(PIPELINES)}.")(
    with_options(_schedule, InspectScheduleConfig)
)
tune_app.command("buckets", cls=Command)(
    with_options(_buckets, TuneBucketsConfig, train=_OF_A_STEP, out="tune")
)
tune_app.command("outer", cls=Command)(
    with_options(_outer, TuneOuterConfig, train=_OF_SLOW_STEPS, out="tune")
)
app.add_typer(inspect_app, name="inspect")
app.add_typer(tune_app, name="tune")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"jaxslowmo {jaxslowmo.__version__}")
        raise typer.Exit


@app.callback(epilog=f"Presets: {', '.join(PRESET_DEFAULTS)}.")
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Data-parallel training whose replicas communicate rarely."""


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    # The `sync_every` that a warning of the library names is always that of slow steps.
    line = in_options(str(message), sync_every="slow_every")
    typer.echo(f"warning: {line}", err=True)
