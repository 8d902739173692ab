"""What the compiler sends between replicas in a local step that is mapped by `jax.vmap`.

What all processes of a step must share: its settings, and each program before its first run.

Otherwise processes wait for each other for ever, or train on each other's garbage.
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
from .._batches import Comparisons, Verdict, is_multi_process


def has_local_steps(gradients: Any, sync: ParameterTransform | None) -> bool:
    """Return whether a step with these exchanges has updates in which nothing is to be sent."""
    if gradients is not None or sync is None:
        return False
    return bool(sync.algorithm.needs) or () in sync.phases()  # what is not known yet is rare


class LocalTraffic:
    """The traffic of the first local program of a step, of which it warns.

    Args:
      mesh: the mesh of the step.
      axis_name: the axis of the replicas, or several.
      map_with: how the local step is mapped.
      has_local_steps: whether there are updates in which no part of a step sends anything.

    Attributes:
      may_send: whether the compiler may send something nevertheless.
    """

    def __init__(
        self, mesh: AnyMesh, axis_name: AxisName, map_with: MapWith, *, has_local_steps: bool
    ) -> None:
        self._mesh, self._replicas = device_mesh(mesh), {*axis_names(axis_name)}
        # Replicas of one device are in a `shard_map`, where nothing is sent but what says so;
        # several on each of several devices are under `vmap`.
        split = {name for name, size in self._mesh.shape.items() if size > 1}
        is_vmapped = bool(split - self._replicas) and map_with == "vmap"
        self._flag = 0
        if not has_device_per_position(mesh):
            # Programs of several replicas on a device agree by a flag on what is due.
            is_vmapped, self._flag = bool(split), 4
        self.may_send = has_local_steps and is_vmapped
        self._is_read = not self.may_send

    def before_run(self, program: Any, name: str, phase: Phase | None, *args: Any) -> None:
        """Warn, once, if a local step of this program sends between replicas.

        The program is compiled, as its call would compile it. Without a phase it may decide itself
        what is due; then what it sends outside of its conditionals counts.

        Args:
          program: a jitted program.
          name: name of what the program does.
          phase: the phase of its updates; None if it decides itself, or has none.
          *args: its arguments.
        """
        is_traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(args))
        is_local = name == "update" and not phase
        if self._is_read or not is_local or is_traced:
            return
        self._is_read = True
        report = comm_report_of(program.lower(*args).compile(), mesh=self._mesh)
        kind = "local" if "local" in report.kinds else report.kinds[0]
        rows = [x for x in report.rows if x.kind == kind]
        rows = [x for x in rows if self._replicas & {*x.axis.split(",")} and x.bytes > self._flag]
        if rows:
            listed = ", ".join(f"{x.collective} of {x.bytes} bytes over {x.axis}" for x in rows)
            warn_user(
                f"A local step sends between replicas: {listed}. The compiler does so for some "
                'operations on sharded arrays under `map_with`="vmap", or with several replicas on '
                "each device, such as `take_along_axis` of labels: gather what they read by a "
                "sharding constraint before, put them into a jax.shard_map, or use "
                'map_with="shard_map" and a device for each replica.'
            )


# What differs between processes in the text of equal programs: addresses, and the order of sets.
_ADDRESS = re.compile(r"0x[0-9a-f]+")
_SET = re.compile(r"frozenset\(\{([^}]*)\}\)")


# Settings.


def compare_settings(settings: Mapping[str, Any]) -> None:
    """Raise `ValueError` on every process if some have other settings, and name these.

    Args:
      settings: the arguments of `make_train_step` and of `init`, by name.

    Communication: none with one process; else two gathers of a few KiB through the host.
    """
    if jax.process_count() == 1:
        return
    lines: Description = {}
    for name, x in settings.items():
        lines |= describe_value(x, f"`{name}`")
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


def program_checks(
    mesh: AnyMesh,
    axis_name: AxisName,
    map_with: MapWith,
    *,
    has_local_steps: bool,
    check_compiled: Callable[[str], None] | None = None,
) -> list[Callable[..., None]]:
    """Return what is called before each run of a program, with its name, phase and arguments.

    That is nothing for one process whose local steps cannot send, see `LocalTraffic`, without a
    `check_compiled`, that of a `LossProgram`.
    """
    traffic = LocalTraffic(mesh, axis_name, map_with, has_local_steps=has_local_steps)
    compared = [ProgramComparison(mesh).before_run] if is_multi_process(mesh) else []
    checked = [] if check_compiled is None else [CompiledProgramCheck(check_compiled).before_run]
    return [*compared, *([traffic.before_run] if traffic.may_send else []), *checked]


class FirstRunCheck:
    """Base class of what is done before the first run of each program of a step.

    A program is new by itself and by the structure and the types of its inputs.
    """

    def __init__(self) -> None:
        self._seen: set[Any] = set()

    def before_run(self, program: Any, name: str, phase: Phase | None, *args: Any) -> None:
        """Call `first_run` for a program that has not run; not inside of another program.

        Args:
          program: the jitted program.
          name: name of what the program does.
          phase: the phase of its updates; None if it decides itself, or has none.
          *args: the state that the program takes, and its inputs.
        """
        state, *inputs = args
        leaves, structure = jax.tree.flatten(inputs)
        key = program, structure, *map(jax.typeof, leaves)
        if key not in self._seen and not any(isinstance(x, Tracer) for x in (state.step, *leaves)):
            self.first_run(program, name, phase, *args)
            self._seen.add(key)

    def first_run(self, program: Any, name: str, phase: Phase | None, *args: Any) -> None:
        """Do what is to be done, with the arguments of `before_run`."""
        raise NotImplementedError


class CompiledProgramCheck(FirstRunCheck):
    """The compiled programs that a `LossProgram` checks.

    Args:
      check: function of the text of a compiled program.
    """

    def __init__(self, check: Callable[[str], None]) -> None:
        super().__init__()
        self._check = check

    def first_run(self, program: Any, name: str, phase: Phase | None, *args: Any) -> None:
        """Raise the error of the check; the program's call does not compile it again."""
        self._check(program.lower(*args).compile().as_text() or "")


