"""The commands: parse, validate, and call what does the work."""

import dataclasses
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

import jaxslowmo

from ._cluster_config import CheckpointConfig, ClusterConfig
from ._config import PRESET_DEFAULTS, CompareConfig, train_config
from ._errors import CommandError, usage_errors
from ._inspect import inspect_app
from ._launch import launch
from ._launchers import is_one_of_several
from ._options import with_config_options
from ._supervise import end_with_parent, is_child, supervise
from ._tune import tune_app

Out = Annotated[
    Path | None,
    typer.Option(help="Folder for the results (default: runs/COMMAND-DATE).", show_default=False),
]

app = typer.Typer(
    help="Data-parallel training whose replicas rarely talk.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)


def run(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code.

    Raises:
        CommandError: if the command was called wrongly.
    """
    command = typer.main.get_command(app)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            result = command.main(args=argv, prog_name="jaxslowmo", standalone_mode=False)
    except Exception as error:
        # Usage errors of typer, or of click in versions that build on it.
        if not hasattr(error, "format_message"):
            raise
        message = error.format_message()  # pyright: ignore[reportAttributeAccessIssue]
        if not message:  # no arguments: the help has been printed
            return 0
        raise CommandError(f"{message.rstrip('.')}; see jaxslowmo --help") from error
    return int(result or 0)


def _train(*, out: Out = None, **given: Any) -> None:
    """Trains a byte-level language model with one algorithm."""
    with usage_errors():
        config = train_config(given)
    if is_one_of_several(config.cluster) and not is_child():
        raise typer.Exit(supervise(sys.argv[1:], out or Path(), restarts=config.cluster.restarts))
    if is_child():
        end_with_parent()
    # Here and below: jax, flax and matplotlib take seconds to import, which `--help` should not.
    from ._train import train

    raise typer.Exit(train(config, out))


def _compare(
    *,
    algorithms: Annotated[
        str,
        typer.Option(
            help="Separated by commas; the ratios are to the first. Each may bring settings: "
            "sgp+overlap=1+graph=ring."
        ),
    ] = "all_reduce,local_sgd,slowmo",
    seeds: Annotated[str, typer.Option(help="Separated by commas.")] = "0",
    out: Out = None,
    **given: Any,
) -> None:
    """Trains with several algorithms at equal steps and seeds: a table and a figure."""
    with usage_errors():
        config = CompareConfig(
            train=train_config(given),
            algorithms=tuple(name.strip() for name in algorithms.split(",") if name.strip()),
            seeds=_integers("--seeds", seeds),
        )
    from ._compare import compare

    raise typer.Exit(compare(config, out))


def _launch(
    context: typer.Context,
    processes: Annotated[int, typer.Option(help="Processes to start on this machine.")],
    restarts: Annotated[
        int, typer.Option(help="How often to start all again after one was lost.", min=0)
    ] = 0,
    heartbeat_timeout: Annotated[
        int, typer.Option(help="Seconds after which a silent process is given up.", min=2)
    ] = 10,
) -> None:
    """Trains in several processes of this machine: launch --processes 4 -- train --out ..."""
    raise typer.Exit(launch(processes, restarts, heartbeat_timeout, context.args))


def _integers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError(f"{option} must be integers separated by commas, got {text}") from None


def _register(name: str, command: Callable[..., None], leave_out: tuple[str, ...] = ()) -> None:
    app.command(name)(with_config_options(command, leave_out=leave_out))


_register("train", _train)
_ONLY_TRAIN = [
    field.name for cls in (CheckpointConfig, ClusterConfig) for field in dataclasses.fields(cls)
]
_register(
    "compare",
    _compare,
    leave_out=("algorithm", "seed", "statistics", "statistics_rate", *_ONLY_TRAIN),
)
app.command(
    "launch",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)(_launch)
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
    """Data-parallel training whose replicas rarely talk."""


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    typer.echo(f"warning: {message}", err=True)
