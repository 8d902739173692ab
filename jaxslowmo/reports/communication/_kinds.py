"""From trees of collectives to rows: which kinds of step a program has, and what each executes."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..._support.scopes import EVERY_PHASE
from ._collectives import Block, Collective, Loop, ProgramCollectives, leaves, wire_bytes
from ._comm_rows import CommRow
from ._mesh_axes import UNKNOWN_AXIS, MeshAxes, axis_of


@dataclass(frozen=True)
class _Key:
    axis: str
    collective: str
    group_size: int
    conditional: bool
    in_loop: bool
    trip_count: int | None


@dataclass(frozen=True)
class _Amount:
    count: int = 0
    nbytes: int = 0
    wire: int = 0
    dtypes: frozenset[str] = frozenset()

    def joined(self, other: "_Amount", how: Callable[[int, int], int]) -> "_Amount":
        """The sum of two amounts, or the larger one of two alternatives."""
        return _Amount(
            how(self.count, other.count),
            how(self.nbytes, other.nbytes),
            how(self.wire, other.wire),
            self.dtypes | other.dtypes,
        )


_Amounts = dict[_Key, _Amount]


def kinds_of(programs: Sequence[ProgramCollectives]) -> tuple[str, ...]:
    """Kinds of step of one traced program, given what was emitted and what was compiled.

    The rules stand in the documentation of `comm_report`.
    """
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
        together = {events for program in programs for events in _event_sets(program.block)}
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


def _event_sets(block: Block) -> set[frozenset[str]]:
    """The sets of phases that can communicate in one step, over all choices of branches."""
    sets: set[frozenset[str]] = {frozenset()}
    for node in block:
        if isinstance(node, Collective):
            events = [node.phase] if node.phase and node.phase != EVERY_PHASE else []
            part: set[frozenset[str]] = {frozenset(events)}
        elif isinstance(node, Loop):
            part = _event_sets(node.block)
        else:
            part = {events for branch in node.blocks for events in _event_sets(branch)}
        sets = {one | other for one in sets for other in part}
    return sets


def _belongs(phase: str | None, kind: str) -> bool:
    """Whether a step of a kind executes what stands in a conditional under a phase."""
    if phase is None:
        return kind == "conditional"
    if phase == EVERY_PHASE:
        return kind not in ("local", "conditional")
    return phase in kind.split("+")


def rows_of_kind(
    kind: str, program: ProgramCollectives, level: str, meshes: tuple[MeshAxes, ...], *, whole: bool
) -> list[CommRow]:
    """Everything that a step of one kind executes.

    Args:
      kind: its name.
      program: a program.
      level: "emitted" or "compiled".
      meshes: where to look for axes.
      whole: every conditional part belongs to this kind (the program was made for it alone).
    """
    amounts = _Counter(kind, meshes, whole).block(program.block, False, 1, False)
    return [
        CommRow(
            kind=kind,
            axis=key.axis,
            collective=key.collective,
            level=level,
            count=amount.count,
            bytes=amount.nbytes,
            wire_bytes=amount.wire,
            group_size=key.group_size,
            dtypes=tuple(sorted(amount.dtypes)),
            conditional=key.conditional,
            in_loop=key.in_loop,
            trip_count=key.trip_count,
        )
        for key, amount in amounts.items()
    ]


@dataclass(frozen=True)
class _Counter:
    kind: str
    meshes: tuple[MeshAxes, ...]
    whole: bool

    def block(self, block: Block, conditional: bool, trips: int | None, in_loop: bool) -> _Amounts:
        total: _Amounts = {}
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
                    amounts = self.block(branch, True, trips, in_loop)
                    part = _merge(part, amounts, max)
            total = _merge(total, part, operator.add)
        return total

    def collective(
        self, node: Collective, conditional: bool, trips: int | None, in_loop: bool
    ) -> _Amounts:
        if conditional and not self.whole and not _belongs(node.phase, self.kind):
            return {}
        axis, group_size = axis_of(node.groups, node.pairs, self.meshes)
        if group_size == 1:
            return {}
        times = 1 if trips is None else trips
        num_devices = 0 if axis == UNKNOWN_AXIS else len(self.meshes[0].ids)
        amount = _Amount(
            times,
            times * node.nbytes,
            times * wire_bytes(node, group_size, num_devices),
            frozenset(node.dtypes),
        )
        return {_Key(axis, node.name, group_size, conditional, in_loop, trips): amount}


def _merge(
    first: Mapping[_Key, _Amount], second: Mapping[_Key, _Amount], how: Callable[[int, int], int]
) -> _Amounts:
    merged = dict(first)
    for key, amount in second.items():
        merged[key] = merged[key].joined(amount, how) if key in merged else amount
    return merged
