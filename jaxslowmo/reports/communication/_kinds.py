"""Kinds of step of a program, and the rows of collectives that each kind executes."""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ..._support.scopes import EVERY_PHASE
from ..._support.types import Phase
from ._collectives import Block, Collective, Loop, ProgramCollectives, leaves, wire_bytes
from ._comm_rows import CommRow
from ._mesh_axes import UNKNOWN_AXIS, MeshAxes, axis_of

# By what must be equal in rows that are joined: rows without amounts and dtypes.
_Rows = dict[CommRow, CommRow]


def kinds_of(
    programs: Sequence[ProgramCollectives], phases: Sequence[Phase] = ()
) -> tuple[str, ...]:
    """Return the kinds of step of one traced program, from its emitted and compiled collectives.

    The rules are in the documentation of `comm_report`.

    Args:
      programs: the collectives of the program, of each level.
      phases: all that are due together in some step: their events do not meet otherwise. Events
        that are in none may meet any.
    """
    known = frozenset(event for phase in phases for event in phase)

    def can_meet(events: frozenset[str]) -> bool:
        due = events & known
        return not due or any(due <= {*phase} for phase in phases)

    scopes: dict[tuple[str, bool], None] = {}
    unnamed = False
    for program in programs:
        scopes.update(dict.fromkeys(program.scopes))
        for collective, conditional in leaves(program.block):
            if collective.phase is not None:
                scopes[collective.phase, conditional] = None
            elif conditional:
                unnamed = True
    order = [name for name, _ in scopes if name != EVERY_PHASE]
    static = _distinct(name for name, inside in scopes if name != EVERY_PHASE and not inside)
    chosen = _distinct(name for name, inside in scopes if name != EVERY_PHASE and inside)
    if chosen:
        names = ["local", *chosen, *static]
        together = {
            events for program in programs for events in _event_sets(program.block, can_meet)
        }
        joined = ["+".join(_distinct(e for e in order if e in events)) for events in together]
        names += sorted(name for name in joined if "+" in name)
    elif (EVERY_PHASE, True) in scopes:
        names = ["local", EVERY_PHASE]
    elif static:
        names = ["+".join(static)]
    else:
        names = ["local" if unnamed else "every"]
    return tuple(_distinct(names + ["conditional"] * unnamed))


def _distinct(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


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


def rows_of_kind(
    kind: str, program: ProgramCollectives, level: str, meshes: tuple[MeshAxes, ...], *, whole: bool
) -> list[CommRow]:
    """Return the rows of everything that a step of one kind executes.

    Args:
      kind: name of the kind.
      program: the collectives of a program.
      level: "emitted" or "compiled".
      meshes: the meshes whose axes are looked for.
      whole: whether all conditional parts belong to this kind, since the program is of it alone.
    """
    rows = _Counter(kind, level, meshes, whole).block(program.block, False, 1, False)
    return list(rows.values())


@dataclass(frozen=True)
class _Counter:
    kind: str
    level: str
    meshes: tuple[MeshAxes, ...]
    whole: bool

    def block(self, block: Block, conditional: bool, trips: int | None, in_loop: bool) -> _Rows:
        total: _Rows = {}
        for node in block:
            if isinstance(node, Collective):
                part = self.collective(node, conditional, trips, in_loop)
            elif isinstance(node, Loop):
                inner = None
                if trips is not None and node.trip_count is not None:
                    inner = trips * node.trip_count
                part = self.block(node.block, conditional, inner, True)
            else:
                # Branches exclude each other, so the larger amount stands for all of them: gossip
                # rounds of one phase, a branch each, count as the one exchange that happens.
                part = {}
                for branch in node.blocks:
                    part = _merge(part, self.block(branch, True, trips, in_loop), max)
            total = _merge(total, part, operator.add)
        return total

    def collective(
        self, node: Collective, conditional: bool, trips: int | None, in_loop: bool
    ) -> _Rows:
        if conditional and not self.whole and not _belongs(node.phase, self.kind):
            return {}
        axis, group_size = axis_of(node.groups, node.pairs, self.meshes)
        if group_size == 1:
            return {}
        times = 1 if trips is None else trips
        num_devices = 0 if axis == UNKNOWN_AXIS else len(self.meshes[0].ids)
        row = CommRow(
            kind=self.kind,
            axis=axis,
            collective=node.name,
            level=self.level,
            count=times,
            bytes=times * node.nbytes,
            wire_bytes=times * wire_bytes(node, group_size, num_devices),
            group_size=group_size,
            dtypes=node.dtypes,
            conditional=conditional,
            in_loop=in_loop,
            trip_count=trips,
        )
        return {replace(row, count=0, bytes=0, wire_bytes=0, dtypes=()): row}


def _merge(first: _Rows, second: _Rows, how: Callable[[int, int], int]) -> _Rows:
    """Return the sum of rows, or the larger amounts of two alternatives."""
    merged = dict(first)
    for key, row in second.items():
        other = merged.get(key, key)
        merged[key] = replace(
            row,
            count=how(other.count, row.count),
            bytes=how(other.bytes, row.bytes),
            wire_bytes=how(other.wire_bytes, row.wire_bytes),
            dtypes=tuple(sorted({*other.dtypes, *row.dtypes})),
        )
    return merged
