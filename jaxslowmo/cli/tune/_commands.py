"""The commands below `jaxslowmo tune`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from .._errors import usage_errors
from .._help import Command, Group
from ..config._options import folder_option, with_options
from ..config._train import train_config
from ._config import TuneBucketsConfig

# What the time of a step depends on.
_OPTIONS = {
    "preset", "dtype", "batch", "accumulate", "seed", "replicas", "devices_per_replica",
    "optimizer",
}  # fmt: skip

tune_app = typer.Typer(
    cls=Group,
    help="Measures settings on the devices at hand.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


def _buckets(
    *,
    out: Annotated[Path | None, folder_option("tune")] = None,
    train: dict[str, Any],
    **given: Any,
) -> None:
    """Measures bucket limits of the gradient reduction and tells the best.

    Whole training steps of data parallelism: loss, gradients, reduction, optimizer.
    """
    with usage_errors():
        fixed = {"algorithm": "all_reduce", "execution": "devices"}
        config = TuneBucketsConfig(train_config(train | fixed), **given)
    from ._buckets import tune_buckets

    raise typer.Exit(tune_buckets(config, out))


tune_app.command("buckets", cls=Command)(with_options(_buckets, TuneBucketsConfig, train=_OPTIONS))
