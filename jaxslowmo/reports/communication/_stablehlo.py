"""A reader of the collectives that a traced program emits, from its StableHLO module.

It works on the parsed module, not on text, with two exceptions: attributes for which jaxlib has no
Python class (meshes, and groups stated as mesh axes) are read from their printed form.
"""

import re
from itertools import chain
from typing import Any

import numpy as np

from ._collectives import (
    Block,
    Branches,
    Carried,
    Collective,
    Groups,
    Loop,
    ProgramCollectives,
    Term,
    dtype_of,
    num_bytes,
    num_turns,
    phase_of,
)
from ._mesh_axes import MeshAxes, device_order, groups_of_axes

_OPS = {
    "stablehlo.all_reduce": "all-reduce",
    "stablehlo.reduce_scatter": "reduce-scatter",
    "stablehlo.all_gather": "all-gather",
    "stablehlo.collective_permute": "collective-permute",
    "stablehlo.all_to_all": "all-to-all",
    "stablehlo.collective_broadcast": "collective-broadcast",
}
_AXIS_REF = re.compile(r'axis_ref<name = "([^"]+)"(?:, sub_axis_info = [^(]*\((\d+)\)(\d+))?')


def meshes_of_module(module: Any) -> list[MeshAxes]:
    """Return the meshes that a module declares, in order, each once and without empty ones."""
    return list(dict.fromkeys(mesh for mesh in _mesh_table(module).values() if mesh.names))


def has_devices(module: Any) -> bool:
    """Return False for a module of an abstract mesh, which can be read but not compiled."""
    attributes = module.operation.attributes
    partitions = 1
    for name in ("mhlo.num_partitions", "mhlo.num_replicas"):
        partitions *= int(attributes[name].value) if name in attributes else 1
    return all(mesh.size <= partitions for mesh in meshes_of_module(module))


def read_stablehlo(module: Any) -> ProgramCollectives:
    """Return the collectives of a module as a tree, seen from its main function.

    Args:
      module: a StableHLO module, `lowered.compiler_ir("stablehlo")`.
    """
    reader = _StableHloReader(module)
    return ProgramCollectives(reader.function("main", None, False), tuple(reader.scopes))


def _mesh_table(module: Any) -> dict[str, MeshAxes]:
    table = {}
    for op in module.body.operations:
        op = op.operation
        if op.name != "sdy.mesh":
            continue
        text = str(op.attributes["mesh"])
        axes = re.findall(r'"([^"]+)"=(\d+)', text)
        sizes = tuple(int(size) for _, size in axes)
        ids = re.search(r"device_ids=\[([^\]]*)\]", text)
        order = device_order(ids[1] if ids else "", int(np.prod(sizes, dtype=int)))
        names = tuple(name for name, _ in axes)
        table[str(op.attributes["sym_name"]).strip('"')] = MeshAxes(names, sizes, order)
    return table


