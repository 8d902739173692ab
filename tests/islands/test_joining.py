"""Islands that start at other times than the rest take part in the rounds."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

import jaxslowmo as js
from support.replay import objects, replay


class Trained:
    """An island of one number, whose updates are steps along a number per replica."""

    def __init__(
        self,
        url: Path,
        name: str,
        deadline: float,
        *steps: float,
        state: Any = None,
        **options: Any,
    ) -> None:
        self.batch = np.array(steps or [1.0], np.float32)[:, None]
        self.island = js.islands.join(
            str(url), name=name, late="carry", deadline_seconds=deadline, **options
        )
        self.step = js.make_train_step(
            lambda params, batch: jnp.sum(params["w"][None] * batch),
            optax.sgd(1.0),
            mesh=js.virtual_mesh({"replica": len(self.batch)}),
            sync=self.island.transform(),
        )
        start = self.step.init({"w": np.zeros(1, np.float32)})
        self.state = self.island.exchange(start if state is None else state)

    def train(self) -> None:
        self.state, _ = self.step(self.state, self.batch)

    def exchange(self) -> None:
        self.state = self.island.exchange(self.state)


def islands_of(url: Path) -> list[list[str]]:
    return replay(objects(str(url)))["islands"]


def test_what_an_island_carries_over_counts_though_rounds_are_too_short_for_it(tmp_path):
    first, late = Trained(tmp_path, "a", 0.1), Trained(tmp_path, "b", 0.1)
    late.train()
    late.train()
    for _ in range(2):
        first.train()
        first.exchange()
        late.exchange()  # the second time it sends its updates at once, to the open round
    first.train()
    first.exchange()
    late.exchange()
    assert islands_of(tmp_path) == [["a"], ["a"], ["a", "b"]]
    # Outer steps along 1, 1 and (1 + 2) / 2, of SGD with Nesterov momentum.
    anchor = velocity = 0.0
    for away in (1.0, 1.0, 1.5):
        velocity = 0.9 * velocity + away
        anchor -= 0.7 * (0.9 * velocity + away)
    np.testing.assert_allclose(first.state.params["w"], [[anchor]], rtol=1e-6)
    np.testing.assert_array_equal(late.state.params["w"], first.state.params["w"])


class Unanswered:
    """A bucket that writes parts, and never says so."""

    def __init__(self, bucket: Any) -> None:
        self._object_store = bucket

    def __getattr__(self, name: str) -> Any:
        return getattr(self._object_store, name)

    def put(self, key: str, data: bytes) -> None:
        self._object_store.put(key, data)
        if "/part-" in key:
            raise OSError("no answer")
