"""What a step communicates, found without running it: `comm_report`, its rows and its table."""

import json
import math
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from itertools import product
from typing import Any, TypedDict, Unpack

import jax

from .._support.checks import checks_flags
from .._support.scopes import EVERY_PHASE
from .._support.types import Phase
from ..mesh import inner_specs, model_axes
from ..tracing import equations_in
from ..transform import ParameterTransform, replica_types, share_of_whole_leaves
from ._hlo import (
    COLLECTIVES,
    UNKNOWN_AXIS,
    Block,
    Branches,
    Collective,
    Loop,
    MeshAxes,
    ProgramCollectives,
    axes_of_meshes,
    axis_of,
    declared_meshes,
    mesh_axes,
    parse_module,
    read_collectives,
    wire_bytes,
)

LEVELS = ("emitted", "compiled")


@dataclass(frozen=True)
class CommRow:
    """A row of a `CommReport`: one sort of collective, and content, in one kind of step.

    Attributes:
      kind: kind of step; kinds overlap, see `comm_report`.
      axis: mesh axis, or axes in mesh order joined by ","; "?" if the device groups are those of no
        set of axes.
      collective: "all-reduce", "reduce-scatter", "all-gather", "collective-permute", "all-to-all",
        "ragged-all-to-all", "collective-broadcast"; between TPU slices "send" and "recv".
      level: "emitted" (StableHLO, what the program asks for) or "compiled" (optimised HLO, what
        runs).
      count: number of executions in one step; a combined one (several arrays) counts once.
      bytes: payload of one participating device, the whole logical buffer: the operands of an
        all-reduce, permute, all-to-all, broadcast, send; the full operand of a reduce-scatter; the
        full result of an all-gather or a recv. It is multiplied by `count`, like `wire_bytes`.
      wire_bytes: bytes that one device sends when the collective runs as a ring over
        n = `group_size` devices: 2 (n-1)/n of `bytes` for an all-reduce, (n-1)/n for a
        reduce-scatter, all-gather or all-to-all; all of them for a broadcast, or for a permute in
        which every device sends (the mean over devices where some do not); 0 for a recv.
      group_size: devices that take part together; 0 if unknown. For a permute the size of the axis.
      dtypes: element types on the wire, by their jax names.
      content: what is sent: "gradients", "parameters", "statistics" (model state), "moments",
        "metrics", "norm", "flags"; "padding", with which a collective is filled up, a row of its
        own with a `count` of 0; "" if the program does not say so. That of compiled rows is "",
        since compilers combine collectives of several contents.
      conditional: whether the collective is in a branch of a conditional.
      in_loop: whether the collective is in a loop.
      trip_count: how often the loops around it run it (already in `count`); 1 outside loops; None
        if the program does not say so; then it is counted once.
    """

    kind: str
    axis: str
    collective: str
    level: str
    count: int
    bytes: int
    wire_bytes: int
    group_size: int
    dtypes: tuple[str, ...]
    conditional: bool = False
    in_loop: bool = False
    trip_count: int | None = 1
    content: str = ""


class RowFilter(TypedDict, total=False):
    """The keyword arguments that select rows; see `CommReport.select`."""

    axis: str | Sequence[str] | None
    collective: str | None
    kind: str | None
    content: str | None


