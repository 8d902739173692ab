"""The commands below `jaxslowmo tune`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ._config import flat_fields, train_config
from ._errors import usage_errors
from ._options import with_config_options
from ._tune_config import ORDERS, TuneBucketsConfig, parse_size, parse_sizes

# What the time of a step depends on.
_OPTIONS = {
    "preset", "dtype", "batch", "accumulate", "seed", "replicas", "devices_per_replica",
    "optimizer",
}  # fmt: skip

tune_app = typer.Typer(
    help="Measures settings on the devices at hand.", no_args_is_help=True, add_completion=False
)


def _buckets(
    *,
    limits: Annotated[
        str,
        typer.Option(
            help="Sizes at which a bucket closes, separated by commas; one bucket per gradient is "
            "measured besides."
        ),
    ] = "1MiB,5MiB,25MiB,100MiB",
    first: Annotated[
        str, typer.Option(help="Size of the first bucket, where the limit is not below.")
    ] = "1MiB",
    order: Annotated[
        str,
        typer.Option(help="In which gradients go into buckets.", metavar="|".join(ORDERS)),
    ] = "reverse",
    rounds: Annotated[int, typer.Option(help="Measurements of each limit, in turn.")] = 9,
    steps: Annotated[int, typer.Option(help="Training steps per measurement.")] = 5,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the results (default: runs/tune-DATE).", show_default=False),
    ] = None,
    **given: Any,
) -> None:
    """Measures bucket limits of the gradient reduction and tells the best.

    Whole training steps of data parallelism: loss, gradients, reduction, optimizer.
    """
    with usage_errors():
        config = TuneBucketsConfig(
            train=train_config({**given, "algorithm": "all_reduce", "execution": "devices"}),
            limits=parse_sizes("--limits", limits),
            first=parse_size("--first", first),
            order=order,
            rounds=rounds,
            steps=steps,
        )
    from ._tune_buckets import tune_buckets

    raise typer.Exit(tune_buckets(config, out))


tune_app.command("buckets")(with_config_options(_buckets, leave_out=set(flat_fields()) - _OPTIONS))
