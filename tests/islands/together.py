"""Several islands in one process: each trains in a thread of its own."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

LIMIT_SECONDS = 120.0


def run_together(runs: Sequence[Callable[[], Any]]) -> list[Any]:
    """Return what functions return that run at the same time; raise the first error of one."""
    results: list[Any] = [None] * len(runs)
    errors: list[BaseException] = []
    is_over = threading.Event()

    def call(i: int, run: Callable[[], Any]) -> None:
        try:
            results[i] = run()
        except BaseException as error:
            errors.append(error)
            is_over.set()  # the others may wait for this one

    threads = [threading.Thread(target=call, args=x, daemon=True) for x in enumerate(runs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive() and not is_over.wait(0.01):
            pass
    if errors:
        raise errors[0]
    return results


def params() -> dict[str, np.ndarray]:
    """Return the parameters of a small model."""
    rng = np.random.default_rng(0)
    return {"b": np.zeros(3, np.float32), "w": 0.3 * rng.normal(size=(6, 3)).astype(np.float32)}


def loss(params: Any, batch: Any) -> Any:
    """Return the loss of the model."""
    inputs, targets = batch
    w, b = (params[name].astype(inputs.dtype) for name in ("w", "b"))
    return jnp.mean((jnp.tanh(inputs @ w + b[None]) - targets) ** 2)


def batch(t: int, replicas: slice, total: int = 12) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of some of `total` replicas in update t, two for each."""
    rng = np.random.default_rng(t)
    inputs = rng.normal(size=(total, 2, 6)).astype(np.float32)
    targets = np.tanh(inputs[..., :3] - inputs[..., 3:])
    return inputs[replicas].reshape(-1, 6), targets[replicas].reshape(-1, 3)
