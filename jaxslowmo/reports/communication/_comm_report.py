"""`comm_report`: what a step communicates, found without running it."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from ..._support.types import Phase
from ...transform import ParameterTransform
from ._collectives import ProgramCollectives
from ._comm_rows import LEVELS, CommReport, CommRow
from ._hlo import read_hlo
from ._kinds import kinds_of, rows_of_kind
from ._mesh_axes import (
    UNKNOWN_AXIS,
    MeshAxes,
    mesh_axes,
    meshes_of_arguments,
    meshes_of_compiled,
    meshes_of_jaxpr,
)
from ._stablehlo import has_devices, meshes_of_module, read_stablehlo

AnyProgram = jax.stages.Lowered | jax.stages.Traced | jax.stages.Compiled


def comm_report(fn: Callable[..., Any] | Any, *args: Any, **kwargs: Any) -> CommReport:
    """List the collectives of a step by mesh axis, collective and kind of step.

    Two levels are reported: *emitted*, what the traced program asks for (StableHLO), and
    *compiled*, what runs (optimised HLO). They differ: compilers merge and rewrite collectives, and
    those of automatic mesh axes exist only in compiled programs. `fn` is lowered and compiled,
    never executed; nothing is donated. A program for an abstract mesh is not compiled.

    Kinds of step. The rows of a kind list everything that a step of this kind executes, so kinds
    overlap.

    - A step object with one program for each phase: kinds are the keys.
    - In a traced program, collectives under `jax.named_scope("phase:NAME")` inside a conditional
      are executed by steps of kind NAME only (the innermost phase counts). Kind "local" executes
      those outside of conditionals, kind NAME those and its own. "local" exists even if silent.
    - Phases that can meet in one step give a kind "NAME+NAME" too, which executes both; those of
      the `sync` of a step object meet as its schedule says.
      "phase:*" belongs to every kind but "local".
    - Collectives in a conditional without a phase: kind "conditional", beside "local".
    - A program without phases and without collectives in conditionals has the one kind "every";
      with phases, but only outside conditionals (a program made for these phases), the one kind
      NAME, or "NAME+NAME".
    - Branches of one conditional exclude each other: where several of them belong to a kind, the
      largest count and bytes per axis and collective are reported, not the sum.

    Collectives among single devices (axes of size 1, permutes onto oneself) move nothing and are
    left out. Loops multiply by their trip count where the program tells it.

    Args:
      fn: a function (it is jitted), a jitted function, or a step object with a method
        `lowered_by_phase(*args, **kwargs)` that returns a dict of `jax.stages.Lowered` by kind (key
        None, or the program alone: one program for all kinds); or `traced_by_phase`, the same with
        `jax.stages.Traced`. Of the `sync` of a step object the report says where its state is.
      *args: arguments of `fn`: arrays or `jax.ShapeDtypeStruct`s.
      **kwargs: its keyword arguments.

    Returns:
      A `CommReport`.

    Raises:
      TypeError: `fn` is none of these.

    Example:
      >>> import jax
      >>> report = comm_report(lambda x: 2 * x, jax.ShapeDtypeStruct((4,), "float32"))
      >>> report.kinds, report.count()
      (('every',), 0)
    """
    meshes = meshes_of_arguments((args, kwargs))
    for method in ("lowered_by_phase", "traced_by_phase"):
        if hasattr(fn, method):
            programs, sync = getattr(fn, method)(*args, **kwargs), getattr(fn, "sync", None)
            if not isinstance(sync, ParameterTransform):
                return _report(programs, meshes, compile=True)
            report = _report(programs, meshes, compile=True, phases=sync.phases())
            return dataclasses.replace(report, state=sync.stored)
    if not callable(fn):
        raise TypeError(
            "`fn` must be a function, a jitted function or a step object with "
            f"`lowered_by_phase`, got {type(fn).__name__}."
        )
    jitted: Any = fn if hasattr(fn, "lower") else jax.jit(fn)
    program = jitted.trace if hasattr(jitted, "trace") else jitted.lower
    return _report(program(*args, **kwargs), meshes, compile=True)


def comm_report_of(
    lowered: AnyProgram | Mapping[str, AnyProgram],
    *,
    mesh: jax.sharding.Mesh | None = None,
    compile: bool = True,
) -> CommReport:
    """Report on programs made elsewhere, for example for a TPU topology ahead of time.

    Args:
      lowered: a program, or several by kind of step: all traced or lowered, or all compiled, as
        `TrainStep.compiled` returns one. A compiled program does not say what was emitted, so it
        gives the level "compiled" alone, and a kind of step shows where it still communicates.
      mesh: the mesh that names the axes; None takes those declared in the program, and of a
        compiled one those of its arguments and results. It is needed to attribute transfers between
        TPU slices.
      compile: whether to compile too; False reports only emitted collectives. It has no effect on
        programs that are compiled already.

    Returns:
      A `CommReport`; kinds as for `comm_report`.

    Raises:
      TypeError: `lowered` is none of these, or holds something that is not.
      ValueError: an empty mapping, or one that mixes compiled programs with others.

    Example:
      `comm_report_of(jax.jit(step).lower(*shapes), mesh=mesh).count(level="compiled")`
      `comm_report_of(step.compiled(state, batch)).count(level="compiled", kind="slow")`
    """
    _check_programs(lowered)
    return _report(lowered, [mesh_axes(mesh)] if mesh is not None else [], compile=compile)


def _check_programs(programs: Any) -> None:
    by_kind = programs if isinstance(programs, Mapping) else {None: programs}
    if not by_kind:
        raise ValueError("`lowered` must hold at least one program, got an empty mapping.")
    for kind, program in by_kind.items():
        if not isinstance(program, AnyProgram) and not hasattr(program, "compiler_ir"):
            where = "" if kind is None else f" under {kind!r}"
            raise TypeError(
                "`lowered` must be a jax.stages.Lowered, Traced or Compiled, or a mapping of these "
                f"by kind of step, got {type(program).__name__}{where}."
            )
    compiled = [kind for kind, p in by_kind.items() if isinstance(p, jax.stages.Compiled)]
    if 0 < len(compiled) < len(by_kind):
        others = [kind for kind in by_kind if kind not in compiled]
        raise ValueError(
            "`lowered` must hold compiled programs only, or none, since these do not tell what was "
            f"emitted; got {compiled} compiled and {others} not."
        )


def _report(
    programs_by_kind: Any,
    arguments: list[MeshAxes],
    *,
    compile: bool,
    phases: Sequence[Phase] = (),
) -> CommReport:
    """Return the report on one program, or on several by kind of step."""
    programs_by_name = (
        programs_by_kind if isinstance(programs_by_kind, Mapping) else {None: programs_by_kind}
    )
    whole = list(programs_by_name) != [None]  # each program belongs to one kind
    by_kind: dict[str, Any] = {}
    traced: list[MeshAxes] = []
    declared: list[MeshAxes] = []
    modules: dict[str, Any] = {}
    for name, program in programs_by_name.items():
        kind = str(name)
        if isinstance(program, jax.stages.Compiled):
            by_kind[kind] = program
            declared += meshes_of_compiled(program)
            continue
        if hasattr(program, "jaxpr"):
            traced += meshes_of_jaxpr(program.jaxpr)
        by_kind[kind] = program.lower() if hasattr(program, "lower") else program
        modules[kind] = by_kind[kind].compiler_ir("stablehlo")
        # The module declares its meshes too, but only with Shardy.
        declared += meshes_of_module(modules[kind])
    all_meshes = traced + arguments + declared
    meshes = _distinct(all_meshes)
    compile = not modules or (compile and all(map(has_devices, modules.values())))

    programs: list[tuple[str, str, ProgramCollectives]]
    programs = [(kind, "emitted", read_stablehlo(module)) for kind, module in modules.items()]
    if compile:
        num_devices = max((mesh.size for mesh in meshes), default=0)
        slice_major = all(mesh.slice_major for mesh in all_meshes)
        for kind, program in by_kind.items():
            compiled = program if kind not in modules else program.compile()
            text = compiled.as_text() or ""
            programs.append((kind, "compiled", read_hlo(text, num_devices, slice_major)))

    kinds = tuple(by_kind) if whole else kinds_of([program for _, _, program in programs], phases)
    rows: list[CommRow] = []
    for name, level, program in programs:
        for kind in (name,) if whole else kinds:
            rows += rows_of_kind(kind, program, level, meshes, whole=whole)
    rows.sort(key=lambda row: (kinds.index(row.kind), LEVELS.index(row.level)))
    return CommReport(
        rows=tuple(rows),
        kinds=kinds,
        axes=_axes(meshes, rows),
        levels=(LEVELS[:1] if modules else ()) + (LEVELS[1:] if compile else ()),
    )


def _distinct(meshes: list[MeshAxes]) -> tuple[MeshAxes, ...]:
    """Return the meshes without those that equal an earlier one in all but their slices."""
    distinct: dict[tuple[Any, ...], MeshAxes] = {}
    for mesh in meshes:
        distinct.setdefault((mesh.names, mesh.sizes, mesh.ids), mesh)
    return tuple(distinct.values())


def _axes(meshes: tuple[MeshAxes, ...], rows: list[CommRow]) -> tuple[str, ...]:
    single = [name for mesh in meshes for name in mesh.names]
    axes = [row.axis for row in rows]
    combined = [axis for axis in axes if axis not in single and axis != UNKNOWN_AXIS]
    unknown = [UNKNOWN_AXIS] if UNKNOWN_AXIS in axes else []
    return tuple(dict.fromkeys(single + combined + unknown))
