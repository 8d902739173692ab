"""What the readers of compiled schedules, of TPU and of GPU programs, have in common."""

from collections.abc import Iterator

from jaxslowmo.reports._hlo import HloModule, Instruction, parse_module, parse_scope

# Compilers for TPU write a matrix product as a convolution.
PRODUCTS = {"dot", "convolution"}


def scheduled_module(text: str) -> HloModule:
    """Return the parsed module of a compiled program, whose instructions stand in running order."""
    assert "is_scheduled=true" in text.partition("\n")[0]
    return parse_module(text)


def instructions(module: HloModule, computation: str) -> list[Instruction]:
    """Return the instructions of one computation, in running order."""
    body = module.computations[computation]
    return [body.instruction(name) for name in body.lines]


def inside(module: HloModule, op: Instruction) -> Iterator[Instruction]:
    """Yield an instruction and those of all computations that it calls."""
    yield op
    for name in op.callees:
        for inner in instructions(module, name):
            yield from inside(module, inner)


def num_instructions(module: HloModule, op: Instruction, opcodes: set[str]) -> int:
    """Return the number of instructions with `opcodes` in `op` and in all that it calls."""
    if op.opcode in opcodes:
        return 1
    return sum(inner.opcode in opcodes for inner in inside(module, op))


def is_product_of_model(module: HloModule, op: Instruction) -> bool:
    """Return whether an instruction computes a matrix product that the model has asked for."""
    named = "dot_general" in parse_scope(op.attributes)
    return named and num_instructions(module, op, PRODUCTS) > 0