@dataclass(frozen=True)
class CommReport:
    """The communication of a step; `str(report)` is a table.

    Attributes:
      rows: the rows by kind and level; only collectives that move something have one. Collectives
        that do not depend on each other may have any order.
      kinds: kinds of step, also those that communicate nothing.
      axes: mesh axes of the program, then combinations of them that occur, then "?" if it occurs.
      levels: ("emitted", "compiled"), or only the first if nothing was compiled: on request, or
        because the program was traced for an abstract mesh; only the second of programs that were
        compiled already.
      state: a text that says whether the state of `sync` is sharded or whole, and why; ""
        if every replica has all of it in any case, or the report is not on a step.
    """

    rows: tuple[CommRow, ...]
    kinds: tuple[str, ...]
    axes: tuple[str, ...]
    levels: tuple[str, ...] = LEVELS
    state: str = ""

    def select(
        self,
        *,
        axis: str | Sequence[str] | None = None,
        collective: str | None = None,
        kind: str | None = None,
        level: str | None = None,
        content: str | None = None,
    ) -> tuple[CommRow, ...]:
        """Return the rows that match every condition.

        Args:
          axis: an axis, or several (a sequence, or a string joined by ","). Rows that run over
            other axes *as well* match too, so a count of 0 for "replica" covers them. "?" is always
            allowed and matches what could not be attributed to axes.
          collective: name of a collective.
          kind: one of `kinds`, the events of a combined one in any order; None takes all, which
            overlap.
          level: "emitted" or "compiled"; None takes both.
          content: a content, such as "statistics", or ""; None takes all.

        Returns:
          The rows, in the order of `rows`.

        Raises:
          ValueError: a name that the report does not have; the error lists those that it has.
        """
        if kind is not None:
            events = sorted(kind.split("+"))
            kind = next((k for k in self.kinds if sorted(k.split("+")) == events), kind)
        _check("kind", kind, self.kinds)
        _check("collective", collective, COLLECTIVES)
        _check("level", level, self.levels)
        axes = axis.split(",") if isinstance(axis, str) else list(axis or ())
        for name in axes:
            _check("axis", name, ["?", *",".join(self.axes).split(",")])
        return tuple(
            row
            for row in self.rows
            if set(axes) <= set(row.axis.split(","))
            and collective in (None, row.collective)
            and kind in (None, row.kind)
            and level in (None, row.level)
            and content in (None, row.content)
        )

    def count(self, *, level: str = "emitted", **which: Unpack[RowFilter]) -> int:
        """Return the number of collectives that a step executes.

        Args:
          level: "emitted" or "compiled".
          **which: `axis`, `collective` and `content` as in `select`, and `kind`, which may be left
            out only if the report has a single one.

        Returns:
          The sum of `count` over the matching rows.

        Raises:
          ValueError: an unknown name, or no kind although there are several (kinds overlap, so a
            sum over them would count twice).

        Example:
          `assert report.count(kind="local", axis="replica") == 0`
        """
        return sum(row.count for row in self._select_kind(level, which))

    def bytes(self, *, level: str = "emitted", **which: Unpack[RowFilter]) -> int:
        """Return the bytes that go into the collectives of one device in a step, as `count`."""
        return sum(row.bytes for row in self._select_kind(level, which))

    def wire_bytes(self, *, level: str = "emitted", **which: Unpack[RowFilter]) -> int:
        """Return the bytes that one device sends in a step, over its wires; see `CommRow`.

        The arguments are those of `count`. With one device per replica it is what a replica sends.
        """
        return sum(row.wire_bytes for row in self._select_kind(level, which))

    def to_json(self) -> str:
        """Return the report as a JSON object with the attributes as keys."""
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        table = _table(self.kinds, self.levels, self.rows)
        return f"{table}\nstate of `sync`: {self.state}" if self.state else table

    def _select_kind(self, level: str, which: RowFilter) -> tuple[CommRow, ...]:
        if which.get("kind") is None and len(self.kinds) > 1:
            raise ValueError(
                "`kind` is needed: kinds of step overlap, so their sum would count twice. "
                f"This report has {_quote_names(self.kinds)}."
            )
        return self.select(level=level, **which)


def _check(argument: str, value: str | None, names: Sequence[str]) -> None:
    if value is not None and value not in names:
        raise ValueError(f"`{argument}` must be one of {_quote_names(names)}, got {value!r}.")


