"""The exchange of embeddings on TPU: what can run beside a step, as compiled."""

import pytest

from support.embedding_steps import Workload
from support.exhaustive import sweep
from support.tpu_embeddings import ASYNC, all_to_alls
from support.tpu_slices import tpu_mesh

SMALL = Workload(tables=2, rows=4096, batch=256, widths=(512, 512, 512))
IDS, VECTORS = "s32", ("f32", "bf16")


@pytest.mark.parametrize(
    ("ahead", "num_slices"),
    sweep(
        [("ids", 1), ("vectors", 1), ("ids", 2), ("vectors", 2)],
        lambda ahead, num_slices: (ahead, num_slices) == ("vectors", 1),
    ),
)
def test_what_is_sent_for_the_next_batch_does_not_block(ahead, num_slices):
    """Inside a slice with the compiler's option; between slices always."""
    mesh = tpu_mesh("v5e:2x4", {"shard": 8 * num_slices}, num_slices=num_slices)
    found = all_to_alls(mesh, SMALL, ahead, ASYNC if num_slices == 1 else {})
    (ids,) = (one for one in found if one.shape.startswith(IDS))
    vectors = [one for one in found if one.shape.startswith(VECTORS)]
    assert len(vectors) == 2  # looked up, and their gradients
    assert not any(one.is_blocking for one in found)
    if (ahead, num_slices) == ("ids", 1):  # they need not wait for products to run beside them
        assert ids.others > 0
    else:
        assert ids.products == SMALL.num_products


@pytest.mark.exhaustive
def test_inside_a_slice_they_block_without_the_option():
    mesh = tpu_mesh("v5e:2x4", {"shard": 8})
    assert all(one.is_blocking for one in all_to_alls(mesh, SMALL, "ids", {}))
