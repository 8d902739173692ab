"""The order in which a compiled GPU program runs, read from its text.

The text of a program compiled for GPUs is scheduled: the host launches its instructions in this
order. What stands between the start and the end of a collective runs beside it, on another stream.
If that is nothing, the compiler marks the collective as synchronous, on the stream of all others.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from jaxslowmo.reports._hlo import HloModule, Instruction, parse_scope, shapes
from support.schedule_text import PRODUCTS, inside, instructions, scheduled_module

_COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
    "collective-broadcast",
)
# Libraries' kernels for matrix products, which other instructions of this kind are not.
_PRODUCT_CALLS = re.compile(r'custom_call_target="(?:__cublas|__cudnn)')
_SYNCHRONOUS = '"is_sync":true'


@dataclass(frozen=True)
class Product:
    """An instruction that computes at least one matrix product.

    Attributes:
      place: its place in the schedule of its computation.
      op_name: path of the product in the traced program, by which forward, backward pass and
        optimizer are told apart; XLA moves products, so the place does not tell.
    """

    place: int
    op_name: str

    @property
    def is_backward(self) -> bool:
        return "transpose(" in self.op_name


@dataclass(frozen=True)
class Transfer:
    """One collective of a schedule.

    Attributes:
      collective: its kind, such as "all-reduce".
      bytes: size of its result.
      op_name: path of the collective in the traced program.
      start: place where it starts.
      done: place where it has ended; `start` if nothing can run beside it.
      products: the products that run beside it.
      beside: opcodes of all other instructions between start and end, in order.
    """

    collective: str
    bytes: int
    op_name: str
    start: int
    done: int
    products: tuple[Product, ...]
    beside: tuple[str, ...]

    @property
    def is_blocking(self) -> bool:
        return self.start == self.done


@dataclass(frozen=True)
class Schedule:
    """What one computation runs: the program itself, or the body of a loop.

    Attributes:
      computation: its name.
      transfers: its collectives, in order of their starts.
      products: its products, in order.
      num_products: matrix products in them.
      in_branches: collectives in branches of its conditionals, beside which nothing runs.
    """

    computation: str
    transfers: tuple[Transfer, ...]
    products: tuple[Product, ...]
    num_products: int
    in_branches: int

    @property
    def num_under_way(self) -> int:
        """Instructions with products that run while at least one transfer is under way."""
        return len({p.place for t in self.transfers for p in t.products})

    def select(self, *kinds: str, name: str = "") -> tuple[Transfer, ...]:
        """Return the transfers of some kinds (all, without any) whose path contains `name`."""
        return tuple(
            t for t in self.transfers if (not kinds or t.collective in kinds) and name in t.op_name
        )


def read_gpu_schedule(text: str) -> Schedule:
    """Return the schedule of a compiled program, from `compiled.as_text()`."""
    module = scheduled_module(text)
    return schedule_of(module, module.entry)


def read_loops(text: str) -> list[Schedule]:
    """Return the schedules of the bodies of all loops, in program order, outer ones first."""
    module = scheduled_module(text)
    return [schedule_of(module, body) for body in _loop_bodies(module, module.entry)]


def _loop_bodies(module: HloModule, computation: str) -> Iterator[str]:
    for op in instructions(module, computation):
        for name in op.callees:
            if op.opcode == "while" and name == op.callees[-1]:  # the condition stands before it
                yield name
            yield from _loop_bodies(module, name)


def schedule_of(module: HloModule, computation: str) -> Schedule:
    """Return the schedule of one computation of a module."""
    ops = instructions(module, computation)
    products: list[Product] = []
    num_products = in_branches = 0
    for place, op in enumerate(ops):
        if op.opcode == "conditional":
            in_branches += sum(_kind(module, inner) is not None for inner in inside(module, op))
        elif op.opcode != "while" and (names := list(_products(module, op))):
            products.append(Product(place, names[0]))
            num_products += len(names)
    transfers = tuple(
        _transfer(ops, products, place, kind)
        for place, op in enumerate(ops)
        if (kind := _kind(module, op)) is not None
    )
    return Schedule(computation, transfers, tuple(products), num_products, in_branches)


def _products(module: HloModule, op: Instruction) -> Iterator[str]:
    """Yield the op_name of each matrix product in an instruction."""
    for inner in inside(module, op):
        if inner.opcode in PRODUCTS or _PRODUCT_CALLS.search(inner.attributes):
            yield parse_scope(inner.attributes) or parse_scope(op.attributes)


def _kind(module: HloModule, op: Instruction) -> str | None:
    """Return the kind of collective that an instruction starts; None for all other instructions."""
    if op.opcode == "async-start":
        kinds = {_kind(module, inner) for inner in list(inside(module, op))[1:]} - {None}
        return kinds.pop() if len(kinds) == 1 else None
    kind = op.opcode.removesuffix("-start")
    return kind if kind in _COLLECTIVES else None


def _transfer(ops: list[Instruction], products: list[Product], start: int, kind: str) -> Transfer:
    op = ops[start]
    end = _end(ops, start)
    done = start if _SYNCHRONOUS in op.attributes else end
    # The end has the result's type; a start also has the operand's.
    result = ops[end].type
    return Transfer(
        collective=kind,
        bytes=sum(num_bytes for _, num_bytes in shapes(result)),
        op_name=parse_scope(op.attributes),
        start=start,
        done=done,
        products=tuple(p for p in products if start < p.place < done),
        beside=tuple(ops[place].opcode for place in range(start + 1, done)),
    )


def _end(ops: list[Instruction], start: int) -> int:
    """Return the place of a start's end; the start's own place without one."""
    if not ops[start].opcode.endswith("-start"):
        return start
    names = {ops[start].name}
    for place in range(start + 1, len(ops)):
        op = ops[place]
        if names & {*op.operands}:
            if op.opcode.endswith("-done"):
                return place
            if op.opcode == "async-update":
                names.add(op.name)
    raise AssertionError(f"{ops[start].name} has no end")
