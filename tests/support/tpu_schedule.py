"""The order in which a compiled TPU program runs, read from its text.

The text of a program compiled for TPU is scheduled: instructions stand in the order in which they
run, and what stands between the start and the end of a transfer runs beside it.
"""

import re
from dataclasses import dataclass

from jaxslowmo.reports._hlo import Instruction
from support.schedule_text import (
    PRODUCTS,
    instructions,
    is_product_of_model,
    num_instructions,
    scheduled_module,
)

# What carries data from chip to chip: over the links of a slice, and between slices.
_STARTS = {"collective-permute-start", "send"}
_DONES = {"collective-permute-done", "recv-done"}
_BLOCKING = "collective-permute"


@dataclass(frozen=True)
class Schedule:
    """Places in the schedule of the entry computation.

    Attributes:
      starts: where a permute (between slices a send) starts.
      dones: where what it brings has arrived.
      blocking: permutes that are not split into start and end, so nothing runs beside them.
      products: instructions that compute at least one matrix product, usually fusions.
      num_products: matrix products in them.
      in_branches: permutes that stand in a branch of a conditional.
    """

    starts: tuple[int, ...]
    dones: tuple[int, ...]
    blocking: int
    products: tuple[int, ...]
    num_products: int
    in_branches: int

    @property
    def num_beside(self) -> int:
        """Instructions with products behind the start of all transfers and before any end."""
        if not self.starts:
            return 0
        return sum(max(self.starts) < place < min(self.dones) for place in self.products)

    @property
    def num_under_way(self) -> int:
        """Instructions with products that run while at least one transfer is under way."""
        return sum(
            sum(start < place for start in self.starts) > sum(done < place for done in self.dones)
            for place in self.products
        )

    @property
    def runs_beside(self) -> bool:
        """Whether every transfer starts before the first product and ends after the last."""
        return 0 < len(self.products) == self.num_beside

    @property
    def runs_behind(self) -> bool:
        """Whether every transfer starts after the last product."""
        return self.products[-1] < min(self.starts)


def read_schedule(text: str) -> Schedule:
    """Return the schedule of a compiled program, from `compiled.as_text()`."""
    module = scheduled_module(text)
    places: dict[str, list[int]] = {"start": [], "done": [], "product": []}
    num_products = blocking = in_branches = 0
    for place, op in enumerate(instructions(module, module.entry)):
        if op.opcode in _STARTS:
            places["start"].append(place)
        elif op.opcode in _DONES:
            places["done"].append(place)
        elif op.opcode == _BLOCKING:
            blocking += 1
        elif amount := num_instructions(module, op, PRODUCTS):
            places["product"].append(place)
            num_products += amount
        if op.opcode == "conditional":
            in_branches += num_instructions(module, op, {*_STARTS, _BLOCKING})
    assert len(places["start"]) == len(places["done"])
    starts, dones, products = (tuple(x) for x in places.values())
    return Schedule(starts, dones, blocking, products, num_products, in_branches)


@dataclass(frozen=True)
class Transfer:
    """One all-to-all in the schedule of the entry computation; between slices, its send.

    Attributes:
      shape: of what is sent, such as "s32[8,1,2048]".
      is_blocking: nothing can run beside it.
      products: products of the model (`dot_general`) beside it, as instructions.
      others: instructions that compute something else, beside it.
    """

    shape: str
    is_blocking: bool
    products: int
    others: int


def read_all_to_alls(text: str, num_devices: int) -> tuple[list[Transfer], int]:
    """Return the all-to-alls of a program in order of their starts, and its number of products.

    Args:
      text: result of `compiled.as_text()`.
      num_devices: size of the all-to-alls' axis, which identifies sends between slices.
    """
    module = scheduled_module(text)
    ops = list(instructions(module, module.entry))
    products = [place for place, op in enumerate(ops) if is_product_of_model(module, op)]
    others = [place for place, op in enumerate(ops) if op.opcode in {"fusion", "sort", "while"}]
    others = sorted({*others} - {*products})
    ends = _ends(ops)
    transfers = []
    for place, op in enumerate(ops):
        shape = _sent(op, num_devices)
        if shape is None:
            continue
        end = ends.get(op.name, place)
        beside = [sum(place < p < end for p in places) for places in (products, others)]
        transfers.append(Transfer(shape, end == place, *beside))
    return transfers, len(products)


def _sent(op: Instruction, num_devices: int) -> str | None:
    """Return the shape that an all-to-all sends, or None for other instructions."""
    if op.opcode not in {"all-to-all", "all-to-all-start", "send"}:
        return None
    match = re.search(r"\w+\[[\d,]*\]", op.type)
    assert match, op
    is_of_axis = match[0].partition("[")[2].startswith(f"{num_devices},")
    return match[0] if is_of_axis else None


def _ends(ops: list[Instruction]) -> dict[str, int]:
    """Return the place of each start's end; a send ends with a receipt of the same shape."""
    ends: dict[str, int] = {}
    receipts = [(place, op) for place, op in enumerate(ops) if op.opcode == "recv-done"]
    for place, op in enumerate(ops):
        if op.opcode == "all-to-all-done":
            ends[op.operands[0]] = place
        elif op.opcode == "send":
            kind = op.type.partition("{")[0]
            same = next(r for r in receipts if r[0] > place and r[1].type.startswith(kind))
            receipts.remove(same)
            ends[op.name] = same[0]
    return ends
