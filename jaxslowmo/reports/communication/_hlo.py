"""A reader of the collectives that a compiled program executes, from its optimised HLO text."""

import re
from itertools import chain

from ._collectives import (
    COLLECTIVES,
    Block,
    Branches,
    Collective,
    Groups,
    Loop,
    ProgramCollectives,
    phase_of,
)
from ._hlo_text import Computation, HloModule, Instruction, parse_module, shapes, trip_count
from ._mesh_axes import parse_groups

_CALLING = ("call", "fusion", "custom-call", "conditional", "while")
# An asynchronous X is written as X-start with all that X has, X-update and X-done; these may repeat
# it. Every X that calls something counts, but not the many copies and slices.
_INTERESTING = re.compile(
    rf"[ )](?:(?:{'|'.join(COLLECTIVES + _CALLING)})(?:-start)?"
    r"|[\w-]+-start(?=\(.*\b(?:calls|to_apply|called_computations)=))\("
)


# Transfers between TPU slices, which the compiler writes as send and recv of its runtime.
_TARGET = re.compile(r'_xla_megascale_target=("[^"]*"|\{\{.*?\}\}|\{\})')
_TRANSFER_TYPE = re.compile(r'_xla_megascale_transfer_type="?(\w+)')
_CHAIN = re.compile("AsyncCollectiveStart")
_PER_SLICE = 100_000  # a device is numbered slice * 100000 + place in the slice, slices from 1


def read_hlo(text: str, num_devices: int = 0, slice_major: bool = True) -> ProgramCollectives:
    """Return the collectives of an HLO module as a tree, seen from its entry computation.

    Args:
      text: the text of the module, `compiled.as_text()`.
      num_devices: size of the mesh. A program for several TPU slices is written for one slice;
        its groups are repeated for the others if slices come first in the mesh (`slice_major`).
      slice_major: whether slices come first in the mesh.
    """
    module = parse_module(text)
    return ProgramCollectives(
        _HloReader(module, num_devices, slice_major).computation(module.entry, None)
    )


