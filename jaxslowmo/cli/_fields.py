"""Fields of configurations that are options of the command line, and their rules."""

import dataclasses
from typing import Any


def option(
    default: Any,
    help: str,
    *,
    panel: str,
    choices: tuple[str, ...] = (),
    least: float | None = None,
    below: float | None = None,
) -> Any:
    """A field with what a command-line option needs to know.

    Args:
        default: its value where the option is not given; also by preset.
        help: what it says in `--help`.
        panel: under which heading it stands there.
        choices: the only values; () allows any.
        least: lower bound.
        below: exclusive upper bound.
    """
    metadata = {"help": help, "panel": panel, "choices": choices, "least": least, "below": below}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Checked:
    """Values against the rules of their options; `ValueError` with option, rule and value."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, rule = getattr(self, field.name), field.metadata
            if not rule or value is None:
                continue
            name = f"--{field.name.replace('_', '-')}"
            if rule["choices"] and value not in rule["choices"]:
                raise ValueError(f"{name} must be one of {', '.join(rule['choices'])}, got {value}")
            # Written so that NaN fails, too.
            if rule["least"] is not None and not value >= rule["least"]:
                raise ValueError(f"{name} must be >= {rule['least']}, got {value}")
            if rule["below"] is not None and not value < rule["below"]:
                raise ValueError(f"{name} must be < {rule['below']}, got {value}")
