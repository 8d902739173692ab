"""Command-line options out of configuration fields, so that neither can lack what the other has."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import typer

from ._config import PRESET_DEFAULTS, flat_fields


def with_config_options(
    command: Callable[..., None], *, leave_out: Iterable[str] = ()
) -> Callable[..., None]:
    """`command(**options)` with one option per field of a `TrainConfig` in its signature.

    Args:
        command: takes its own options as keywords, and the configuration's as `**given`, where
            None stands for an option that was not given.
        leave_out: fields that the command decides itself.
    """

    def called(**options: Any) -> None:
        command(**options)

    parameters = [
        parameter
        for parameter in inspect.signature(command).parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    dropped = set(leave_out)
    parameters += [_parameter(name) for name in flat_fields() if name not in dropped]
    called.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    called.__annotations__ = {p.name: p.annotation for p in parameters}
    called.__doc__ = command.__doc__
    return called


def _parameter(name: str) -> inspect.Parameter:
    kind, field = flat_fields()[name]
    rule = field.metadata
    help = rule["help"]
    if field.default is not None:
        default = str(field.default).lower() if kind is bool else field.default
        by_preset = any(name in values for values in PRESET_DEFAULTS.values())
        help += f" (default: {default}{', if the preset has no own' if by_preset else ''})"
    flag = name.replace("_", "-")
    option = typer.Option(
        None,
        f"--{flag}/--no-{flag}" if kind is bool else f"--{flag}",
        help=help,
        show_default=False,
        rich_help_panel=rule["panel"],
        metavar="|".join(rule["choices"]) or None,
    )
    # Always optional: whether an option was given decides between its value and the preset's.
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind | None
    )
