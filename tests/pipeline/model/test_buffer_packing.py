"""Where leaves lie in the buffers of stages, in any shapes and layouts, and back."""

import math

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import given
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.pipeline.model import StageLayout, model_blocks

SIZES = {"stage": 2, "fsdp": 2, "tensor": 2}
SPECS = [P(), P("fsdp"), P(None, "tensor"), P(("tensor", "fsdp")), P("tensor", "fsdp")]


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


def layout_of(params, blocks=None, specs=None, placement=(0, 1), mesh=None):
    model = js.LayeredModel([lambda p, x: x] * len(params), lambda x, _: x)
    blocks = blocks or model_blocks(len(params), len(placement))
    mesh = mesh or js.make_mesh(SIZES)
    return StageLayout(model, params, blocks, placement, mesh=mesh, param_specs=specs)


@given(st.data())
def test_leaves_of_any_kind_come_back_and_no_device_has_more_than_the_fullest_stage(data):
    shapes = st.tuples(*[st.sampled_from([4, 8])] * 2)
    leaf = st.tuples(shapes, st.sampled_from(SPECS), st.sampled_from(["float32", "int8"]))
    layers = data.draw(st.lists(st.dictionaries(st.sampled_from("abc"), leaf), min_size=2))
    draw = np.random.default_rng(0).integers
    params = [{n: draw(-99, 99, s).astype(d) for n, (s, _, d) in own.items()} for own in layers]
    specs = [{n: spec for n, (_, spec, _) in own.items()} for own in layers]
    cut = data.draw(st.integers(1, len(layers) - 1))
    blocks = model_blocks(len(layers), 2, parts=[[(0, cut)], [(cut, len(layers))]])
    packing = layout_of(params, blocks, specs).packing
    buffers = [packing.pack(params, stage, np) for stage in range(2)]
    found = [packing.unpack(own, stage) for stage, own in enumerate(buffers)]
    assert all(isinstance(x, optax.MaskedNode) for own in found[0][cut:] for x in own.values())
    alike([*found[0][:cut], *found[1][cut:]], params)
    fullest: dict[str, int] = {}
    for part in (slice(cut), slice(cut, None)):
        held: dict[str, int] = {}
        for own in layers[part]:
            for shape, spec, dtype in own.values():
                names = {a for e in spec for a in ((e,) if isinstance(e, str) else e or ())}
                name = "/".join([dtype, *sorted(names)])
                held[name] = held.get(name, 0) + math.prod(shape)
        fullest = {n: max(held.get(n, 0), fullest.get(n, 0)) for n in {*held, *fullest}}
    assert {n: math.prod(s[1:]) for n, s in packing.shapes.items()} == fullest


def test_parts_lie_where_a_named_sharding_would_have_put_them():
    params = [{"w": np.arange(64.0).reshape(8, 8)}, {"w": np.zeros((8, 8))}]
    layout = layout_of(params, specs=P(("tensor", "fsdp"), None))
    stacked = layout.stack(params)[
        "float64/fsdp/tensor" if jax.config.jax_enable_x64 else "float32/fsdp/tensor"
    ]
    for shard in stacked.addressable_shards:
        stage, f, t = (index.start or 0 for index in shard.index[:3])
        rows = params[stage]["w"][2 * (2 * t + f) :][:2]
        np.testing.assert_array_equal(shard.data.ravel(), rows.ravel())


def test_stages_with_equal_leaves_lie_alike_and_equal_layers_one_leaf_after_the_other():
    params = [{"b": np.full(2, i), "w": np.full((2, 2), -i)} for i in range(8)]
    packing = layout_of(params).packing
    kernels = [packing.places[2 * i + 1][0].start for i in range(4)]
    assert kernels == [8, 12, 16, 20]  # behind the four biases
    assert [p[0].start for p in packing.places[:8]] == [p[0].start for p in packing.places[8:]]


def test_chunks_of_a_stage_lie_one_behind_the_other():
    params = [{"w": np.full(3, i)} for i in range(4)]
    layout = layout_of(params, model_blocks(4, 2, 2), placement=(0, 1, 1, 0))
    np.testing.assert_array_equal(
        layout.stack(params)["int32"], [[0] * 3 + [3] * 3, [1] * 3 + [2] * 3]
    )


def test_packings_are_equal_if_what_lies_where_is():
    one, same = (layout_of(parameters()).packing for _ in range(2))
    other = layout_of(parameters(), model_blocks(5, 2, parts=[[(0, 1)], [(1, 5)]])).packing
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert jax.tree.structure(one.staged(one.specs)) == jax.tree.structure(same.staged(one.specs))
