"""Which leaves share a slot."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxslowmo.pipeline.model import model_blocks
from jaxslowmo.pipeline.model._slots import leaves_of, plan_slots


def parameters():
    """An embedding, three blocks and a head; the table is of no other leaf's shape."""
    block = lambda i: {"kernel": jnp.full((4, 4), i), "bias": jnp.full((4,), -i)}  # noqa: E731
    table = jnp.arange(24.0).reshape(6, 4)
    return [{"table": table}, *map(block, (1.0, 2.0, 3.0)), {"table": table}]


def alike(tree, other):
    def same(x, y):
        if isinstance(x, jax.ShapeDtypeStruct):
            assert (x.shape, x.dtype) == (y.shape, y.dtype)
        else:
            np.testing.assert_array_equal(x, y)

    jax.tree.map(same, tree, other)


def slots(params, stages, placement=None, chunks=1, specs=None):
    blocks = model_blocks(len(params), stages, chunks)
    placement = placement or [k % stages for k in range(len(blocks))]
    plan = plan_slots(leaves_of(params, specs), blocks, placement)
    return {slot.name: slot.rows for slot in plan.slots}, plan


def test_equal_blocks_share_slots_and_an_embedding_shares_one_with_the_head():
    found, plan = slots(parameters(), 5)
    assert found == {"0/table": 1, "1/bias": 1, "1/kernel": 1}
    assert [place.stage for own in plan.places for place in own] == [0, 1, 1, 2, 2, 3, 3, 4]


def test_rows_are_as_many_as_one_stage_needs_not_as_it_has_chunks():
    # Layers 0 and 2 on stage 0, 1 and 3 on stage 1.
    found, plan = slots(parameters()[:4], 2, chunks=2)
    assert found == {"0/table": 1, "1/bias": 2, "1/kernel": 2}
    assert [p.row for p in plan.places[3]] == [1, 1]
    assert slots(parameters(), 2, placement=[1, 1])[0]["0/table"] == 2


def test_a_stage_has_each_of_its_leaves_in_a_slot_of_its_own():
    found, _ = slots(parameters(), 2)
    assert found == {"0/table": 1, "1/bias": 1, "1/kernel": 1, "3/bias": 1, "3/kernel": 1}


def test_a_leaf_prefers_the_slot_of_its_own_path():
    params = [{"bias": jnp.zeros(4)}, {"bias": jnp.zeros(4), "scale": jnp.ones(4)}]
    params += [{"scale": jnp.ones(4)}]
    _, plan = slots(params, 3)
    assert [slot.leaf.path for slot in plan.slots] == ["bias", "scale"]
    assert [place.slot for own in plan.places for place in own] == [0, 0, 1, 1]
    # Without one of its path it goes to any of its kind.
    assert slots([{"bias": jnp.zeros(4)}, {"scale": jnp.ones(4)}], 2)[0] == {"0/bias": 1}


def test_dtypes_and_specs_do_not_mix():
    params = [{"a": jnp.zeros(4)}, {"a": jnp.zeros(4, jnp.bfloat16)}, {"a": jnp.zeros(4)}]
    specs = [P(), P(), P("tensor")]
    assert len(slots(params, 3)[0]) == 2
    assert len(slots(params, 3, specs=specs)[0]) == 3
    assert len(slots(params, 3, specs=[P(None), P(), P()])[0]) == 2
