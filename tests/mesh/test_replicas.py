"""One copy to stacked replicas and back, on meshes of all kinds, also over two processes."""

import ast
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from support.limits import TAKES_EMPTY_ARRAYS
from support.meshes import MESHES
from support.pairs import two_processes

AXES = {"replica": 4, "device": 2}


def bits(x):
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


@pytest.mark.parametrize("kind", MESHES)
def test_replicas_are_copies_and_consensus_undoes_them(kind):
    mesh = MESHES[kind](AXES)
    params = {
        "w": jnp.linspace(-1, 1, 6).reshape(3, 2),
        "h": jnp.linspace(-1, 1, 5, dtype=jnp.bfloat16),
        "count": jnp.int32(7),
        "mask": jnp.array([True, False]),
        "key": jax.random.key(3),
        "none": [jnp.ones((0 if TAKES_EMPTY_ARRAYS else 1, 3)), {}],
    }
    stacked = js.replicate(params, mesh=mesh)
    assert jax.tree.structure(stacked) == jax.tree.structure(params)
    one = js.consensus(stacked, mesh=mesh)
    for before, many, after in zip(*map(jax.tree.leaves, (params, stacked, one)), strict=True):
        assert many.dtype == after.dtype == before.dtype
        assert np.array_equal(bits(many), np.broadcast_to(bits(before), (4, *bits(before).shape)))
        assert np.array_equal(bits(before), bits(after))
        if kind != "virtual" and many.size:  # jax replicates arrays without elements
            assert many.sharding.is_equivalent_to(NamedSharding(mesh, P("replica")), many.ndim)


@pytest.mark.parametrize("kind", ["auto", "virtual"])
def test_stacked_parameters_are_not_stacked_again(kind):
    """Broadcasting may hide it: a loss that takes (4, 4, 3) for (4, 3) trains on."""
    mesh = MESHES[kind](AXES)
    # A leaf of one copy may be as long as there are replicas, and sharded over another axis.
    one = {"b": jnp.zeros(4), "w": jnp.ones((4, 3))}
    if kind != "virtual":
        one["w"] = jax.device_put(one["w"], NamedSharding(mesh, P("device")))
    stacked = js.replicate(one, mesh=mesh)
    step = js.make_train_step(
        lambda params, batch: params["b"].sum(), optax.sgd(0.1), sync=js.sgp("replica"), mesh=mesh
    )
    for again in (lambda: js.replicate(stacked, mesh=mesh), lambda: step.init(stacked)):
        with pytest.raises(ValueError, match="`params`"):
            again()
    js.replicate(js.consensus(stacked, mesh=mesh), mesh=mesh)


PROGRAM = """
import numpy as np
import optax
import jaxslowmo as js
from jax.sharding import NamedSharding, PartitionSpec as P

def said(fn, *args, **options):
    try:
        fn(*args, **options)
    except ValueError as error:
        return str(error)

mesh = js.make_mesh({"replica": 2})
split = NamedSharding(mesh, P("replica"))
params = {"w": np.ones(3, np.float32), "b": np.ones(2, np.float32)}
other = {"w": params["w"], "b": np.ones(4, np.float32), "c": params["b"]}
base = js.local_sgd("replica", sync_every=2)
sync = js.slowmo("replica", base=base, sync_every=4, shard_state=False)
loss = lambda p, batch: (batch @ p["w"]).mean() + p["b"].sum()
step = js.make_train_step(loss, optax.sgd(0.1), sync=sync, mesh=mesh, mode="host")
found = {"differ": said(step.init, other if rank else params)}

equal = {"w": np.arange(6.0).reshape(2, 3), "s": 1.5, "k": jax.random.key(3), "i": np.int64(4)}
for name, x in js.replicate(equal, mesh=mesh).items():
    here = x.addressable_data(0)
    bits = jax.random.key_data(here) if name == "k" else here
    found[name] = (str(x.dtype), x.shape, np.asarray(bits)[0].tolist())
found["values"] = said(js.replicate, {**equal, "w": np.ones(3) * rank}, mesh=mesh)
found["seeds"] = said(js.replicate, [np.float32(i + rank) for i in range(6)], mesh=mesh)

state = step.init(params)
found["in_sync"] = str(js.check_in_sync(state.params, mesh=mesh))
mine = params["w"] + np.array([0, rank / 2, 0], np.float32)
apart = jax.make_array_from_process_local_data(split, mine[None], (2, 3))
found["out_of_sync"] = said(js.check_in_sync, {**state.params, "w": apart}, mesh=mesh)
pmapped = jax.pmap(lambda x: {"w": x, "n": x[0]}, axis_name="i")(2.0 * rank + np.ones((1, 2)))
found["one"] = np.asarray(js.consensus({"w": pmapped["w"]})["w"]).tolist()
shares = [(pmapped["n"], None), (0.0, {"w": pmapped["w"]})]
found["weighted"] = np.asarray(js.consensus({"w": pmapped["w"]}, shares=shares)["w"]).tolist()
print(found, flush=True)
"""


@pytest.mark.usefixtures("quick_processes")
def test_two_processes_compare_their_trees_and_average(tmp_path):
    first, second = map(ast.literal_eval, two_processes(PROGRAM, tmp_path))
    assert first == second
    assert "b: float32[2] on process 0, float32[4] on process 1" in first["differ"]
    assert "c: missing on process 0, float32[2] on process 1" in first["differ"]
    whole = [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert [first[name] for name in "iksw"] == [
        *(("int32", (2,), 4), ("key<fry>", (2,), [0, 3])),
        *(("float32", (2,), 1.5), ("float32", (2, 2, 3), whole)),
    ]
    # Values of other seeds are told as digests; jax would print both arrays.
    each = r"float32\[3\] of values \w{16} on process"
    assert re.search(rf"w: {each} 0, {each} 1", first["values"])
    assert first["seeds"].count(" of values ") == 2 * 4
    assert "2 more" in first["seeds"]
    assert first["in_sync"] == "SyncReport(num_leaves=2, num_replicas=2, divergences=())"
    assert "w: replica 1 by 0.5 in 1 of 3 elements" in first["out_of_sync"]
    assert (first["one"], first["weighted"]) == ([2.0, 2.0], [2.5, 2.5])
