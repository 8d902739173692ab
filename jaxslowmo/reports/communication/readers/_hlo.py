"""Reads the collectives that a compiled program executes from the text of its optimised HLO."""

import re

from ._collectives import (
    COLLECTIVES,
    Block,
    Branches,
    Collective,
    Groups,
    Loop,
    Node,
    Program,
    phase_of,
)
from ._groups import parse_groups
from ._hlo_text import Computation, HloModule, Instruction, parse_module, shapes
from ._hlo_trips import trip_count
from ._megascale import TARGET, parse_target, transfer_type

_CALLING = ("call", "fusion", "custom-call", "conditional", "while")
# An asynchronous X is written as X-start with all that X has, X-update and X-done; these may repeat
# it. Every X that calls something counts, but not the many copies and slices.
_INTERESTING = re.compile(
    rf"[ )](?:(?:{'|'.join(COLLECTIVES + _CALLING)})(?:-start)?"
    r"|[\w-]+-start(?=\(.*\b(?:calls|to_apply|called_computations)=))\(",
)


def read_hlo(text: str, num_devices: int = 0, slice_major: bool = True) -> Program:
    """The collectives of an HLO module as a tree, as seen from its entry computation.

    Args:
      text: `compiled.as_text()`.
      num_devices: size of the mesh. A program for several TPU slices is written for one slice;
        its groups are repeated for the others if slices come first in the mesh (`slice_major`).
      slice_major: see there.
    """
    module = parse_module(text)
    return Program(_Reader(module, num_devices, slice_major).computation(module.entry, None))


class _Reader:
    def __init__(self, module: HloModule, num_devices: int, slice_major: bool):
        self.module = module
        self.num_slices = max(1, num_devices // module.num_devices)
        self.readable = slice_major or self.num_slices == 1
        self.silent: set[str] = set()  # computations without collectives: not walked again

    def computation(self, name: str, phase: str | None) -> Block:
        computation = self.module.computations.get(name)
        if computation is None or name in self.silent:
            return ()
        nodes: list[Node] = []
        for instruction in computation.select(_INTERESTING):
            nodes.extend(self.instruction(instruction, computation, phase))
        if not nodes:
            self.silent.add(name)
        return tuple(nodes)

    def instruction(self, op: Instruction, within: Computation, phase: str | None) -> Block:
        attributes = op.attributes
        phase = phase_of(attributes.get("metadata", "")) or phase
        opcode = op.opcode.removesuffix("-start")
        if opcode in COLLECTIVES:
            found = self.collective(op, opcode, within, phase)
            return (found,) if found else ()
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
            nodes: list[Node] = []
            for computation in called:
                nodes.extend(self.computation(computation, phase))
            return tuple(nodes)
        return ()

    def branch(self, name: str, phase: str | None) -> Block:
        # Compilers insert collectives without a scope (TPU rewrites a reduce-scatter of a vector to
        # an all-reduce). If the rest of the branch belongs to one phase, so do they; if nothing in
        # it has a scope (seen in programs for several slices) they are merely conditional.
        computation = self.module.computations.get(name)
        lines = computation.lines.values() if computation else ()
        phases = {phase_of(found[1]) for line in lines if (found := _OP_NAME.search(line))}
        phases.discard(None)
        return self.computation(name, phases.pop() if len(phases) == 1 else phase)

    def collective(
        self, op: Instruction, name: str, within: Computation, phase: str | None
    ) -> Collective | None:
        frontend = op.attributes.get("frontend_attributes", "")
        if "chain_id=" in frontend and not _starts_chain(within):
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
        """A send or recv: between TPU slices, or between devices, or to the host (not counted)."""
        pairs, groups = True, None
        if target := TARGET.search(frontend):
            groups, pairs = parse_target(target[1], self.module.num_devices)
            groups = groups if self.readable else None
        elif found := re.search(r'_xla_send_recv_source_target_pairs="?(\{\{.*?\}\})', frontend):
            groups = self.across_slices(parse_groups(found[1]))
        elif op.attributes.get("is_host_transfer") == "true":
            return None
        # A recv has no operand but a token; its result is (data, context, token).
        source = within.type_of(op.operands[0]) if name == "send" else op.type
        (dtype, nbytes), *_ = shapes(source) or [("token", 0)]
        return Collective(name, groups, nbytes, (dtype,), phase, pairs, transfer_type(frontend))

    def across_slices(self, groups: Groups) -> Groups:
        if groups is None or not self.readable:
            return None
        if self.num_slices == 1:
            return groups
        per_slice = self.module.num_devices
        groups = groups or (tuple(range(per_slice)),)
        starts = range(0, per_slice * self.num_slices, per_slice)
        return tuple(tuple(start + i for i in group) for start in starts for group in groups)


_OP_NAME = re.compile(r'op_name="([^"]*)"')


def _starts_chain(computation: Computation) -> bool:
    return any("AsyncCollectiveStart" in line for line in computation.lines.values())


def _is_scattered(name: str, within: Computation) -> bool:
    """Whether a computation is TPU's fused reduce-scatter: an all-reduce of which a part is kept.

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
