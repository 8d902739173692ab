"""A trainer in the form of big_vision's, whose loop forbids implicit transfers from its first line.

It runs in one process and in two, with equal losses: batches are put ahead, each update is logged,
the run is evaluated, saved, restored and goes on.
"""

import json

import jax
import numpy as np

from support.pairs import two_processes

PROGRAM = """
import json
import numpy as np
import optax
import jax.numpy as jnp
import jaxslowmo as js
from jaxslowmo.checkpoint import Checkpoints

jax.config.update("jax_transfer_guard", "disallow")
jax.config.update("jax_numpy_rank_promotion", "raise")

CENTRES = np.arange(24).reshape(3, 8) % 3 - 1.0

def loss_fn(params, batch, *, rng):
    kept = jax.random.bernoulli(rng, 0.9, batch["image"].shape).astype(jnp.float32)
    logits = (batch["image"] * kept) @ params["kernel"] + params["bias"][None]
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    hits = jnp.argmax(logits, -1) == batch["label"]
    return loss.mean(), {"accuracy": hits.astype(jnp.float32).mean()}

def batches(first, last):
    for t in range(first, last):
        draws = np.random.default_rng(t)
        label = draws.integers(0, 3, 16).astype(np.int32)
        image = CENTRES[label] + draws.normal(size=(16, 8))
        rows = slice(8 * rank, 8 * rank + 8) if jax.process_count() > 1 else slice(None)
        yield {"image": np.float32(image[rows]), "label": label[rows]}

def run(folder):
    mesh = js.make_mesh({"replica": 2, "data": 2})
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    sync = js.slowmo("replica", base=js.local_sgd("replica", sync_every=2), sync_every=4)
    step = js.make_train_step(loss_fn, optimizer, sync=sync, mesh=mesh)
    params = {"kernel": np.zeros((8, 3), np.float32), "bias": np.zeros(3, np.float32)}
    state, said = step.init(params, seed=7), []
    with Checkpoints(folder) as checkpoints:
        for result in js.TrainPipeline(step, state, batches(0, 6)):
            state = result.state
            said.append(js.host_mean(result.metrics)["loss"])
        checkpoints.save(6, state, wait=True)
        state = checkpoints.restore(step, params).state
    state = js.set_hyperparams(state, learning_rate=0.05)
    for batch in batches(6, 9):
        state, metrics = step(state, step.place(batch)[0])
        said.append(js.host_mean(metrics)["loss"])
    (held_out,) = batches(9, 10)
    said += js.host_mean(step.evaluate(state, held_out)).values()
    model = step.consensus(state)
    said.append(float(np.sum(jax.device_get(model["kernel"].addressable_data(0)))))
    return said
"""


def test_it_trains_alike_in_one_process_and_in_two(tmp_path):
    names = {"jax": jax, "rank": 0}
    with jax.transfer_guard("disallow"), jax.numpy_rank_promotion("raise"):
        code = "\n".join(x for x in PROGRAM.splitlines() if "jax.config" not in x)
        exec(compile(code, "one process", "exec"), names)
        alone = names["run"](tmp_path / "one")
    shared = f"\nprint(json.dumps(run({str(tmp_path / 'two')!r})))"
    both = [
        json.loads(x.splitlines()[-1]) for x in two_processes(PROGRAM + shared, tmp_path, devices=2)
    ]
    # Losses are means of each process' replica there.
    np.testing.assert_allclose(np.mean(both, axis=0), alone, rtol=1e-5)
    assert alone[8] < alone[0]
