"""The arguments with which a factory of this package was called, to compare them later."""

import dataclasses
import functools
import hashlib
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import numpy as np
from jax.core import Tracer

_Args = ParamSpec("_Args")
_Made = TypeVar("_Made")


class Settings(NamedTuple):
    """A factory of this package, and the arguments of a call of it.

    Attributes:
      factory: its public name.
      arguments: value by name, defaults included.
    """

    factory: str
    arguments: Mapping[str, Any]


def records_settings(factory: Callable[_Args, _Made]) -> Callable[_Args, _Made]:
    """Let what the decorated factory returns hold its `Settings`."""
    signature = inspect.signature(factory)

    @functools.wraps(factory)
    def recorded(*args: _Args.args, **kwargs: _Args.kwargs) -> _Made:
        made = factory(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        transform: Any = made
        transform.settings = Settings(factory.__name__, bound.arguments)
        return made

    return recorded


def settings_of(made: Any) -> Settings | None:
    """Return the settings of what a factory has made; None for anything else."""
    found = getattr(made, "settings", None)
    return found if isinstance(found, Settings) else None


def described(
    name: str, value: Any, text: Callable[[Any], str | None]
) -> Iterator[tuple[str, str]]:
    """Yield names and texts of a value and of all settings in it, equal for equal settings.

    Args:
      name: name of the value.
      value: an argument of any kind.
      text: `text(value)`: the text of a value that the caller knows; None for others.
    """
    if (settings := settings_of(value)) is not None:
        yield name, settings.factory
        for argument, inner in settings.arguments.items():
            yield from described(f"{name}.{argument}", inner, text)
    elif (known := text(value)) is not None:
        yield name, known
    elif isinstance(value, tuple | list) and type(value) in (tuple, list):
        yield name, f"{len(value)} of {type(value).__name__}"
        for i, inner in enumerate(value):
            yield from described(f"{name}[{i}]", inner, text)
    elif isinstance(value, Mapping):
        yield name, type(value).__name__
        for key, inner in sorted(value.items(), key=lambda item: str(item[0])):
            yield from described(f"{name}[{key!r}]", inner, text)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield name, type(value).__name__
        for field in dataclasses.fields(value):
            if field.compare:
                yield from described(f"{name}.{field.name}", getattr(value, field.name), text)
    else:
        yield name, text_of(value)


def text_of(value: Any) -> str:
    """Return a text that is equal on all processes for equal values, as far as it can tell."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | np.dtype):
        return repr(value)
    if isinstance(value, jax.sharding.PartitionSpec):
        return repr(value)
    is_array = isinstance(value, np.ndarray | np.generic | jax.Array)
    if is_array and not isinstance(value, Tracer):
        array = np.asarray(value)
        return f"{array.dtype}{list(array.shape)} {_digest(array.tobytes())}"
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, functools.partial):
        inner = [text_of(x) for x in (value.func, *value.args)]
        named = [f"{name}={text_of(x)}" for name, x in sorted(value.keywords.items())]
        return f"partial({', '.join([*inner, *named])})"
    if isinstance(value, types.FunctionType):
        return f"{value.__module__}.{value.__qualname__} {_digest(_code(value).encode())}"
    if isinstance(value, tuple | list | set | frozenset):
        texts = [text_of(x) for x in value]
        if isinstance(value, set | frozenset):  # in an order of each process
            texts.sort()
        return f"{type(value).__name__}({', '.join(texts)})"
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if dataclasses.is_dataclass(value):
        fields = [f.name for f in dataclasses.fields(value) if f.compare]
        return f"{kind}({', '.join(text_of(getattr(value, name)) for name in fields)})"
    return kind


def _code(function: types.FunctionType, seen: frozenset[int] = frozenset()) -> str:
    """Return the text of a function's program and of what it closes over."""
    parts, seen = [_constants(function.__code__)], seen | {id(function)}
    for cell in function.__closure__ or ():
        try:
            held = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        if not isinstance(held, types.FunctionType):
            parts.append(text_of(held))
        elif id(held) not in seen:
            parts.append(_code(held, seen))
    return " ".join(parts)


def _constants(code: types.CodeType) -> str:
    inner = [_constants(x) if isinstance(x, types.CodeType) else text_of(x) for x in code.co_consts]
    return " ".join([code.co_code.hex(), *code.co_names, *inner])


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