class _HloReader:
    def __init__(self, module: HloModule, num_devices: int, slice_major: bool):
        self.module = module
        self.num_slices = max(1, num_devices // module.num_devices)
        self.readable = slice_major or self.num_slices == 1
        self.silent: set[str] = set()  # computations without collectives: not walked again

    def computation(self, name: str, phase: str | None) -> Block:
        computation = self.module.computations.get(name)
        if computation is None or name in self.silent:
            return ()
        instructions = computation.select(_INTERESTING)
        block = tuple(chain(*(self.instruction(op, computation, phase) for op in instructions)))
        if not block:
            self.silent.add(name)
        return block

    def instruction(self, op: Instruction, within: Computation, phase: str | None) -> Block:
        attributes = op.attributes
        phase = phase_of(attributes.get("metadata", "")) or phase
        opcode = op.opcode.removesuffix("-start")
        if opcode in COLLECTIVES:
            collective = self.collective(op, opcode, within, phase)
            return (collective,) if collective else ()
        if opcode == "conditional":
            names = _names(attributes.get("branch_computations", "")) or [
                _name(attributes[key]) for key in ("true_computation", "false_computation")
            ]
            blocks = tuple(self.branch(name, phase) for name in names)
            return (Branches(blocks),) if any(blocks) else ()
        if opcode == "while":
            condition, body = _name(attributes["condition"]), _name(attributes["body"])
            block = self.computation(condition, phase) + self.computation(body, phase)
            return (Loop(block, trip_count(op, within, self.module)),) if block else ()
        if opcode in _CALLING or opcode != op.opcode:
            called = [_name(attributes[key]) for key in ("calls", "to_apply") if key in attributes]
            called += _names(attributes.get("called_computations", ""))
            return tuple(chain(*(self.computation(name, phase) for name in called)))
        return ()

    def branch(self, name: str, phase: str | None) -> Block:
        # Compilers insert collectives without a scope (TPU rewrites a reduce-scatter of a vector to
        # an all-reduce). If the rest of the branch belongs to one phase, so do they; if nothing in
        # it has a scope (seen in programs for several slices) they are merely conditional.
        computation = self.module.computations.get(name)
        return self.computation(name, (computation and computation.only_phase()) or phase)

    def collective(
        self, op: Instruction, name: str, within: Computation, phase: str | None
    ) -> Collective | None:
        frontend = op.attributes.get("frontend_attributes", "")
        if "chain_id=" in frontend and not any(map(_CHAIN.search, within.lines.values())):
            # TPU spreads one asynchronous collective over the fusions it runs beside and repeats
            # the instruction in each; only the one beside AsyncCollectiveStart begins a transfer.
            return None
        if name in ("send", "recv"):
            return self.transfer(op, name, within, phase, frontend)
        pairs = name == "collective-permute"
        text = op.attributes.get("source_target_pairs" if pairs else "replica_groups", "{}")
        groups = self.across_slices(parse_groups(text))
        operands = op.operands
        if name == "ragged-all-to-all" or "slice_sizes" in op.attributes:
            operands = operands[:1]  # the others are the output buffer and offsets
        arrays = [shape for operand in operands for shape in shapes(within.type_of(operand))]
        nbytes = sum(size for _, size in arrays)
        if name == "all-gather":
            nbytes *= max((len(g) for g in groups or ()), default=0) or self.module.num_devices
        if name == "all-reduce" and _is_scattered(op.name, within):
            name = "reduce-scatter"
        dtypes = tuple(sorted({dtype for dtype, _ in arrays}))
        return Collective(name, groups, nbytes, dtypes, phase, pairs)

    def transfer(
        self, op: Instruction, name: str, within: Computation, phase: str | None, frontend: str
    ) -> Collective | None:
        """Return a send or recv between TPU slices or devices; one to the host is not counted."""
        pairs, groups = True, None
        if target := _TARGET.search(frontend):
            groups, pairs = parse_target(target[1], self.module.num_devices)
            groups = groups if self.readable else None
        elif match := re.search(r'_xla_send_recv_source_target_pairs="?(\{\{.*?\}\})', frontend):
            groups = self.across_slices(parse_groups(match[1]))
        elif op.attributes.get("is_host_transfer") == "true":
            return None
        # A recv has no operand but a token; its result is (data, context, token).
        source = within.type_of(op.operands[0]) if name == "send" else op.type
        (dtype, nbytes), *_ = shapes(source) or [("token", 0)]
        match = _TRANSFER_TYPE.search(frontend)
        pattern = match[1].lower().replace("_", "-") if match else ""
        return Collective(name, groups, nbytes, (dtype,), phase, pairs, pattern)

    def across_slices(self, groups: Groups) -> Groups:
        if groups is None or not self.readable:
            return None
        if self.num_slices == 1:
            return groups
        per_slice = self.module.num_devices
        groups = groups or (tuple(range(per_slice)),)
        starts = range(0, per_slice * self.num_slices, per_slice)
        return tuple(tuple(start + i for i in group) for start in starts for group in groups)


def _is_scattered(name: str, within: Computation) -> bool:
    """Return whether a computation is TPU's fused reduce-scatter, an all-reduce and a slice of it.

    Outside a fusion the same pair of instructions does move the whole buffer to everybody.
    """
    root = within.instruction(within.root)
    if root is None or not within.name.startswith("all-reduce-scatter"):
        return False
    return root.opcode == "dynamic-slice" and root.operands[0] == name


def _name(text: str) -> str:
    return text.strip().lstrip("%")


def _names(text: str) -> list[str]:
    return [_name(part) for part in text.strip("{}").split(",") if part.strip()]


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
    text = text.strip('"')
    if product := re.fullmatch(r"\{([^{}]*)\}x\{([^{}]*)\}", text):
        slices, places = (_numbers(part) for part in product.groups())
        return tuple(tuple((s - 1) * per_slice + p for s in slices) for p in places), False
    groups = re.findall(r"\{([\d,>\s-]+)\}", text)
    if not groups:
        return None, False
    members = (tuple(int(i) for i in re.findall(r"\d+", group)) for group in groups)
    return tuple(tuple(_logical(i, per_slice) for i in group) for group in members), "->" in text


def _logical(device: int, per_slice: int) -> int:
    return (device // _PER_SLICE - 1) * per_slice + device % _PER_SLICE


def _numbers(text: str) -> list[int]:
    """Return the numbers of a text such as `0:2,5`: [0, 1, 2, 5]."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition(":")
        numbers.extend(range(int(first), int(last or first) + 1))
    return numbers
