"""A step's settings, which all processes must share: compared before the first state is made.

Other settings would make processes run other programs: they wait for each other for ever, or train
on each other's garbage.
"""

import contextlib
import dataclasses
import functools
import hashlib
import re
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import optax

from ..._support.settings import settings_of
from ..._support.types import AxisName, PyTree
from ...mesh import AnyMesh, compare_descriptions, describe, digest, is_of_host
from ...tracing import traced_update

# What differs between processes in the text of equal programs: addresses, and the order of sets.
_ADDRESS = re.compile(r"0x[0-9a-f]+")
_SET = re.compile(r"frozenset\(\{([^}]*)\}\)")


def compare_settings(
    settings: Mapping[str, Any], params: PyTree | None, *, mesh: AnyMesh, axis_name: AxisName
) -> None:
    """Raise `ValueError` on every process if some have other settings, and name these.

    An optax transform without settings of its own is known by the tree and the dtypes of its state,
    and by a hash of the program of its update, constants included.

    Args:
      settings: the arguments of `make_train_step` and of `init`, by name.
      params: stacked parameters, equal on all processes; with None the programs of transforms are
        not compared.
      mesh: the mesh of the step.
      axis_name: the replica axis.

    Communication: none with one process; else two gathers of a few KiB through the host.
    """
    if jax.process_count() == 1:
        return

    def text(value: Any) -> str | None:
        if isinstance(value, optax.GradientTransformation):
            return (
                "a transform" if params is None else _of_transform(value, params, mesh, axis_name)
            )
        return None

    lines = {}
    for name, x in settings.items():
        lines |= described(x, text, f"`{name}`")
    compare_descriptions("make_train_step: settings", lines)


def _of_transform(
    tx: optax.GradientTransformation, params: PyTree, mesh: AnyMesh, axis_name: AxisName
) -> str:
    program, state = traced_update(tx, params, mesh=mesh, axis_name=axis_name)
    hasher = hashlib.blake2b(repr(describe(state)).encode(), digest_size=8)
    if program is not None:
        text = _ADDRESS.sub("", str(program.jaxpr))
        text = _SET.sub(lambda found: repr(sorted(found[1].split(", "))), text)
        hasher.update(text.encode())
        for x in program.consts:
            hasher.update(np.asarray(x).tobytes())
    return f"a transform with update {hasher.hexdigest()}"


def described(
    value: Any,
    known: Callable[[Any], str | None] = lambda value: None,
    name: str = "",
    seen: frozenset[int] = frozenset(),
) -> Iterator[tuple[str, str]]:
    """Yield names and texts of a value and of all parts of it, equal for equal values.

    They are equal on all processes, as far as can be told.

    Args:
      value: an argument of any kind.
      known: `known(value)`: the text of a value that the caller knows; None for others.
      name: name of the value.
      seen: the ids of functions that close over the value; they may be parts of it.
    """
    if (settings := settings_of(value)) is not None:
        text, parts = settings.factory, {f".{x}": y for x, y in settings.arguments.items()}
    else:
        told = known(value)
        text, parts = _taken_apart(value, seen) if told is None else (told, {})
    yield name, text
    for place, part in parts.items():
        yield from described(part, known, f"{name}{place}", seen)


def _taken_apart(value: Any, seen: frozenset[int]) -> tuple[str, dict[str, Any]]:
    """Return a text of a value without its parts, and these by what is added to its name."""
    kind = type(value)
    if isinstance(value, tuple | list):
        return f"{len(value)} of {kind.__name__}", {f"[{i}]": x for i, x in enumerate(value)}
    if isinstance(value, Mapping):
        items = sorted(value.items(), key=lambda item: str(item[0]))
        return kind.__name__, {f"[{key!r}]": x for key, x in items}
    if isinstance(value, functools.partial):
        return "partial", {".func": value.func, ".args": value.args, ".keywords": value.keywords}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.compare]
        return kind.__name__, {f".{name}": getattr(value, name) for name in fields}
    return _text_of(value, seen), {}


def _text_of(value: Any, seen: frozenset[int]) -> str:
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    if isinstance(value, np.dtype | jax.sharding.PartitionSpec):
        return repr(value)
    if isinstance(value, np.ndarray | np.generic | jax.Array) and is_of_host(value):
        return f"{value.dtype}{list(value.shape)} {digest([value])}"
    if isinstance(value, set | frozenset):  # in an order of each process
        return f"{type(value).__name__}({', '.join(sorted(_joined(x, seen) for x in value))})"
    named = value if isinstance(value, type | types.FunctionType) else type(value)
    name = f"{named.__module__}.{named.__qualname__}"
    if not isinstance(value, types.FunctionType) or id(value) in seen:
        return name
    program = [_constants(value.__code__)]
    for cell in value.__closure__ or ():
        with contextlib.suppress(ValueError):  # not assigned yet
            program.append(_joined(cell.cell_contents, seen | {id(value)}))
    return f"{name} {hashlib.blake2b(' '.join(program).encode(), digest_size=8).hexdigest()}"


def _joined(value: Any, seen: frozenset[int] = frozenset()) -> str:
    return " ".join(text for _, text in described(value, seen=seen))


def _constants(code: types.CodeType) -> str:
    inner = [_constants(x) if isinstance(x, types.CodeType) else _joined(x) for x in code.co_consts]
    return " ".join([code.co_code.hex(), *code.co_names, *inner])
