"""Steps of replicas that are sharded inside, as XLA makes them for GPUs: nothing travels twice.

Nothing runs here.
"""

import math
from typing import Any

import jax
import pytest

from support.gpu_programs import SHARDED, each_of, program

ALL = [f"{name}, {kind}" for name in SHARDED for kind in ("local", "slow")]
SLOW = [name for name in ALL if name.endswith("slow")]
each = each_of(*ALL)
PADDING = 1.01  # a shard's, besides the 8 KiB of small ones
# flax's LayerNorm in half precision relies on promotion.
pytestmark = pytest.mark.usefixtures("standard_promotion")


def elements_over_fsdp(tree: Any, specs: Any, sizes: dict[str, int]) -> int:
    """The elements of leaves that are split over "fsdp", as a device holds them once gathered."""

    def size(x: Any, spec: Any) -> int:
        others = math.prod(sizes[name] for name in spec if name not in (None, "fsdp"))
        return x.size // others if "fsdp" in spec else 0

    return sum(jax.tree.leaves(jax.tree.map(size, tree, specs)))


@each
def test_each_matrix_is_gathered_once_per_pass_and_scattered_once(name):
    """In 16 bits. Blocks are gathered again in the backward pass, which computes them again."""
    case = SHARDED[name.partition(",")[0]]
    sizes = dict(case.axes)
    everything = elements_over_fsdp(case.params, case.specs, sizes)
    blocks = elements_over_fsdp(case.params["blocks"], case.specs["blocks"], sizes)
    rows = {r.collective: r for r in program(name).facts.rows if r.axis == "fsdp"}
    assert set(rows) == {"all-gather", "reduce-scatter", "all-reduce"}
    assert rows["all-gather"].bytes == 2 * (everything + blocks)
    assert rows["all-gather"].count == 2  # the compiler merges those of a pass
    assert rows["reduce-scatter"].bytes == 2 * everything
    assert (rows["all-gather"].dtypes, rows["reduce-scatter"].dtypes) == (("bfloat16",),) * 2
    # Vectors, which are whole on every device, and the loss.
    assert rows["all-reduce"].bytes <= 0.02 * 2 * everything


@each
def test_transforms_send_between_replicas_alone(name):
    """A slow step its true reduce-scatter and all-gather of a GPU's part, a local one nothing."""
    case = SHARDED[name.partition(",")[0]]
    facts = program(name).facts
    between = {row.collective: row for row in facts.rows if "replica" in row.axis}
    of_transforms = facts.schedule.select(name="phase:")
    if name not in SLOW:
        assert between == {}
        assert of_transforms == ()
        return
    assert {row.axis for row in between.values()} == {"replica"}
    assert set(between) == {"reduce-scatter", "all-gather"}
    wanted = case.between_replicas()
    assert wanted <= sum(r.wire_bytes for r in between.values()) <= PADDING * wanted + 8 * 8192
    assert [t.collective for t in of_transforms] == ["reduce-scatter", "all-gather"]
