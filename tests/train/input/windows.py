"""Which batches reach which update: a model of the rule, and the recorded calls of another one."""

import functools
import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

import jaxslowmo as js
from support.golden_peers import FOLDER

NUM = 16  # batches that can be told apart
PARAMS = {"w": np.zeros(NUM, np.float32)}


@functools.cache
def telling_step() -> js.train.TrainStep:
    """Its gradient is the batch, so its parameters tell which batches each update was made of."""
    return js.make_train_step(
        lambda params, batch: jnp.mean(batch @ params["w"]),
        optax.sgd(1.0),
        gradients=js.all_reduce_gradients("replica", divide_by="active"),
        mesh=js.virtual_mesh({"replica": 2}),
    )


def batch_of(i: int) -> np.ndarray:
    """One example for each replica."""
    return np.repeat(np.eye(NUM, dtype=np.float32)[i : i + 1], 2, axis=0)


def start() -> js.TrainState:
    return telling_step().init(PARAMS)


class Updates:
    """Reads off parameters which batches each update was the mean of."""

    def __init__(self) -> None:
        self._before = PARAMS["w"]
        self.found: list[list[int]] = []

    def see(self, state: js.TrainState) -> None:
        """To be called after each call."""
        now = np.asarray(state.params["w"][0])
        moved, self._before = self._before - now, now
        if moved.any():
            batches = np.flatnonzero(moved)
            np.testing.assert_allclose(moved[batches], 1 / len(batches), rtol=1e-6)
            self.found.append(batches.tolist())


def recorded() -> list[dict[str, Any]]:
    """Calls of torchrec's pipelines, changed for accumulation, with the updates that they make."""
    return json.loads((FOLDER / "grad_accum_calls.json").read_text(encoding="utf-8"))["cases"]


def windows(batches: list[int], accumulate: int) -> list[list[int]]:
    """By the rule: reset before c % A == 0, update at (c + 1) % A == 0; whole windows alone."""
    whole = len(batches) // accumulate * accumulate
    return [batches[i : i + accumulate] for i in range(0, whole, accumulate)]
