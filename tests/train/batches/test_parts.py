"""What several processes give of one array."""

import json

import jax

from support.pairs import two_processes

# Two processes with two devices each: 0 and 1 are the first's.
PROGRAM = """
import functools
import json
import math
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec as P
import jaxslowmo as js
from jaxslowmo._support.coordinator import tell, wait_for
from jaxslowmo.train.batches import own_parts

devices = sorted(jax.devices(), key=lambda d: d.id)
rng = np.random.default_rng(0)
WHOLE = rng.normal(size=(2, 8, 3)).astype(np.float32)
WEIGHT = np.array([1, 3], np.float32)
START = {"w": np.ones((3, 2), np.float32)}
said = {}

def loss(params, batch):
    return ((batch @ params["w"]) ** 2).mean()

def values(tree):
    shards = [shard for x in jax.tree.leaves(tree) for shard in x.addressable_shards]
    return [np.asarray(shard.data).tolist() for shard in shards]

def train(step, params, give, weight=None):
    state = step.init(params)
    for batch in WHOLE:
        state, metrics = step(state, give(batch), weight)
    return values((state.params, metrics))

def over(mesh, *axes):
    sharding = NamedSharding(mesh, P(*axes))
    return lambda x: jax.make_array_from_callback(x.shape, sharding, lambda i: x[i])

local = jax.make_mesh((2,), ("local",), devices=jax.local_devices())  # with an Explicit axis
here_split = lambda x: jax.device_put(x, NamedSharding(local, P("local")))

def compare(name, mesh, axes, spec=None, weighted=False, globally=False):
    own, here = own_parts(mesh, axes), list(own_parts(mesh, ("replica",)))
    count = math.prod(mesh.shape[a] for a in axes)
    mine = lambda x: np.concatenate([np.split(x, count)[i] for i in own])
    weight = WEIGHT if weighted else None
    part = None if weight is None else weight[here]
    params = jax.tree.map(over(mesh, *spec), START) if spec else START
    make = functools.partial(
        js.make_train_step, loss, optax.sgd(0.1), sync=js.local_sgd("replica", sync_every=1),
        mesh=mesh,
    )
    step = make()
    known = None if weight is None else over(mesh, "replica")(weight)
    wanted = train(step, params, over(mesh, axes), known)
    one = lambda x: jax.device_put(mine(x), jax.local_devices()[0])
    found = [train(step, params, give, part) for give in (mine, one, lambda x: here_split(mine(x)))]
    if globally:
        step = make(host_batch="global")
        found += [train(step, params, give, weight) for give in (lambda x: x, here_split)]
    said[name] = [own, all(x == wanted for x in found)]

def drawn(params, batch, *, model_state):
    return loss(params, batch), ({"drawn": jax.random.uniform(model_state["key"])}, model_state)

grid = lambda *rows: np.array([[devices[i] for i in row] for row in rows])
one_axis = lambda *row: jax.sharding.Mesh(grid(row)[0], ("replica",))
compare("apart", one_axis(0, 2, 1, 3), ("replica",))
two = jax.sharding.Mesh(grid([0, 1], [2, 3]), ("replica", "device"))
compare("whole replicas", two, ("replica", "device"), weighted=True)
spans = jax.sharding.Mesh(grid([0, 2], [1, 3]), ("replica", "device"))
compare("replicas over processes", spans, ("replica", "device"), weighted=True, globally=True)
model = jax.sharding.Mesh(grid([0, 2], [1, 3]), ("replica", "model"))
compare("same parts", model, ("replica",), spec=(None, "model"), globally=True)

# Nothing waits for the other process: process 0 does its local steps before process 1 begins.
sync = js.local_sgd("replica", sync_every=99)
for mode, host_batch in (("host", "local"), ("traced", "global")):
    step = js.make_train_step(
        loss, optax.sgd(0.1), sync=sync, mesh=one_axis(0, 1, 2, 3), mode=mode, host_batch=host_batch
    )
    state = step.init(START)
    is_whole = host_batch == "global"
    batch = WHOLE[0] if is_whole else WHOLE[0][4 * rank:][:4]
    weight = np.arange(4.0) if is_whole else np.ones(2)
    state, _ = step(state, batch, weight)
    if rank == 1:
        wait_for(f"go {mode}", 300)
    for _ in range(10):
        state, metrics = step(state, batch, weight)
    jax.block_until_ready((state, metrics))
    if rank == 0:
        tell(f"go {mode}", "")

# jax puts bits on devices of other processes, and no keys.
step = js.make_train_step(drawn, optax.sgd(0.1), sync="none", mesh=one_axis(0, 2))
made = step.init(START, model_state={"key": jax.random.key(5)})
said["drawn"] = js.host_mean(step(made, WHOLE[0][rank:][:1])[1])["drawn"]

# What is looked at without running is of the whole, whichever way it is given.
step = js.make_train_step(loss, optax.sgd(0.1), sync=sync, mesh=two)
state = step.init(START)
shape = jax.ShapeDtypeStruct((8, 3), np.float32)
mine = WHOLE[0][4 * rank:][:4]
looks = {
    "traced": lambda x: str(step.traced_by_phase(state, x)[None].jaxpr),
    "compiled": lambda x: step.compiled(state, x).as_text(),
    "order": lambda x: step.ready_order(state, x),
}
said["looks"] = {name: look(mine) == look(shape) for name, look in looks.items()}
for name, call in {
    "rows": lambda: step(state, WHOLE[0][:3]),
    "weight": lambda: step(state, mine, np.ones(2)),
}.items():
    try:
        call()
    except ValueError as error:
        said[name] = str(error)
print(json.dumps(said))
"""
PARTS = {
    "apart": [[0, 2], [1, 3]],
    "whole replicas": [[0, 1], [2, 3]],
    "replicas over processes": [[0, 2], [1, 3]],
    "same parts": [[0, 1], [0, 1]],
}


def test_parts_make_the_batch(tmp_path):
    """From NumPy, from one device and two; the same as an array over all, and as `"global"`.

    What does not fit names this process' share.
    """
    printed = two_processes(PROGRAM, tmp_path, devices=2)
    draws = set()
    for process, text in enumerate(printed):
        said = json.loads(text.splitlines()[-1])
        for name, parts in PARTS.items():
            assert said[name] == [parts[process], True], name
        assert all(said["looks"].values()), said["looks"]
        draws.add(said["drawn"])
        assert "multiple of 2, this process' share of 4" in said["rows"]
        assert "(3, 3)" in said["rows"]
        assert "1 of 2, shape (1,), got shape (2,)" in said["weight"]
    assert len(draws) == 2
    assert float(jax.random.uniform(jax.random.key(5))) in draws
