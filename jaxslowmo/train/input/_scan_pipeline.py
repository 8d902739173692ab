"""A pipeline that runs several updates in one program, by `step.scan`."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._support.types import PyTree
from .._batches import as_arrays
from ._loader import Batch, SharedIterator, copy_leaf, shared_iterator
from ._train_pipeline import StepResult, TrainPipeline


class _Batch(NamedTuple):
    """A batch as leaves.

    Attributes:
      leaves: its leaves, arrays of NumPy or jax.
      types: its structure, and shape and dtype of each leaf; equal where batches can be stacked.
      position: what the iterator's `get_state()` returned right after the batch.
    """

    leaves: list[Any]
    types: tuple[Any, list[Any]]
    position: Any


class ScanBatches(SharedIterator):
    """The batches of one call after the other, of equal structure and shapes.

    A call gets fewer batches than it wants at their end, before an exception of the iterator, which
    then takes the place of the next call, and before a batch of another shape.

    Args:
      iterator: the iterator of batches.
      length: `length(done)`: the number of batches of a call after `done` updates; 0: no more.
      done: number of updates before the first call.
    """

    def __init__(self, iterator: Iterator[PyTree], length: Callable[[int], int], done: int) -> None:
        super().__init__(iterator)
        self._batches, self._length, self._done = shared_iterator(iterator), length, done
        self._last = self._batches.position()
        # What was taken for one call and belongs to the next: at most one item.
        self._pending: deque[_Batch | Exception | None] = deque()

    def take(self, *, waits: bool = False) -> Batch | None:
        """Return structure and lists of leaves of the next call's batches; None after the last."""
        del waits  # a batch always waits for the others of its call
        call: list[list[Any]] = []
        types: Any = None
        with self._lock:
            length = self._length(self._done)
            while len(call) < length:
                item = self._next_item()
                if isinstance(item, _Batch) and types in (None, item.types):
                    call.append(item.leaves)
                    types, self._last = item.types, item.position
                    continue
                if call:
                    self._pending.append(item)
                elif isinstance(item, Exception):
                    raise item
                break
            self._done += len(call)
            return Batch((types[0], call), None, self._last) if call else None

    def position(self) -> Any:
        """Return the iterator's position after the last call that was taken."""
        return self._last

    def _next_item(self) -> "_Batch | Exception | None":
        if self._pending:
            return self._pending.popleft()
        try:
            item = self._batches.take()
            if item is None:
                return None
            if item.weight is not None:
                raise ValueError(
                    "`steps_per_call`: a js.train.WeightedBatch, as of js.train.uneven_batches, "
                    "has weights of its own, and the updates of a call have one weight for all: "
                    "leave `steps_per_call` out, or pass equal batches."
                )
            leaves, structure = jax.tree.flatten(item.batch)
            if not all(isinstance(x, jax.Array) for x in leaves):
                # The iterator may fill the arrays again before the call has all its batches.
                leaves = as_arrays([copy_leaf(x) for x in leaves])
            types = [x.aval if isinstance(x, jax.Array) else (x.shape, x.dtype) for x in leaves]
            return _Batch(leaves, (structure, types), item.position)
        except Exception as error:  # raised by the call that begins with it
            return error


class ScanPipeline(TrainPipeline):
    """A pipeline of calls of `step.scan`, each of several batches.

    Args:
      step: a step with `scan(state, batches)`.
      state: initial state.
      batches: the batches of each call.
      depth: number of calls whose batches are loaded beyond the one in use.
    """

    def __init__(self, step: Any, state: PyTree, batches: ScanBatches, *, depth: int) -> None:
        super().__init__(step, state, depth=depth, stages=())
        self._place = None  # `scan` places the batches
        self._loader.source = batches
        self.position = batches.position()

    def _prepare_batch(self, batch: PyTree, weight: Any, position: Any) -> Batch:
        # In the thread that trains: a program that stacks arrays of several devices must not come
        # between the steps in another order on each process.
        structure, rows = batch
        stacked = [_stack_leaves(column) for column in zip(*rows, strict=True)]
        return Batch((len(rows), structure.unflatten(stacked)), weight, position)

    def _run_step(self, batch: Batch) -> StepResult:
        count, batches = batch.batch
        phase = self._step.next_phase(self.state, count - 1)
        self.state, metrics = self._step.scan(self.state, batches)
        self.position = batch.position
        self._num_updates += count
        return StepResult(
            *(self._num_updates, self.state, metrics, phase),
            position=batch.position,
            num_updates=count,
        )


def _stack_leaves(leaves: tuple[Any, ...]) -> Any:
    """Return the leaves along a new first dimension: of the host, unless they are on devices."""
    return _stack_on_devices(leaves) if isinstance(leaves[0], jax.Array) else np.stack(leaves)


@jax.jit
def _stack_on_devices(leaves: tuple[jax.Array, ...]) -> jax.Array:
    return jnp.stack(leaves)