class ProgramComparison(FirstRunCheck):
    """The programs of a step that its processes compare.

    Args:
      mesh: the mesh of the step.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self._mesh, self._comparisons = mesh, Comparisons("program")

    def first_run(self, program: Any, name: str, phase: Phase | None, *args: Any) -> None:
        """Raise `ValueError` on every process if a new program differs between processes.

        A process that does not report in time is named in a warning.

        Communication: none with one process; else one message of each process to the coordinator,
          and one back.
        """
        name = f"`{name}`" + ("" if phase is None else f" of phase {phase_name(phase)!r}")
        lines = program_lines(name, program.trace(*args))
        late = (
            f"step: before the first run of {name} {{who}} its program, so programs were not "
            "compared, and training goes on. Either it is late, or it runs another program: then "
            "the exchange of this step hangs or ends in an error of the network."
        )
        self._comparisons.compare(lines, self._mesh, _verdict, late)


def program_lines(name: str, program: jax.stages.Traced) -> Description:
    """Return hashes of a traced program's text and of the values of its constants, by name."""
    text = _ADDRESS.sub("", str(program.jaxpr))
    text = _SET.sub(lambda found: repr(sorted(found[1].split(", "))), text)
    constants = digest([x for x in constants_in(program.jaxpr) if is_host_local(x)])
    return {
        f"equations of {name}": digest([np.frombuffer(text.encode(), np.uint8)]),
        f"constants of {name}": constants,
    }


def _verdict(notes: Mapping[int, Description]) -> Verdict:
    if not (wrong := differences([*notes.values()], [*notes])):
        return Verdict()
    return Verdict(
        f"step: programs differ between processes: {'; '.join(wrong)}. All must run the same one: "
        "with the same loss function, the same numbers and arrays that it closes over, the same "
        "hyperparameters of `optimizer`, and batches of the same shapes."
    )
