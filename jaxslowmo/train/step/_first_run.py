"""What is checked before a step's first run: its settings, and each of its programs.

All processes must share these. Otherwise they wait for each other for ever, or train on each
other's garbage. In one process a local step that sends between replicas is told.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, PartitionSpec

from ..._support.checks import settings_of, warn_user
from ..._support.types import AxisName, Phase, axis_names
from ...mesh import (
    AnyMesh,
    Description,
    MapWith,
    compare_descriptions,
    device_mesh,
    differences,
    digest,
    has_device_per_position,
    is_host_local,
)
from ...reports import comm_report_of
from ...tracing import constants_in
from ...transform import ParameterTransform, phase_name
from .._process_comparison import Comparisons, Verdict, is_multi_process

# Settings.


def compare_settings(settings: Mapping[str, Any]) -> None:
    """Raise `ValueError` on every process if some have other settings, and name these.

    Args:
      settings: the arguments of `make_train_step` and of `init`, by name.

    Communication: none with one process; else two gathers of a few KiB through the host.
    """
    if jax.process_count() == 1:
        return
    lines = dict(line for name, x in settings.items() for line in describe_value(x, f"`{name}`"))
    compare_descriptions("make_train_step: settings", lines)


def describe_value(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield names and texts of a value and of all its parts, equal on all processes if they are.

    What a factory of this package has made is known by the arguments of the factory; functions and
    objects of other classes are known by their names alone.

    Args:
      value: an argument of any kind.
      name: name of the value.
    """
    text, parts = _split_value(value)
    yield name, text
    for place, part in parts.items():
        yield from describe_value(part, f"{name}{place}")


def _split_value(value: Any) -> tuple[str, dict[str, Any]]:
    """Return a text of a value without its parts, and these by what is added to its name."""
    kind = type(value).__name__
    if (settings := settings_of(value)) is not None:
        return settings.factory, {f".{name}": x for name, x in settings.arguments.items()}
    if isinstance(value, tuple | list):
        return f"{len(value)} of {kind}", {f"[{i}]": x for i, x in enumerate(value)}
    if isinstance(value, Mapping):
        items = sorted(value.items(), key=lambda item: str(item[0]))
        return kind, {f"[{key!r}]": x for key, x in items}
    if isinstance(value, functools.partial):
        return kind, {".func": value.func, ".args": value.args, ".keywords": value.keywords}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.compare]
        return kind, {f".{name}": getattr(value, name) for name in fields}
    return _value_text(value), {}


_Shown = bool | int | float | complex | str | bytes | None | np.dtype | PartitionSpec


def _value_text(value: Any) -> str:
    if isinstance(value, _Shown):
        return repr(value)
    if isinstance(value, np.ndarray | np.generic | jax.Array) and is_host_local(value):
        return f"{value.dtype}{list(value.shape)} {digest([value])}"
    if isinstance(value, set | frozenset):  # in an order of each process
        return f"{type(value).__name__} {sorted(str([*describe_value(x)]) for x in value)}"
    named: Any = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


# Programs.

_BeforeRun = Callable[..., None]
"""Called before a run of a program: `check(program, name, phase, *args)`.

`name` is that of what the program does, `phase` that of its updates; None if it decides itself. The
arguments are the state that it takes, and its inputs.
"""


def program_checks(
    mesh: AnyMesh,
    axis_name: AxisName,
    map_with: MapWith,
    gradients: Any,
    sync: ParameterTransform | None,
    check_compiled: Callable[[str], None] | None = None,
) -> list[_BeforeRun]:
    """Return what is called before each run of a program; nothing where nothing can be wrong.

    Args:
      mesh: the mesh of the step.
      axis_name: the axis of the replicas, or several.
      map_with: how the local step is mapped.
      gradients: the reduction of gradients; None without one.
      sync: the exchange of parameters; None without one.
      check_compiled: function of the text of each compiled program, that of a `LossProgram`.
    """
    checks = [before_first_run(_compare_programs(mesh))] if is_multi_process(mesh) else []
    # Replicas of one device are in a `shard_map`, where nothing is sent but what says so; several
    # on each of several devices are under `vmap`, and agree by a flag on what is due.
    replicas = {*axis_names(axis_name)}
    split = {name for name, size in device_mesh(mesh).shape.items() if size > 1}
    shares_devices = not has_device_per_position(mesh)
    is_vmapped = split if shares_devices else split - replicas and map_with == "vmap"
    exchange = sync if gradients is None else None
    # What is not known yet is rare.
    has_local_steps = exchange is not None and (exchange.algorithm.needs or () in exchange.phases())
    if is_vmapped and has_local_steps:
        checks.append(_warn_of_traffic(device_mesh(mesh), replicas, 4 if shares_devices else 0))
    if check_compiled is not None:

        def check(program: Any, name: str, phase: Phase | None, *args: Any) -> None:
            # The program's call does not compile it again.
            check_compiled(program.lower(*args).compile().as_text() or "")

        checks.append(before_first_run(check))
    return checks


