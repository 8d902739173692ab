"""The collectives of a program as a tree of loops and conditionals, read from its HLO text."""

import re
from functools import cache
from typing import NamedTuple

from ..._support.scopes import PHASE
from ._hlo_text import (
    Computation,
    HloModule,
    Instruction,
    parse_phase,
    parse_scope,
    shapes,
    trip_count,
)
from ._mesh_axes import Groups, parse_groups

COLLECTIVES = (
    "all-reduce", "reduce-scatter", "all-gather", "collective-permute", "all-to-all",
    "ragged-all-to-all", "collective-broadcast", "send", "recv",
)  # fmt: skip


class Collective(NamedTuple):
    """One collective instruction."""

    name: str
    groups: Groups
    nbytes: int  # payload of one device, see `CommRow.bytes`
    dtypes: tuple[str, ...]
    phase: str | None = None  # innermost `jax.named_scope("phase:NAME")` around it
    pairs: bool = False  # `groups` holds (source, target) pairs
    pattern: str = ""  # what a send is a part of, if that is known


class Branches(NamedTuple):
    """A conditional: exactly one of the blocks runs."""

    blocks: tuple["Block", ...]


class Loop(NamedTuple):
    """A loop around a block; `trip_count` is None where the program does not tell."""

    block: "Block"
    trip_count: int | None


Block = tuple[Collective | Branches | Loop, ...]


class ProgramCollectives(NamedTuple):
    """A tree of collectives, and phases, each with whether it is in a conditional.

    These are the phases of collectives, None for one without, and those that a traced program names
    in other scopes.
    """

    block: Block
    scopes: tuple[tuple[str | None, bool], ...] = ()


# How often a device sends its share of each buffer, (n-1)/n of it, in a ring of n devices.
_ROUNDS = {
    "all-reduce": 2, "reduce-scatter": 1, "all-gather": 1, "all-to-all": 1, "ragged-all-to-all": 1,
}  # fmt: skip


def wire_bytes(collective: Collective, group_size: int, num_devices: int = 0) -> int:
    """Return the bytes that one device sends when the collective runs as a ring.

    The ring has `group_size` devices. A size of 0 (unknown) gives the limit of a large group, an
    upper bound. For a permute in which not all of `num_devices` (0: unknown) take part, the result
    is the mean over the devices.
    """
    nbytes, name = collective.nbytes, collective.name
    if name == "collective-permute" and collective.groups is not None and num_devices:
        senders = sum(source != target for source, target in collective.groups)
        return nbytes * senders // num_devices
    if name == "recv":
        return 0  # its partner, the send, is counted
    # The operand of a send that gathers is this device's shard, not the whole buffer.
    if collective.pattern == "all-gather":
        return nbytes * max(group_size - 1, 1)
    rounds = _ROUNDS.get(collective.pattern or name)
    if rounds is None:
        return nbytes
    return rounds * nbytes * (group_size - 1) // group_size if group_size else rounds * nbytes


# An asynchronous X is written as X-start with all that X has, X-update and X-done; these may repeat
# it. Every X that calls something counts, but not the many copies and slices.
_INTERESTING = re.compile(
    rf"[ )](?:(?:{'|'.join(COLLECTIVES)}|call|fusion|custom-call|conditional|while)(?:-start)?"
    r"|[\w-]+-start(?=\(.*\b(?:calls|to_apply|called_computations)=))\("
)
# Transfers between TPU slices, which the compiler writes as send and recv of its runtime.
_TARGET = re.compile(r'_xla_megascale_target=("[^"]*"|\{\{.*?\}\}|\{\})')
_TRANSFER_TYPE = re.compile(r'_xla_megascale_transfer_type="?(\w+)')
_PAIRS = re.compile(r'_xla_send_recv_source_target_pairs="?(\{\{.*?\}\})')
_CHAIN = re.compile("AsyncCollectiveStart")
_PER_SLICE = 100_000  # a device is numbered slice * 100000 + place in the slice, slices from 1