def _quote_names(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "(none)"


# The table.

_AMOUNTS = ("count", "bytes", "wire_bytes")


def _table(kinds: Sequence[str], levels: Sequence[str], rows: Sequence[CommRow]) -> str:
    """Return a table with a line for each kind, axis, collective and content.

    Both levels are side by side: how many collectives, what goes into them, what is sent. What is
    compiled has no content, and is in the first line of those with its axis and collective.
    """
    amounts = [name for level in LEVELS for name in (level, "bytes", "sent")]
    lines = [["kind", "axis", "collective", "content", *amounts, "notes"]]
    for kind in kinds:
        of_kind = [row for row in rows if row.kind == kind]
        pairs = dict.fromkeys((row.axis, row.collective) for row in of_kind)
        for pair in pairs or [("-", "(no communication)")]:
            same = [row for row in of_kind if (row.axis, row.collective) == pair]
            by_level = {level: [row for row in same if row.level == level] for level in LEVELS}
            contents = dict.fromkeys(row.content for row in by_level["emitted"])
            for i, content in enumerate(contents or [""]):
                emitted = [row for row in by_level["emitted"] if row.content == content]
                cells = _cells(emitted, "emitted" in levels)
                cells += ["", "", ""] if i else _cells(by_level["compiled"], "compiled" in levels)
                notes = _notes(same if not i else emitted)
                lines.append([kind, *pair, content, *cells, notes])
    return "\n".join(align_columns(lines, left=(0, 1, 2, 3, 10)))


def _cells(rows: list[CommRow], is_known: bool) -> list[str]:
    """Return the amounts of rows of one level; dashes for a level that the report does not have."""
    amounts = (sum(getattr(row, name) for row in rows) for name in _AMOUNTS)
    return [f"{amount:,}" if is_known else "-" for amount in amounts]


def _notes(rows: list[CommRow]) -> str:
    notes = ["conditional"] if any(row.conditional for row in rows) else []
    if any(row.trip_count is None for row in rows):
        notes.append("loop of unknown length, counted once")
    elif any(row.in_loop for row in rows):
        notes.append("loop")
    return ", ".join(notes)


def align_columns(rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,)) -> list[str]:
    """Return the lines of a table, whose cells stand to the right but in the columns `left`."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


# Reports on functions, steps and programs.

AnyProgram = jax.stages.Lowered | jax.stages.Traced | jax.stages.Compiled


def comm_report(fn: Callable[..., Any] | Any, *args: Any, **kwargs: Any) -> CommReport:
    """List the collectives of a step, with their bytes, by mesh axis and kind of step.

    Two levels are reported: *emitted*, what the traced program asks for (its StableHLO), and
    *compiled*, what runs (optimised HLO). They differ: compilers merge and rewrite collectives, and
    those of automatic mesh axes exist only in compiled programs. `fn` is lowered and compiled,
    never executed. A program for an abstract mesh is not compiled. Collectives among single devices
    (axes of size 1, permutes onto oneself) move nothing and are left out. Loops multiply by their
    trip count where the program tells it.

    The rows of a kind list everything that a step of this kind executes, so kinds overlap:

    - A step object with one program for each phase: kinds are the keys.
    - A traced program: kind NAME executes the collectives under `jax.named_scope("phase:NAME")` in
      a conditional (the innermost phase counts), and those outside of conditionals. Kind "local"
      executes the latter alone, and exists even if there are none.
    - Phases that can meet in one step give a kind "NAME+NAME" too. "phase:*" belongs to every kind
      but "local".
    - Collectives in a conditional without a phase: kind "conditional", beside "local".
    - No collectives in conditionals: one kind, "every", or the names of the program's phases.
    - Of the branches of one conditional the largest count and bytes are reported, not the sum.

    Args:
      fn: a function (it is jitted), a jitted function, or a step object with a method
        `traced_by_phase(*args, **kwargs)` that returns a dict of `jax.stages.Traced` by kind (key
        None: one program for all kinds). Of the `sync` of a step object the report says where its
        state is.
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
    meshes = axes_of_meshes(getattr(leaf, "sharding", None) for leaf in leaves)
    by_phase = getattr(fn, "traced_by_phase", None)
    if by_phase is not None:
        return _report(by_phase(*args, **kwargs), meshes, step=fn, state=next(iter(args), None))
    jitted: Any = fn if hasattr(fn, "lower") else jax.jit(fn)
    # What `jax.pmap` returns can be lowered alone.
    program = jitted.trace if hasattr(jitted, "trace") else jitted.lower
    return _report(program(*args, **kwargs), meshes)


