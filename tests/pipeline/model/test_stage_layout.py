"""Parameters of all stages in one tree and back: arrays, types, states that mirror them."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js

MODEL = js.LayeredModel(
    [lambda p, x: x] * 5, lambda x, _: x.sum(), tied=[((0, "table"), (4, "table"))]
)
# A table is not of a kernel's shape. The last layer has another one than the first: it is tied.
BLOCKS = [{"kernel": np.full((4, 4), i), "bias": np.full(4, -i)} for i in (1.0, 2.0, 3.0)]
TABLES = [{"table": np.arange(24.0).reshape(6, 4) + i} for i in (0, 7)]
PARAMS = jax.tree.map(np.float32, [TABLES[0], *BLOCKS, TABLES[1]])
TIED = [*PARAMS[:4], PARAMS[0]]
NAME = "float32/fsdp"


def alike(tree, other):
    jax.tree.map(np.testing.assert_array_equal, tree, other)


@pytest.fixture(scope="module")
def layout(mesh_of):
    specs = [jax.tree.map(lambda x: P(*[None] * (x.ndim - 1), "fsdp"), layer) for layer in PARAMS]
    parts = [[(0, 2)], [(2, 5)]]  # the embedding and a block; two blocks and the head
    options = {"mesh": mesh_of({"replica": 2, "stage": 2, "fsdp": 2}), "param_specs": specs}
    return js.pipelined(MODEL, PARAMS, js.schedules.gpipe(2, 2), parts=parts, **options).layout


@pytest.fixture(scope="module")
def stacked(layout):
    return layout.stack(PARAMS)


def test_arrays_wherever_they_are_traced_ones_and_types_are_stacked_alike(stacked, layout):
    buffer = stacked[NAME]
    assert buffer.sharding == NamedSharding(buffer.sharding.mesh, P("stage", "fsdp", None))
    assert layout.specs[NAME] == P("stage", "fsdp", None)
    alike(layout.unstack(stacked), TIED)
    there = jax.device_put(PARAMS, NamedSharding(buffer.sharding.mesh, P()))
    alike(layout.stack(there), stacked)
    alike(jax.jit(layout.stack)(PARAMS), stacked)
    alike(jax.jit(layout.unstack)(stacked), TIED)
    types = layout.stack(jax.eval_shape(lambda: PARAMS))
    assert types[NAME].shape == buffer.shape == (2, 2, (2 * (16 + 4) + 24) // 2)
    assert types[NAME].sharding.spec == P("stage", "fsdp", None)
    assert jax.eval_shape(layout.unstack, types) == jax.eval_shape(lambda: PARAMS)


def test_moments_of_a_run_are_read_as_those_of_layers(stacked, layout):
    tx = optax.masked(optax.adam(0.1), lambda tree: [{n: n != "bias" for n in x} for x in tree])
    state = jax.jit(js.chain(tx).init)(stacked)
    layers = layout.unstack_like(jax.tree.map(lambda x: x + 1, state))
    assert jax.tree.structure(layers) == jax.tree.structure(js.chain(tx).init(TIED))
    mu = layers[0].inner_state[0].mu
    assert mu[1]["bias"] == optax.MaskedNode()
    np.testing.assert_array_equal(mu[4]["table"], np.ones((6, 4)))