def read_collectives(
    module: HloModule, compiled: bool, num_devices: int = 0, slice_major: bool = True
) -> ProgramCollectives:
    """Return the collectives of an HLO module as a tree, seen from its entry computation.

    Args:
      module: a compiled program, or one that was only converted to HLO.
      compiled: which of the two. Only a program that was not compiled has the scopes of all that
        was traced. Compilers insert collectives without a scope (TPU rewrites a reduce-scatter of a
        vector to an all-reduce). If the rest of their branch belongs to one phase, so do they; if
        nothing in it has a scope (seen in programs for several slices) they are merely conditional.
      num_devices: size of the mesh. A program for several TPU slices is written for one slice;
        its groups are repeated for the others if slices come first in the mesh (`slice_major`).
      slice_major: whether slices come first in the mesh.
    """
    num_slices = max(1, num_devices // module.num_devices)
    slices = _Slices(module.num_devices, num_slices, slice_major or num_slices == 1)
    pattern = _INTERESTING if compiled else re.compile(f"{_INTERESTING.pattern}|{PHASE}")
    scopes: dict[tuple[str | None, bool], None] = {}  # in order, without duplicates

    @cache
    def read_computation(name: str, phase: str | None, conditional: bool) -> Block:
        """Return what a computation holds; a called one has the phase of its caller."""
        within = module.computations[name]
        blocks = (read_instruction(op, within, phase, conditional) for op in within.select(pattern))
        return tuple(node for nodes in blocks for node in nodes)

    def read_instruction(
        op: Instruction, within: Computation, phase: str | None, conditional: bool
    ) -> Block:
        if op.opcode.endswith(("-update", "-done")):
            return ()
        own_phase = parse_phase(parse_scope(op.attributes))
        # The parameter of a branch has the scope of the value outside that it stands for.
        if own_phase is not None and not compiled and op.opcode != "parameter":
            scopes[own_phase, conditional] = None
        phase = own_phase or phase
        opcode = op.opcode.removesuffix("-start")
        if opcode in COLLECTIVES:
            read = _transfer if opcode in ("send", "recv") else _collective
            collective = read(op, opcode, within, slices)
            if collective is None:
                return ()
            scopes[phase, conditional] = None
            return (collective._replace(phase=phase),)
        if opcode == "conditional":
            inserted = {x: module.computations[x].only_phase() for x in op.callees if compiled}
            blocks = tuple(read_computation(x, inserted.get(x) or phase, True) for x in op.callees)
            return (Branches(blocks),) if any(blocks) else ()
        block = tuple(x for name in op.callees for x in read_computation(name, phase, conditional))
        if opcode == "while":
            return (Loop(block, trip_count(op, within, module)),) if block else ()
        return block

    return ProgramCollectives(read_computation(module.entry, None, False), tuple(scopes))


class _Slices(NamedTuple):
    """The TPU slices that run a program, which is written for one of them."""

    size: int
    count: int
    readable: bool  # whether the mesh numbers devices as the program does

    def repeat_groups(self, groups: Groups) -> Groups:
        """Return the groups of one slice repeated for all slices."""
        if self.count > 1 and groups is not None:
            groups = groups or (tuple(range(self.size)),)
            starts = range(0, self.size * self.count, self.size)
            groups = tuple(tuple(start + i for i in x) for start in starts for x in groups)
        return groups if self.readable else None


def _collective(
    op: Instruction, name: str, within: Computation, slices: _Slices
) -> Collective | None:
    if "chain_id=" in op.attributes and not any(map(_CHAIN.search, within.lines.values())):
        # TPU spreads one asynchronous collective over the fusions it runs beside and repeats the
        # instruction in each; only the one beside AsyncCollectiveStart begins a transfer.
        return None
    pairs = name == "collective-permute"
    key = "source_target_pairs=" if pairs else "replica_groups="
    groups = slices.repeat_groups(parse_groups(op.attributes.partition(key)[2] or "{}"))
    operands = op.operands
    if name == "ragged-all-to-all" or ", slice_sizes=" in op.attributes:
        operands = operands[:1]  # the others are the output buffer and offsets
    arrays = [shape for x in operands for shape in shapes(within.instruction(x).type)]
    nbytes = sum(size for _, size in arrays)
    if name == "all-gather":
        nbytes *= max(map(len, groups or ()), default=0) or slices.size
    if name == "all-reduce" and _is_fused_reduce_scatter(op.name, within):
        name = "reduce-scatter"
    return Collective(name, groups, nbytes, tuple(sorted({x for x, _ in arrays})), pairs=pairs)


def _transfer(
    op: Instruction, name: str, within: Computation, slices: _Slices
) -> Collective | None:
    """Return a send or recv between TPU slices or devices; one to the host is not counted."""
    pairs, groups = True, None
    if target := _TARGET.search(op.attributes):
        groups, pairs = parse_target(target[1], slices.size)
        groups = groups if slices.readable else None
    elif match := _PAIRS.search(op.attributes):
        groups = slices.repeat_groups(parse_groups(match[1]))
    elif ", is_host_transfer=true" in op.attributes:
        return None
    # A recv has no operand but a token; its result is (data, context, token).
    source = within.instruction(op.operands[0]).type if name == "send" else op.type
    (dtype, nbytes), *_ = shapes(source) or [("token", 0)]
    match = _TRANSFER_TYPE.search(op.attributes)
    pattern = match[1].lower().replace("_", "-") if match else ""
    return Collective(name, groups, nbytes, (dtype,), pairs=pairs, pattern=pattern)


def _is_fused_reduce_scatter(name: str, within: Computation) -> bool:
    """Return whether a computation is TPU's fused reduce-scatter, an all-reduce and a slice of it.

    Outside a fusion the same pair of instructions does move the whole buffer to everybody.
    """
    if not within.name.startswith("all-reduce-scatter"):
        return False
    root = within.instruction(within.root)
    return root.opcode == "dynamic-slice" and root.operands[0] == name


def parse_target(text: str, per_slice: int) -> tuple[Groups, bool]:
    """Return the devices that a transfer connects, numbered as in a mesh whose slices come first.

    Args:
      text: `"{1,2}x{0:7}"` (the devices of the same place in each slice), `{{100000,200000},...}`
        (groups) or `{{100000->200000},...}` (pairs).
      per_slice: number of devices of one slice.

    Returns:
      (groups, whether they are pairs); groups are None if the text has another form.

    >>> parse_target('"{1,2}x{0:1}"', 2)
    (((0, 2), (1, 3)), False)
    """
    if product := re.fullmatch(r"\{([^{}]*)\}x\{([^{}]*)\}", text.strip('"')):
        slices, places = (_numbers(part) for part in product.groups())
        return tuple(tuple((s - 1) * per_slice + p for s in slices) for p in places), False
    groups = [re.findall(r"\d+", group) for group in re.findall(r"\{([\d,>\s-]+)\}", text)]
    logical = tuple(tuple(_logical(int(i), per_slice) for i in group) for group in groups)
    return logical or None, "->" in text


def _logical(device: int, per_slice: int) -> int:
    return (device // _PER_SLICE - 1) * per_slice + device % _PER_SLICE


def _numbers(text: str) -> list[int]:
    """Return the numbers of a text such as `0:2,5`: [0, 1, 2, 5]."""
    ranges = (part.partition(":") for part in text.split(","))
    return [i for first, _, last in ranges for i in range(int(first), int(last or first) + 1)]
