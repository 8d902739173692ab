"""A step for tests of the loop and its hooks, and a hook that writes down what it sees."""

import functools

import jax.numpy as jnp
import numpy as np
import optax

import jaxslowmo as js

MESH = js.virtual_mesh({"replica": 2})


BATCHES = np.random.default_rng(0).normal(size=(6, 4, 3)).astype(np.float32)


def start(step):
    return step.init({"w": np.ones(3, np.float32)})


class Note:
    """Writes down when it was called and what the reports held."""

    def __init__(self, name, calls, every):
        self.name, self.calls, self.every = name, calls, every

    def __call__(self, result):
        self.calls.append((self.name, result.step, dict(result.reports)))
        return {self.name: result.step}


@functools.cache
def make_step() -> js.train.TrainStep:
    """The same compiled programs for all tests."""
    return js.make_train_step(
        lambda p, b: (jnp.mean((b @ p["w"]) ** 2), {"mean": b.mean()}),
        optax.adam(0.1),
        sync=js.local_sgd("replica", sync_every=2),
        mesh=MESH,
    )
