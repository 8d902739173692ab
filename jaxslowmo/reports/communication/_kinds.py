"""Kinds of step of a program, and the rows of collectives that each kind executes."""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import reduce

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

    scopes: dict[tuple[str | None, bool], None] = {}
    for program in programs:
        scopes.update(dict.fromkeys(program.scopes))
        scopes.update({(node.phase, inside): None for node, inside in leaves(program.block)})
    named = [(name, inside) for name, inside in scopes if name not in (None, EVERY_PHASE)]
    order = _distinct(str(name) for name, _ in named)
    static = _distinct(str(name) for name, inside in named if not inside)
    chosen = _distinct(str(name) for name, inside in named if inside)
    unnamed = (None, True) in scopes
    if chosen:
        together = {events for p in programs for events in _event_sets(p.block, can_meet)}
        joined = ["+".join(e for e in order if e in events) for events in together]
        names = ["local", *chosen, *static, *sorted(name for name in joined if "+" in name)]
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
            part = {frozenset({node.phase} - {None, EVERY_PHASE})}
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

    def in_block(block: Block, conditional: bool, trips: int | None, in_loop: bool) -> _Rows:
        total: _Rows = {}
        for node in block:
            if isinstance(node, Collective):
                part = of_one(node, conditional, trips, in_loop)
            elif isinstance(node, Loop):
                turns = node.trip_count
                inner = trips * turns if trips is not None and turns is not None else None
                part = in_block(node.block, conditional, inner, True)
            else:
                # Branches exclude each other, so the larger amount stands for all of them: gossip
                # rounds of one phase, a branch each, count as the one exchange that happens.
                branches = (in_block(branch, True, trips, in_loop) for branch in node.blocks)
                part = reduce(lambda one, other: _merge(one, other, max), branches, {})
            total = _merge(total, part, operator.add)
        return total

    def of_one(node: Collective, conditional: bool, trips: int | None, in_loop: bool) -> _Rows:
        if conditional and not whole and not _belongs(node.phase, kind):
            return {}
        axis, group_size = axis_of(node.groups, node.pairs, meshes)
        if group_size == 1:
            return {}
        times = 1 if trips is None else trips
        num_devices = 0 if axis == UNKNOWN_AXIS else len(meshes[0].ids)
        key = CommRow(
            kind, axis, node.name, level, 0, 0, 0, group_size, (), conditional, in_loop, trips
        )
        sent = wire_bytes(node, group_size, num_devices)
        amounts = {"count": times, "bytes": times * node.nbytes, "wire_bytes": times * sent}
        return {key: replace(key, **amounts, dtypes=node.dtypes)}

    return list(in_block(program.block, False, 1, False).values())


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
