"""Training steps of GPTs whose replicas are sharded inside, compiled for TPU slices.

What `benchmarks/tpu_sharded.py` prints as a table.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from support.described import compiled_rows
from support.sharded_steps import Sharded
from support.tpu_slices import slices_mesh


@dataclass(frozen=True)
class SlicesSharded(Sharded):
    """A model on TPU slices."""

    @functools.cached_property
    def mesh(self) -> jax.sharding.Mesh:
        return slices_mesh(self.hardware, dict(self.axes), num_slices=self.num_groups)


@dataclass(frozen=True)
class Facts:
    """What a compiled program does on each chip.

    Attributes:
      sent: bytes that a device sends by axis, where each collective runs as a ring.
      counts: collectives by axis and kind.
      argument_bytes: memory of what the program is given, and gives back in its place.
      temporary_bytes: memory besides, while it runs.
    """

    sent: Mapping[str, int]
    counts: Mapping[tuple[str, str], int]
    argument_bytes: int
    temporary_bytes: int

    def with_blocks(self, other: "Facts", num_blocks: int) -> "Facts":
        """Return facts for `num_blocks`, extrapolated from these of 2 and `other` of 4 blocks."""

        def line(two: int, four: int) -> int:
            return round(two + (num_blocks - 2) * (four - two) / 2)

        def each(two: Mapping[Any, int], four: Mapping[Any, int]) -> dict[Any, int]:
            return {k: line(two.get(k, 0), four.get(k, 0)) for k in {**two, **four}}

        return Facts(
            each(self.sent, other.sent),
            each(self.counts, other.counts),
            line(self.argument_bytes, other.argument_bytes),
            line(self.temporary_bytes, other.temporary_bytes),
        )


@functools.cache
def facts(case: SlicesSharded, kind: str) -> Facts:
    """Compile the program of a kind of step, once; return what it does on each chip."""
    lowered = case.lowered(kind)
    compiled = lowered.compile()
    sent: dict[str, int] = {}
    counts: dict[tuple[str, str], int] = {}
    for row in compiled_rows(kind, lowered, compiled, case.mesh):
        sent[row.axis] = sent.get(row.axis, 0) + row.wire_bytes
        key = row.axis, row.collective
        counts[key] = counts.get(key, 0) + row.count
    memory = compiled.memory_analysis()
    assert memory is not None
    kept = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return Facts(sent, counts, memory.argument_size_in_bytes, memory.temp_size_in_bytes + kept)
