"""The tree of collectives that the readers of StableHLO and of compiled HLO make of a program."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..._support.scopes import PHASE

COLLECTIVES = (
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "collective-permute",
    "all-to-all",
    "ragged-all-to-all",
    "collective-broadcast",
    "send",
    "recv",
)

# Groups, or (source, target) pairs, of logical device numbers. () is one group of all devices, and
# None means that the text could not be read.
Groups = tuple[tuple[int, ...], ...] | None

# Transformations wrap scope names, as in "transpose(jvp(phase:slow))", hence the brackets.
_PHASE = re.compile(rf"{PHASE}([^/()]+)")


@dataclass(frozen=True)
class Collective:
    """One collective instruction."""

    name: str
    groups: Groups
    nbytes: int  # payload of one device, see `CommRow.bytes`
    dtypes: tuple[str, ...]
    phase: str | None = None  # innermost `jax.named_scope("phase:NAME")` around it
    pairs: bool = False  # `groups` holds (source, target) pairs
    pattern: str = ""  # what a send is a part of, if that is known


@dataclass(frozen=True)
class Branches:
    """A conditional: exactly one of the blocks runs."""

    blocks: tuple["Block", ...]


@dataclass(frozen=True)
class Loop:
    """A loop around a block; `trip_count` is None where the program does not tell."""

    block: "Block"
    trip_count: int | None


Node = Collective | Branches | Loop
Block = tuple[Node, ...]


@dataclass(frozen=True)
class ProgramCollectives:
    """A tree of collectives, and the phases in scopes, each with whether it is in a conditional."""

    block: Block
    scopes: tuple[tuple[str, bool], ...] = ()


def phase_of(scope: str) -> str | None:
    """Return the innermost phase that a scope path names, if any.

    >>> phase_of("jit(f)/cond/branch_1_fun/phase:slow/phase:average/psum")
    'average'
    """
    phases = _PHASE.findall(scope)
    return phases[-1] if phases else None


def leaves(block: Block, conditional: bool = False) -> Iterator[tuple[Collective, bool]]:
    """Yield every collective of a tree, and whether it is inside a conditional."""
    for node in block:
        if isinstance(node, Collective):
            yield node, conditional
        elif isinstance(node, Loop):
            yield from leaves(node.block, conditional)
        else:
            for branch in node.blocks:
                yield from leaves(branch, True)


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
    if name == "send":
        # The operand of a send that gathers is this device's shard, not the whole buffer.
        if collective.pattern == "all-gather":
            return nbytes * max(group_size - 1, 1)
        name = collective.pattern
    factor = {
        "all-reduce": 2,
        "reduce-scatter": 1,
        "all-gather": 1,
        "all-to-all": 1,
        "ragged-all-to-all": 1,
    }.get(name)
    if factor is None:
        return nbytes
    return factor * nbytes * (group_size - 1) // group_size if group_size else factor * nbytes


class Carried(NamedTuple):
    """A value that a loop carries from turn to turn, by its index."""

    index: int


Term = int | Carried | list[Any] | None
"""A value inside a loop: a constant, a carried value or a sum of two of these; None otherwise."""


def num_turns(
    test: Sequence[Term], start: Callable[[int], Term], after: Callable[[int], Term]
) -> int | None:
    """Return how often `for (i = start; i < stop; i += step)` runs; None for another loop.

    Args:
      test: `i` and `stop`, which is a constant or a carried value that does not change.
      start: returns the first term of the carried value with an index.
      after: returns the term of that carried value after one turn.
    """
    counter, stop = test
    if not isinstance(counter, Carried):
        return None
    if isinstance(stop, Carried):
        stop = start(stop.index) if after(stop.index) == stop else None
    begin, total, step = start(counter.index), after(counter.index), None
    if isinstance(total, list) and counter in total:
        step = total[1 - total.index(counter)]
    if not (isinstance(begin, int) and isinstance(stop, int) and isinstance(step, int)):
        return None
    return max(0, -(-(stop - begin) // step)) if step > 0 else None


_BY_LETTERS = {
    "pred": ("bool", 8),
    "i1": ("bool", 8),
    "bf16": ("bfloat16", 16),
    "c64": ("complex64", 64),
    "c128": ("complex128", 128),
    "complex<f32>": ("complex64", 64),
    "complex<f64>": ("complex128", 128),
    "token": ("token", 0),
}


def dtype_of(element: str) -> tuple[str, int]:
    """Return the name and the width in bits of an element type of HLO or StableHLO.

    >>> dtype_of("s32"), dtype_of("ui8"), dtype_of("f8E4M3FN")
    (('int32', 32), ('uint8', 8), ('float8_e4m3fn', 8))
    """
    if element in _BY_LETTERS:
        return _BY_LETTERS[element]
    # Small floats carry their layout behind the width: f8E4M3FN (StableHLO), f8e4m3fn (HLO).
    head, _, layout = element.lower().partition("e")
    letters = head.rstrip("0123456789")
    width = int(head[len(letters) :] or 0)
    kind = {"f": "float", "s": "int", "i": "int", "u": "uint", "ui": "uint"}.get(letters, letters)
    return f"{kind}{width}" + (f"_e{layout}" if layout else ""), width


def num_bytes(element: str, dims: list[int]) -> int:
    """Return the bytes of a dense array; types narrower than a byte are packed."""
    return (math.prod(dims) * dtype_of(element)[1] + 7) // 8
