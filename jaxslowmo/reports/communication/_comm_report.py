"""`comm_report`: what a step communicates, found without running it."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from ..._support.types import Phase
from ...transform import ParameterTransform
from ._collectives import ProgramCollectives, read_collectives
from ._comm_rows import LEVELS, CommReport, CommRow
from ._hlo_text import parse_module
from ._kinds import kinds_of, rows_of_kind
from ._mesh_axes import (
    UNKNOWN_AXIS,
    MeshAxes,
    declared_meshes,
    mesh_axes,
    meshes_of_jaxpr,
    meshes_of_shardings,
)

AnyProgram = jax.stages.Lowered | jax.stages.Traced | jax.stages.Compiled


def comm_report(fn: Callable[..., Any] | Any, *args: Any, **kwargs: Any) -> CommReport:
    """List the collectives of a step by mesh axis, collective and kind of step.

    Two levels are reported: *emitted*, what the traced program asks for (its StableHLO), and
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

    Example:
      >>> import jax
      >>> report = comm_report(lambda x: 2 * x, jax.ShapeDtypeStruct((4,), "float32"))
      >>> report.kinds, report.count()
      (('every',), 0)
    """
    leaves = jax.tree.leaves((args, kwargs))
    meshes = meshes_of_shardings(getattr(leaf, "sharding", None) for leaf in leaves)
    for method in ("lowered_by_phase", "traced_by_phase"):
        if hasattr(fn, method):
            programs, sync = getattr(fn, method)(*args, **kwargs), getattr(fn, "sync", None)
            if not isinstance(sync, ParameterTransform):
                return _report(programs, meshes)
            report = _report(programs, meshes, phases=sync.phases())
            return replace(report, state=sync.stored)
    jitted: Any = fn if hasattr(fn, "lower") else jax.jit(fn)
    # What `jax.pmap` returns can be lowered alone.
    program = jitted.trace if hasattr(jitted, "trace") else jitted.lower
    return _report(program(*args, **kwargs), meshes)


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
      ValueError: a mapping of compiled programs and others.

    Example:
      `comm_report_of(jax.jit(step).lower(*shapes), mesh=mesh).count(level="compiled")`
      `comm_report_of(step.compiled(state, batch)).count(level="compiled", kind="slow")`
    """
    return _report(lowered, [mesh_axes(mesh)] if mesh is not None else [], compile=compile)


def _report(
    programs: Any, arguments: list[MeshAxes], *, compile: bool = True, phases: Sequence[Phase] = ()
) -> CommReport:
    """Return the report on one program, or on several by kind of step."""
    whole = isinstance(programs, Mapping) and list(programs) != [None]  # a program for each kind
    by_kind: dict[str, Any] = dict(programs if isinstance(programs, Mapping) else {"": programs})
    only_compiled = _are_compiled(by_kind)
    traced = [p for p in by_kind.values() if isinstance(p, jax.stages.Traced)]
    meshes = [mesh for p in traced for mesh in meshes_of_jaxpr(p.jaxpr)] + arguments
    found: list[tuple[str, str, ProgramCollectives]] = []
    for kind, program in by_kind.items():
        if only_compiled:
            shardings = jax.tree.leaves((program.input_shardings, program.output_shardings))
            meshes += meshes_of_shardings(shardings)
            continue
        by_kind[kind] = lowered = program.lower() if program in traced else program
        # Converted to HLO, a traced program is read as a compiled one is.
        module = parse_module(lowered.compiler_ir("hlo").as_hlo_module().to_string())
        declared = declared_meshes(module.header)
        meshes += declared
        compile = compile and _has_devices(lowered, declared)
        found.append((kind, "emitted", read_collectives(module, compiled=False)))
    if compile or only_compiled:
        num_devices = max((len(mesh.ids) for mesh in meshes), default=0)
        slices_first = all(mesh.slice_major for mesh in meshes)
        for kind, program in by_kind.items():
            text = (program if only_compiled else program.compile()).as_text() or ""
            read = read_collectives(parse_module(text), True, num_devices, slices_first)
            found.append((kind, "compiled", read))

    kinds = tuple(by_kind) if whole else kinds_of([program for _, _, program in found], phases)
    axes = tuple(dict.fromkeys(replace(mesh, slice_major=True) for mesh in meshes))
    rows: list[CommRow] = []
    for name, level, program in found:
        for kind in (name,) if whole else kinds:
            rows += rows_of_kind(kind, program, level, axes, whole=whole)
    rows.sort(key=lambda row: (kinds.index(row.kind), LEVELS.index(row.level)))
    names = [name for mesh in axes for name in mesh.names]
    names += sorted((row.axis for row in rows), key=lambda axis: axis == UNKNOWN_AXIS)
    return CommReport(
        rows=tuple(rows),
        kinds=kinds,
        axes=tuple(dict.fromkeys(names)),
        levels=tuple(dict.fromkeys(level for _, level, _ in found)),
    )


def _are_compiled(programs: Mapping[str, Any]) -> bool:
    """Return whether programs were compiled already; raise unless that holds for all or none."""
    for kind, program in programs.items():
        if not isinstance(program, AnyProgram) and not hasattr(program, "compiler_ir"):
            raise TypeError(
                "`lowered` must be a jax.stages.Lowered, Traced or Compiled, or a mapping of these "
                f"by kind of step, got {type(program).__name__} under {kind!r}."
            )
    compiled = [kind for kind, p in programs.items() if isinstance(p, jax.stages.Compiled)]
    if 0 < len(compiled) < len(programs):
        raise ValueError(
            "`lowered` must hold compiled programs only, or none, since these do not tell what was "
            f"emitted; got {compiled} of {list(programs)} compiled."
        )
    return bool(compiled)


def _has_devices(lowered: Any, meshes: list[MeshAxes]) -> bool:
    """Return False for a program on an abstract mesh, which can be read but not compiled."""
    attributes = lowered.compiler_ir("stablehlo").operation.attributes
    counts = (attributes[name].value for name in ("mhlo.num_partitions", "mhlo.num_replicas"))
    return max((len(mesh.ids) for mesh in meshes), default=0) <= math.prod(map(int, counts))
