"""A small step for tests of pipelines, and iterators that behave in every way."""

import contextlib
import functools
import gc
import os
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np

import jaxslowmo as js
from support.waiting import PATIENCE_SECONDS
from train.small_loop import make_step, start

BATCHES = np.random.default_rng(1).normal(size=(9, 4, 3)).astype(np.float32)


small_step = make_step


def pipeline_of(batches=None, **options) -> js.TrainPipeline:
    step = small_step()
    return js.TrainPipeline(step, start(step), batches, **options)


@functools.cache
def plain(batches: tuple[int, ...] = tuple(range(9))) -> list[np.ndarray]:
    """Losses of a loop without a pipeline, over these batches."""
    step = small_step()
    state, losses = start(step), []
    for i in batches:
        state, metrics = step(state, BATCHES[i])
        losses.append(np.asarray(metrics["loss"]))
    return losses


def losses_of(results) -> list[np.ndarray]:
    return [np.asarray(r.metrics["loss"]) for r in results]


def assert_same(found, wanted) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def _running() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "jaxslowmo-loader"]


_of_other_tests: list[threading.Thread] = []


def forget_loaders() -> None:
    """Those that run now are of other tests in this process."""
    _of_other_tests[:] = _running()


def loaders() -> list[threading.Thread]:
    """Threads that load, but for those that end now: of pipelines that nobody holds."""
    gc.collect()
    found = [t for t in _running() if t not in _of_other_tests]
    for thread in found:
        thread.join(0.05)
    return [t for t in found if t.is_alive()]


class Counted:
    """An iterator over the batches that says where it is, as grain's do.

    An exception among the batches is raised in its place.
    """

    def __init__(self, batches=BATCHES):
        self.batches, self.next_index = batches, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.next_index == len(self.batches):
            raise StopIteration
        self.next_index += 1
        batch = self.batches[self.next_index - 1]
        if isinstance(batch, Exception):
            raise batch
        return batch

    def get_state(self):
        return {"next_index": self.next_index}

    def set_state(self, state):
        self.next_index = state["next_index"]


class Gated(Counted):
    """Gives no batch beyond the first `count` before the gate opens."""

    def __init__(self, count, batches=BATCHES):
        super().__init__(batches)
        self.count, self.gate, self.waiting = count, threading.Event(), False

    def __next__(self):
        if self.next_index >= self.count:
            self.waiting = True
            self.gate.wait(PATIENCE_SECONDS)
        return super().__next__()


def next_in_time(pipeline):
    """Return the next result, None at the end; a batch may be late where the machine is busy."""
    while True:
        try:
            return next(pipeline, None)
        except TimeoutError:
            pass


@contextlib.contextmanager
def ctrl_c():
    """Comes while the block runs."""
    # What a shell starts in the background is born deaf to it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        yield
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)


def host(tree):
    """Arrays of a state on the host."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in jax.tree.leaves(tree)]


def rest_of(pipeline, iterator):
    """Yield the results of `progress` until there is no more."""
    with contextlib.suppress(StopIteration):
        while True:
            yield pipeline.progress(iterator)