@checks_flags("comm_report_of")
def comm_report_of(
    lowered: AnyProgram | Mapping[str, AnyProgram],
    *,
    mesh: jax.sharding.Mesh | None = None,
    compile: bool = True,
    sync: ParameterTransform | None = None,
) -> CommReport:
    """List the collectives of programs that you compiled, for example ahead of time for a TPU.

    Args:
      lowered: a program, or several by kind of step: traced, lowered, or compiled, as
        `TrainStep.compiled` returns one. A compiled program does not say what was emitted, so with
        one the level "compiled" is alone, and a kind of step shows where it still communicates.
      mesh: the mesh that names the axes; None takes those declared in the program, and of a
        compiled one those of its arguments and results. It is needed to attribute transfers between
        TPU slices.
      compile: whether to compile too; False reports only emitted collectives. It has no effect on
        programs that are compiled already.
      sync: the parameter transform of the program, such as `js.slowmo(...)`, whose schedule says
        which exchanges meet in one step. None: any may, and kinds such as "average+slow" are
        listed that no step has.

    Returns:
      A `CommReport`; kinds as for `comm_report`.

    Raises:
      TypeError: `lowered` is none of these, or holds something that is not.

    Example:
      `comm_report_of(jax.jit(step).lower(*shapes), mesh=mesh).count(level="compiled")`
      `comm_report_of(step.compiled(state, batch)).count(level="compiled", kind="slow")`
    """
    meshes = [mesh_axes(mesh)] if mesh is not None else []
    return _report(lowered, meshes, compile=compile, sync=sync)


def _report(
    programs: Any,
    arguments: list[MeshAxes],
    *,
    compile: bool = True,
    sync: Any = None,
    step: Any = None,
    state: Any = None,
) -> CommReport:
    """Return the report on one program, or on several by kind of step."""
    whole = isinstance(programs, Mapping) and list(programs) != [None]  # a program for each kind
    by_kind: dict[str, Any] = dict(programs if isinstance(programs, Mapping) else {"": programs})
    traced = [p for p in by_kind.values() if isinstance(p, jax.stages.Traced)]
    equations = (equation for p in traced for equation in equations_in(p.jaxpr))
    meshes = axes_of_meshes(equation.params.get("mesh") for equation in equations) + arguments
    found: list[tuple[str, str, ProgramCollectives]] = []
    compiled: dict[str, jax.stages.Compiled] = {}
    for kind, program in by_kind.items():
        if isinstance(program, jax.stages.Compiled):
            shardings = program.input_shardings, program.output_shardings
            meshes += axes_of_meshes(jax.tree.leaves(shardings))
            compiled[kind] = program
            continue
        lowered: Any = program.lower() if isinstance(program, jax.stages.Traced) else program
        if not hasattr(lowered, "compiler_ir"):
            where = f" under {kind!r}" if whole else ""
            raise TypeError(
                "`lowered` must be a jax.stages.Lowered, Traced or Compiled, or a mapping of these "
                f"by kind of step, got {type(program).__name__}{where}."
            )
        # Converted to HLO, a traced program is read as a compiled one is.
        module = parse_module(lowered.compiler_ir("hlo").as_hlo_module().to_string())
        found.append((kind, "emitted", read_collectives(module, compiled=False)))
        declared = declared_meshes(module.header)
        meshes += declared
        # A program on an abstract mesh can be read but not compiled.
        counts = lowered.compiler_ir("stablehlo").operation.attributes
        assigned = counts["mhlo.num_partitions"].value * counts["mhlo.num_replicas"].value
        if compile and all(len(mesh.ids) <= assigned for mesh in declared):
            compiled[kind] = lowered.compile()
    num_devices = max((len(mesh.ids) for mesh in meshes), default=0)
    slices_first = all(mesh.slice_major for mesh in meshes)
    for kind, program in compiled.items():
        module = parse_module(program.as_text() or "")
        found.append((kind, "compiled", read_collectives(module, True, num_devices, slices_first)))

    axes = tuple(dict.fromkeys(meshes))
    sync = getattr(step, "sync", sync)
    is_sync = isinstance(sync, ParameterTransform)
    kinds = tuple(by_kind)
    if not whole:
        phases = sync.phases() if is_sync and not sync.algorithm.needs else ()
        kinds = step_kinds([program for *_, program in found], phases)
    levels = [level for level in LEVELS if [x for _, x, _ in found].count(level) == len(by_kind)]
    rows: list[CommRow] = []
    for kind, level, (name, of_level, program) in product(kinds, levels, found):
        if level == of_level and (not whole or name == kind):
            rows += _rows_of_kind(kind, program, level, axes, whole)
    names = [name for mesh in axes for name, _ in mesh.axes]
    names += sorted((row.axis for row in rows), key=lambda axis: axis == UNKNOWN_AXIS)
    layout = _state_layout(step, state) if is_sync and step is not None else ""
    return CommReport(tuple(rows), kinds, tuple(dict.fromkeys(names)), tuple(levels), layout)