def before_first_run(check: _BeforeRun) -> _BeforeRun:
    """Return a check that is called before the first run of each program, not inside of another.

    A program is new by itself and by the structure and the types of its inputs.
    """
    seen: set[Any] = set()

    def before_run(program: Any, name: str, phase: Phase | None, state: Any, *inputs: Any) -> None:
        leaves, structure = jax.tree.flatten(inputs)
        key = program, structure, *map(jax.typeof, leaves)
        if key not in seen and not any(isinstance(x, Tracer) for x in (state.step, *leaves)):
            check(program, name, phase, state, *inputs)
            seen.add(key)

    return before_run


def _warn_of_traffic(mesh: Mesh, replicas: set[str], flag_bytes: int) -> _BeforeRun:
    """Return a check that warns, once, if the first local program sends between replicas.

    The program is compiled, as its call would compile it. Without a phase it may decide itself what
    is due; then what it sends outside of its conditionals counts.
    """
    is_read = False

    def before_run(program: Any, name: str, phase: Phase | None, *args: Any) -> None:
        nonlocal is_read
        is_traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(args))
        if is_read or name != "update" or phase or is_traced:
            return
        is_read = True
        report = comm_report_of(program.lower(*args).compile(), mesh=mesh)
        kind = "local" if "local" in report.kinds else report.kinds[0]
        listed = ", ".join(
            f"{x.collective} of {x.bytes} bytes over {x.axis}"
            for x in report.select(kind=kind)
            if replicas & {*x.axis.split(",")} and x.bytes > flag_bytes
        )
        if listed:
            warn_user(
                f"A local step sends between replicas: {listed}. Under `vmap` the compiler does so "
                "for some operations on sharded arrays, such as `take_along_axis`: gather what "
                'they read before, or use map_with="shard_map" and a device for each replica.'
            )

    return before_run


def _compare_programs(mesh: Mesh) -> _BeforeRun:
    """Return a check that raises `ValueError` on every process if programs differ between them.

    A process that does not report in time is named in a warning.

    Communication: one message of each process to the coordinator, and one back.
    """
    comparisons = Comparisons("program")

    def compare(program: Any, name: str, phase: Phase | None, *args: Any) -> None:
        name = f"`{name}`" + ("" if phase is None else f" of phase {phase_name(phase)!r}")
        lines = program_lines(name, program.trace(*args))
        timeout_message = (
            f"step: before the first run of {name} {{who}} its program, so programs were not "
            "compared. If it runs another program, this step's exchange hangs or fails."
        )
        comparisons.compare(lines, mesh, _verdict, timeout_message)

    return compare


# What differs between processes in the text of equal programs: addresses, and the order of sets.
_ADDRESS = re.compile(r"0x[0-9a-f]+")
_SET = re.compile(r"frozenset\(\{([^}]*)\}\)")


def program_lines(name: str, program: jax.stages.Traced) -> Description:
    """Return hashes of a traced program's text and of the values of its constants, by name."""
    text = _ADDRESS.sub("", str(program.jaxpr))
    text = _SET.sub(lambda match: repr(sorted(match[1].split(", "))), text)
    constants = digest([x for x in constants_in(program.jaxpr) if is_host_local(x)])
    return {
        f"equations of {name}": digest([np.frombuffer(text.encode(), np.uint8)]),
        f"constants of {name}": constants,
    }


def _verdict(notes: Mapping[int, Description]) -> Verdict:
    if not (wrong := differences([*notes.values()], [*notes])):
        return Verdict()
    return Verdict(
        f"step: programs differ between processes: {'; '.join(wrong)}. All need the same loss "
        "function, values that it closes over, `optimizer`, and shapes of batches."
    )
