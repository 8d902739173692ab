"""Which elements a device holds, for any leaves, layouts, cuts and placements of stages."""

import itertools

import hypothesis.strategies as st
import jax
import numpy as np
from hypothesis import given, settings
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js

SPECS = [P(), P("fsdp"), P(None, "tensor"), P(("tensor", "fsdp")), P("tensor", "fsdp")]


@settings(max_examples=8)
@given(st.data())
def test_a_device_has_its_part_of_its_stages_leaves_and_no_more_than_the_fullest(data):
    schedule = data.draw(
        st.sampled_from([js.schedules.gpipe(2, 2), js.schedules.interleaved(2, 2, 2)])
        | st.just(js.schedules.zbv(2, 2))
    )
    count = schedule.num_model_stages
    shapes = st.tuples(*[st.sampled_from([4, 8])] * 2)
    leaf = st.tuples(shapes, st.sampled_from(SPECS), st.sampled_from(["float32", "int32"]))
    layers = data.draw(
        st.lists(st.dictionaries(st.sampled_from("abc"), leaf), min_size=count, max_size=7)
    )
    inner = data.draw(
        st.sets(st.integers(1, len(layers) - 1), min_size=count - 1, max_size=count - 1)
    )
    ends = [0, *sorted(inner), len(layers)]
    blocks = list(itertools.pairwise(ends))
    parts = [[blocks[k] for k in own] for own in schedule.model_stages]
    number = itertools.count(1)  # every element of the model is another one, and none is 0
    params = [
        {
            n: np.array([next(number) for _ in range(s[0] * s[1])], d).reshape(s)
            for n, (s, _, d) in own.items()
        }
        for own in layers
    ]
    specs = [{n: spec for n, (_, spec, _) in own.items()} for own in layers]
    mesh = js.make_mesh({"stage": 2, "fsdp": 2, "tensor": 2})
    model = js.LayeredModel([lambda p, x: x] * len(params), lambda x, _: x.sum())
    layout = js.pipelined(model, params, schedule, mesh=mesh, parts=parts, param_specs=specs).layout
    stacked = layout.stack(params)

    held = {device: [] for device in mesh.devices.flat}
    for x in stacked.values():
        for shard in x.addressable_shards:
            held[shard.device] += np.asarray(shard.data)[np.asarray(shard.data) != 0].tolist()
    wanted = {device: [] for device in mesh.devices.flat}
    for stage, own in enumerate(parts):
        for i in itertools.chain(*(range(*block) for block in own)):
            for name, x in params[i].items():
                for shard in jax.device_put(
                    x, NamedSharding(mesh, specs[i][name])
                ).addressable_shards:
                    if shard.device in mesh.devices[stage]:
                        wanted[shard.device] += np.asarray(shard.data).ravel().tolist()
    assert {d: sorted(x) for d, x in held.items()} == {d: sorted(x) for d, x in wanted.items()}
    for x in stacked.values():
        assert np.asarray(x).reshape(2, -1).all(1).any()  # a stage fills it
    sizes = sum(x.size for x in stacked.values())
    assert layout.num_padding == sizes - sum(x.size for x in jax.tree.leaves(params))

    back = layout.unstack(stacked)
    jax.tree.map(np.testing.assert_array_equal, back, params)
    jax.tree.map(np.testing.assert_array_equal, layout.stack(back), stacked)
    for x, spec in zip(jax.tree.leaves(back), jax.tree.leaves(specs), strict=True):
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)
    two = jax.tree.map(lambda x: np.stack([x, -x]), params)
    stacked = {"of": layout.packing.stack(two, num_lead=1)}
    jax.tree.map(np.testing.assert_array_equal, layout.unstack_like(stacked), {"of": two})