def _state_layout(step: Any, state: Any) -> str:
    """Return where the shared state of a step's `sync` is; "" if every replica has all of it."""
    shared, sync = state.exchange.shared, step.sync
    if not jax.tree.leaves(shared) or sync.algorithm.is_sharded is False:
        return ""
    params, specs, where = shared["anchor"], None, (step.mesh, step.axis_name)
    if hasattr(state, "params"):
        params, axes = replica_types(state.params), model_axes(state.params, *where)
        specs = inner_specs(state.params, axes) if axes else None
    placement = {"mesh": step.mesh, "axis_name": step.axis_name, "param_specs": specs}
    whole = share_of_whole_leaves(sync, shared, params, **placement)
    return f"sharded over the replicas; of its bytes {whole:.1%} are whole on each"


def step_kinds(
    programs: Sequence[ProgramCollectives], phases: Sequence[Phase] = ()
) -> tuple[str, ...]:
    """Return the kinds of step of one traced program, from its emitted and compiled collectives.

    The rules are in the documentation of `comm_report`.

    Args:
      programs: the collectives of the program, of each level.
      phases: all that occur, each the events that are due together in some step; () if they are
        not known. Other events, of other transforms, may meet any.
    """
    known = dict.fromkeys(event for phase in phases for event in phase)

    def can_meet(events: frozenset[str]) -> bool:
        due = events & known.keys()
        return not due or any(due <= {*phase} for phase in phases)

    scopes = dict.fromkeys(scope for program in programs for scope in program.scopes)
    named = [(name, inside) for name, inside in scopes if name and name != EVERY_PHASE]
    static = dict.fromkeys(name for name, inside in named if not inside)
    chosen = dict.fromkeys(name for name, inside in named if inside)
    # Events are joined in the order of the schedule; HLO text may have them in another one.
    order = dict.fromkeys([*known, *(name for name, _ in named)])
    unnamed = (None, True) in scopes
    if chosen:
        # Of an event that the compiler left nothing of, the program does not know.
        occur = {frozenset({name for name, _ in named} & {*phase}) for phase in phases}
        together = {events for p in programs for events in _event_sets(p.block, can_meet)}
        several = sorted("+".join(e for e in order if e in x) for x in together if len(x) > 1)
        kinds = [
            kind
            for kind in ("local", *chosen, *static, *several)
            if not occur or {*kind.split("+")} & known.keys() in occur
        ]
    elif (EVERY_PHASE, True) in scopes:
        kinds = ["local", EVERY_PHASE]
    else:
        joined = "+".join(name for name in order if name in static)
        kinds = [joined or ("local" if unnamed else "every")]
    return tuple(dict.fromkeys(kinds + ["conditional"] * unnamed))


