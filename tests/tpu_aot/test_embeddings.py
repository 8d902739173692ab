"""The exchange of embeddings where a TPU compiler made the program: what is sent, beside what."""

import math
import re

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from embedding.shared import embeddings_of_all_kinds, update_of
from support.described import shapes_on
from support.embedding_steps import Workload
from support.tpu_embeddings import ASYNC, all_to_alls
from support.tpu_slices import tpu_mesh

ALL_TO_ALL = re.compile(r"= (\w+)\[([\d,]+)\]\S* all-to-all(?:-start)?\(")


def test_all_tables_travel_in_one_all_to_all_each_time_and_nothing_besides():
    mesh = tpu_mesh("v5e:2x2", {"shard": 4})
    emb = embeddings_of_all_kinds().over(mesh)
    stored = jax.eval_shape(emb.init, jax.random.key(0))
    state = jax.eval_shape(emb.init_optimizer, stored)
    ids = dict.fromkeys(emb.tables, jax.ShapeDtypeStruct((16, 3), jnp.int32))

    def placed(types, specs):
        return jax.tree.map(lambda x, spec: shapes_on(x, mesh, spec), types, specs)

    lowered = update_of(emb, mesh).lower(
        placed(stored, emb.specs),
        placed(state, emb.optimizer_specs),
        shapes_on(ids, mesh, P("shard")),
    )
    (row,) = js.comm_report_of(lowered, mesh=mesh, compile=False).select(collective="all-to-all")
    found = ALL_TO_ALL.findall(lowered.compile().as_text())
    assert [dtype for dtype, _ in found] == ["s32", "f32", "f32"]
    assert len(found) == row.count
    assert sum(4 * math.prod(map(int, dims.split(","))) for _, dims in found) == row.bytes


SMALL = Workload(tables=2, rows=4096, batch=256, widths=(512, 512, 512))
IDS, VECTORS = "s32", ("f32", "bf16")


def test_what_is_sent_for_the_next_batch_does_not_block():
    """With the compiler's option, without which all block."""
    mesh = tpu_mesh("v5e:2x4", {"shard": 8})
    found = all_to_alls(mesh, SMALL, "vectors", ASYNC)
    (ids,) = (one for one in found if one.shape.startswith(IDS))
    assert len([one for one in found if one.shape.startswith(VECTORS)]) == 2  # and gradients
    assert not any(one.is_blocking for one in found)
    assert ids.products == SMALL.num_products
    assert all(one.is_blocking for one in all_to_alls(mesh, SMALL, "ids", {}))
