"""The exchange of embeddings where a TPU compiler made the program."""

import math
import re

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from embedding.shared import embeddings_of_all_kinds, update_of
from support.tpu_slices import tpu_mesh

ALL_TO_ALL = re.compile(r"= (\w+)\[([\d,]+)\]\S* all-to-all(?:-start)?\(")


def test_all_tables_travel_in_one_all_to_all_each_time_and_nothing_besides():
    mesh = tpu_mesh("v5e:2x2", {"shard": 4})
    emb = embeddings_of_all_kinds().over(mesh)

    def placed(x, spec):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    stored = jax.eval_shape(emb.init, jax.random.key(0))
    state = jax.eval_shape(emb.init_optimizer, stored)
    ids = jax.ShapeDtypeStruct((16, 3), jnp.int32)
    lowered = update_of(emb, mesh).lower(
        jax.tree.map(placed, stored, emb.specs),
        jax.tree.map(placed, state, emb.optimizer_specs),
        {name: placed(ids, P("shard")) for name in emb.tables},
    )
    (row,) = js.comm_report_of(lowered, mesh=mesh, compile=False).select(collective="all-to-all")
    found = ALL_TO_ALL.findall(lowered.compile().as_text())
    assert [dtype for dtype, _ in found] == ["s32", "f32", "f32"]
    assert len(found) == row.count
    assert sum(4 * math.prod(map(int, dims.split(","))) for _, dims in found) == row.bytes