def _event_sets(block: Block, can_meet: Callable[[frozenset[str]], bool]) -> set[frozenset[str]]:
    """Return the sets of phases that can communicate in one step, for all choices of branches.

    Conditionals one after the other give all combinations, so those that cannot meet are left out
    at once.
    """
    sets: set[frozenset[str]] = {frozenset()}
    for node in block:
        if isinstance(node, Collective):
            events = [node.phase] if node.phase and node.phase != EVERY_PHASE else []
            part: set[frozenset[str]] = {frozenset(events)}
        elif isinstance(node, Loop):
            part = _event_sets(node.block, can_meet)
        else:
            part = {x for branch in node.blocks for x in _event_sets(branch, can_meet)}
        sets = {*filter(can_meet, (one | other for one in sets for other in part))}
    return sets


def _belongs(phase: str | None, kind: str) -> bool:
    """Return whether a step of a kind executes the conditional parts of a phase."""
    if phase is None:
        return kind == "conditional"
    if phase == EVERY_PHASE:
        return kind not in ("local", "conditional")
    return phase in kind.split("+")


def _rows_of_kind(
    kind: str, program: ProgramCollectives, level: str, meshes: tuple[MeshAxes, ...], whole: bool
) -> list[CommRow]:
    """Return the rows of everything that a step of one kind executes.

    If the program is of this kind alone (`whole`), all its conditional parts belong to it.
    """
    dtypes: dict[CommRow, set[str]] = defaultdict(set)

    def amounts(
        block: Block, conditional: bool, loops: tuple[int | None, ...]
    ) -> Counter[tuple[CommRow, str]]:
        """Return the amounts by row and name; `loops` are the trip counts around the block."""
        total: Counter[tuple[CommRow, str]] = Counter()
        for node in block:
            if isinstance(node, Loop):
                total += amounts(node.block, conditional, (*loops, node.trip_count))
            elif isinstance(node, Branches):
                # Branches exclude each other, so the larger amount stands for all of them: gossip
                # rounds of one phase, a branch each, count as the one exchange that happens.
                total += reduce(operator.or_, (amounts(x, True, loops) for x in node.blocks))
            elif not conditional or whole or _belongs(node.phase, kind):
                axis, group_size = axis_of(node.groups, node.pairs, meshes)
                if group_size == 1:
                    continue
                known = [count for count in loops if count is not None]
                trips = math.prod(known) if len(known) == len(loops) else None
                row = CommRow(kind, axis, node.name, level, 0, 0, 0, group_size, ())
                row = replace(row, conditional=conditional, in_loop=bool(loops), trip_count=trips)
                # Meshes of fewer devices lay out what is the same on all, as on a virtual mesh.
                most = max((len(mesh.ids) for mesh in meshes), default=0)
                num_devices = 0 if axis == UNKNOWN_AXIS else most
                whole_sent = wire_bytes(node, group_size, num_devices)
                parts = [("", (1, node.nbytes, whole_sent))]
                if level == "emitted":
                    used = node._replace(nbytes=round(node.nbytes * node.scopes.used))
                    sent = wire_bytes(used, group_size, num_devices)
                    content = node.scopes.content or ("parameters" if node.phase else "")
                    parts = [(content, (1, used.nbytes, sent))]
                    if used.nbytes < node.nbytes:
                        padding = (0, node.nbytes - used.nbytes, whole_sent - sent)
                        parts.append(("padding", padding))
                times = 1 if trips is None else trips
                for content, values in parts:
                    part = replace(row, content=content)
                    dtypes[part].update(node.dtypes)
                    for name, amount in zip(_AMOUNTS, values, strict=True):
                        total[part, name] += times * amount
        return total

    total = amounts(program.block, False, ())
    return [
        replace(row, **{name: total[row, name] for name in _AMOUNTS}, dtypes=tuple(sorted(of_row)))
        for row, of_row in dtypes.items()
    ]
