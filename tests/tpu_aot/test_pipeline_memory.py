"""What a chip holds of a pipeline in one program: its own stage, and states of the same size.

Whole training steps with AdamW and `js.slowmo` over `js.local_sgd` are compiled for TPU slices.
Nothing runs, and no array is made.
"""

import math
from collections import Counter

import jax
import pytest

from jaxslowmo.models import GPTConfig
from support.described import compiled_rows
from support.tpu_staged import Staged

REPLICAS = 2
SIZES = {"num_layers": 10, "num_heads": 2, "embed_dim": 128, "context_length": 32}
SMALL = GPTConfig(**SIZES, dtype="bfloat16", remat=True)


def largest_stage(case: Staged) -> int:
    """Bytes of the parameters of the fullest stage."""
    each = [
        sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(layer))
        for layer in case.pipe.layout.unstack(case.params)
    ]
    return max(sum(each[b.start : b.end]) for b in case.pipe.layout.blocks)


@pytest.mark.usefixtures("standard_promotion")  # flax's LayerNorm in half precision
def test_a_chip_holds_its_stage_and_the_states_of_it():
    """And a local step sends what travels between stages alone."""
    axes = (("replica", REPLICAS), ("stage", 8))
    case = Staged(SMALL, "v5e:4x4", axes)
    lowered = case.lowered("local")
    program = lowered.compile()
    found, batch, parameters = program.memory_analysis(), case.batch(), largest_stage(case)
    of_batch = math.prod(batch.sharding.shard_shape(batch.shape)) * batch.dtype.itemsize
    held = found.argument_size_in_bytes - of_batch
    # AdamW has two moments; slowmo's anchor and velocity are shared between replicas.
    wanted = 3 * parameters + 2 * -(-parameters // REPLICAS)
    assert wanted <= held <= 1.05 * wanted
    counts: Counter[tuple[str, str]] = Counter()
    for row in compiled_rows("local", lowered, program, case.mesh):
        counts[row.axis, row.collective] += row.count
    assert set(counts) == {("stage", "collective-permute"), ("stage", "all-reduce")}
    assert counts["stage", "all-reduce"] == 1  # the loss
