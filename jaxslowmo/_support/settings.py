"""The arguments with which a factory of this package was called, to compare them later."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .checks import checks_flags



class Settings(NamedTuple):
    """A factory of this package, and the arguments of a call of it.

    Attributes:
      factory: its public name.
      arguments: value by name, defaults included.
    """

    factory: str
    arguments: Mapping[str, Any]


def records_settings(factory: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Let what the decorated factory returns hold its `Settings`; see `checks_flags`, too."""
    signature = inspect.signature(factory)
    checked = checks_flags(factory.__name__)(factory)

    @functools.wraps(factory)
    def wrapper(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        made = checked(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        transform: Any = made
        transform.settings = Settings(factory.__name__, bound.arguments)
        return made

    return wrapper


def settings_of(made: Any) -> Settings | None:
    """Return the settings of what a factory has made; None for anything else."""
    found = getattr(made, "settings", None)
    return found if isinstance(found, Settings) else None
