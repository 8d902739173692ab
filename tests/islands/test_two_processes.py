"""An island of two processes, of which the first talks to the store, is one island."""

import json
from pathlib import Path

import numpy as np

import jaxslowmo as js
from islands.test_island import train, whole
from support.pairs import two_processes

PROGRAM = """
import json
import shutil
import sys
sys.path.insert(0, TESTS)
import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec as P
import jaxslowmo as js
from islands.together import batch, loss, params

url = URL
mesh = js.make_mesh({"replica": 2, "device": 2})
layout = {"b": P(), "w": P("device")}  # the rows of `w` are split inside a replica
model = {
    name: jax.make_array_from_callback(x.shape, NamedSharding(mesh, layout[name]), lambda i: x[i])
    for name, x in params().items()
}
island = js.islands.join(
    url, name="pair", sync_every=4, codec=js.codecs.int8(), deadline_seconds=9, delay=2
)
step = js.make_train_step(
    loss, optax.sgd(0.05), mesh=mesh, sync=island.transform(), host_batch="global"
)
state = island.exchange(step.init(model))
for t in range(1, 13):
    state, _ = step(state, batch(t, slice(0, 2)))
    if island.due(t):
        state = island.exchange(state)
b = np.asarray(state.params["b"].addressable_data(0))[0].tolist()
lost = jax.tree.leaves(state.exchange.local["island"].lost)
kept = [np.asarray(x.addressable_data(0)).any() for x in lost]
said = {"b": b, "round": island.round, "lost": bool(any(kept)), "sent": island.bytes_sent}
if rank == 0:
    shutil.rmtree(url)
try:
    island.exchange(state)
except js.islands.IslandsError as error:
    said["error"] = str(error)
print(json.dumps(said))
"""


def test_it_trains_as_one_process_does_and_fails_on_both(tmp_path):
    tests = repr(str(Path(__file__).parents[1]))
    run = PROGRAM.replace("URL", repr(str(tmp_path / "pair"))).replace("TESTS", tests)
    printed = two_processes(run, tmp_path, devices=2)
    first, second = (json.loads(text.strip().splitlines()[-1]) for text in printed)
    assert first == second | {"error": first["error"]}
    assert (first["round"], first["lost"]) == (3, True)
    assert first["sent"] > 0
    assert "is not here any more. Was the bucket" in first["error"]
    assert "is not here any more. Was the bucket" in second["error"]
    codec = js.codecs.int8()
    _, state, _ = train(tmp_path / "one", "one", slice(0, 2), periods=3, codec=codec, delay=2)
    # Rounding differs, so a code may be the next one.
    np.testing.assert_allclose(first["b"], whole(state.params)[0][0], rtol=0.02, atol=1e-4)