class _StableHloReader:
    """Walks the call graph from main; a called function has the context of its caller."""

    def __init__(self, module: Any):
        self.meshes = _mesh_table(module)
        self.functions = {}
        self.silent: set[str] = set()  # functions in which nothing was found: not walked again
        self.scopes: dict[tuple[str, bool], None] = {}
        for op in module.body.operations:
            if op.operation.name == "func.func":
                self.functions[_symbol(op.operation.attributes["sym_name"])] = op.operation

    def function(self, name: str, phase: str | None, conditional: bool) -> Block:
        if name in self.silent or name not in self.functions:
            return ()
        scopes_before = len(self.scopes)
        block = self.region(self.functions[name].regions[0], phase, conditional)
        if not block and len(self.scopes) == scopes_before:
            self.silent.add(name)
        return block

    def region(self, region: Any, phase: str | None, conditional: bool) -> Block:
        operations = (op.operation for block in region.blocks for op in block.operations)
        return tuple(chain(*(self.operation(op, phase, conditional) for op in operations)))

    def operation(self, op: Any, phase: str | None, conditional: bool) -> Block:
        # Scope names in a called function are relative to the call, so the caller's phase counts
        # where the function itself names none.
        own_phase = phase_of(getattr(op.location, "name_str", ""))
        if own_phase is not None:
            self.scopes[own_phase, conditional] = None
        phase = own_phase or phase
        name = op.name
        if name in _OPS:
            return (self.collective(op, _OPS[name], op.attributes, phase),)
        if name in ("stablehlo.case", "stablehlo.if"):
            blocks = tuple(self.region(region, phase, True) for region in op.regions)
            return (Branches(blocks),) if any(blocks) else ()
        if name == "stablehlo.while":
            block = tuple(chain(*(self.region(r, phase, conditional) for r in op.regions)))
            return (Loop(block, _trip_count(op)),) if block else ()
        if name == "stablehlo.custom_call" and _symbol(op.attributes["call_target_name"]) in (
            "ragged_all_to_all",
        ):
            config = op.attributes["mhlo.backend_config"]
            return (self.collective(op, "ragged-all-to-all", config, phase),)
        called = [self.function(called, phase, conditional) for called in _called_functions(op)]
        # Of manual_computation, and whatever else holds code.
        held = [self.region(region, phase, conditional) for region in op.regions]
        return tuple(chain(*called, *held))

    def collective(self, op: Any, name: str, attributes: Any, phase: str | None) -> Collective:
        pairs = name == "collective-permute"
        operands = list(op.operands)
        if name == "ragged-all-to-all":
            operands = operands[:1]  # the others are the output buffer, offsets and sizes
        values = list(op.results) if name == "all-gather" else operands
        arrays = [_array(str(value.type)) for value in values]
        return Collective(
            name=name,
            groups=self.groups(attributes["source_target_pairs" if pairs else "replica_groups"]),
            nbytes=sum(size for _, size in arrays),
            dtypes=tuple(sorted({dtype for dtype, _ in arrays})),
            phase=phase,
            pairs=pairs,
        )

    def groups(self, attribute: Any) -> Groups:
        text = str(attribute)
        if text.startswith("dense"):
            rows = np.asarray(attribute).tolist()
            # Groups of unequal size are padded with -1.
            return tuple(tuple(int(i) for i in row if i >= 0) for row in rows)
        symbol = re.search(r"mesh = @([\w.$-]+)", text)
        mesh = self.meshes.get(symbol[1]) if symbol else None
        if mesh is None:
            return None
        sizes = dict(zip(mesh.names, mesh.sizes, strict=True))
        used = [
            (name, int(before or 1), int(size) if size else sizes[name])
            for name, before, size in _AXIS_REF.findall(text)
        ]
        return groups_of_axes(sizes, used, mesh.ids)


def _symbol(attribute: Any) -> str:
    return str(getattr(attribute, "value", attribute))


def _called_functions(op: Any) -> list[str]:
    if op.name in ("func.call", "call"):
        return [_symbol(op.attributes["callee"])]
    if op.name == "stablehlo.composite":
        return [_symbol(op.attributes["decomposition"])]
    if op.name == "stablehlo.custom_call" and "called_computations" in op.attributes:
        return [_symbol(symbol) for symbol in op.attributes["called_computations"]]
    return []


def _array(tensor_type: str) -> tuple[str, int]:
    """Return dtype and bytes of an array such as `tensor<2x3xf32>`; no bytes of other types."""
    inner = tensor_type.removeprefix("tensor<").removesuffix(">").split(",")[0]
    *dims, element = re.split(r"(?<=\d)x", inner)
    is_array = tensor_type.startswith("tensor<")
    return dtype_of(element)[0], num_bytes(element, [int(d) for d in dims]) if is_array else 0


def _trip_count(loop: Any) -> int | None:
    """Number of iterations of `for (i = start; i < stop; i += step)` with constant bounds.

    Args:
      loop: a `stablehlo.while` operation.

    Returns:
      The number of iterations, or None if the loop does not have this form.
    """
    condition, body = (next(iter(region.blocks)) for region in loop.regions)
    compare = _producer(_terminator(condition).operands[0])
    if compare is None or compare.name != "stablehlo.compare":
        return None
    if "LT" not in str(compare.attributes["comparison_direction"]):
        return None
    ends = _terminator(body).operands
    return num_turns(
        [_term(value, condition) for value in compare.operands],
        lambda i: _term(loop.operands[i], body),
        lambda i: _term(ends[i], body),
    )


def _term(value: Any, block: Any, *, sums: bool = True) -> Term:
    """Return what a value is for `num_turns`, in a block whose arguments are carried."""
    for number, argument in enumerate(block.arguments):
        if argument == value:
            return Carried(number)
    op = _producer(value)
    if op is not None and op.name == "stablehlo.constant":
        array = np.asarray(op.attributes["value"])
        return int(array.ravel()[0]) if array.size == 1 else None
    if op is not None and op.name == "stablehlo.add" and sums:
        return [_term(operand, block, sums=False) for operand in op.operands]
    return None


def _terminator(block: Any) -> Any:
    return list(block.operations)[-1].operation


def _producer(value: Any) -> Any | None:
    owner = value.owner
    return getattr(owner, "operation", owner) if hasattr(owner, "name") else None
