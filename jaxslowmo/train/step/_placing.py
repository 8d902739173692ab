"""Batches and weights where the programs of a step want them."""

import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh

from ..._typing import AxisName, PyTree
from ...embedding import Embeddings
from ...mesh import AnyMesh
from .._state import Layout
from ..batches import (
    Comparison,
    HostBatch,
    as_arrays,
    lies_there,
    parts_given,
    placed_batch,
    placed_weight,
)
from ._layouts import Layouts


class Placing:
    """Puts batches where they belong.

    Args:
      mesh: of the step.
      axis_name: of its replicas.
      host_batch: what leaves of the host are.
      layouts: of its states.
      embeddings: of the step; ids of the host are looked at before they are used.
    """

    def __init__(
        self,
        mesh: AnyMesh,
        axis_name: AxisName,
        host_batch: HostBatch,
        layouts: Layouts,
        embeddings: Embeddings | None = None,
    ) -> None:
        self._mesh, self._axis_name, self._layouts = mesh, axis_name, layouts
        self._host_batch: HostBatch = host_batch
        self._compare = Comparison(mesh, host_batch)
        self._embeddings = embeddings
        self._looked_at: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._counts: deque[dict[str, Any]] = deque()  # by program, of ids that only devices know

    def compared(
        self, batch: PyTree, weight: Any, layout: Layout, *, check_ids: bool = True
    ) -> tuple[PyTree, jax.Array | None]:
        """A batch that is to run, when processes have compared what they give, and its weight."""
        if weight is None and self._embeddings is None and isinstance(self._mesh, Mesh):
            axes = self._layouts.data_axes(layout)
            if all(lies_there(x, self._mesh, axes) for x in jax.tree.leaves(batch)):
                return batch, None
        batch = as_arrays(batch)
        self._compare(batch, self._layouts.data_axes(layout))
        if self._embeddings is None or not check_ids:
            return self.placed(batch, weight, layout)
        is_known = self._refuse_ids(self._embeddings, batch, layout)
        placed, weight = self.placed(batch, weight, layout)
        self._note_known(batch, placed, of_host=is_known)
        return placed, weight

    def copied(self, batch: PyTree) -> PyTree:
        """A batch for virtual replicas, of which placing takes no note, on their one device."""
        there = jax.device_put(batch)
        self._note_known(batch, there, of_host=False)
        return there

    def _note_known(self, batch: PyTree, placed: PyTree, *, of_host: bool) -> None:
        """Leaves whose ids were looked at stay so where they are placed, as those of the host."""
        for given, x in zip(jax.tree.leaves(batch), jax.tree.leaves(placed), strict=True):
            was_known = self._looked_at.get(id(given)) is given
            if was_known or (of_host and isinstance(given, np.ndarray)):
                self._looked_at[id(x)] = x

    def ran(self, batch: PyTree, metrics: Mapping[str, Any]) -> None:
        """Take note of what a program counted in a batch; of ids that only devices have known.

        `refuse_counted` looks at that.
        """
        if self._embeddings is None:
            return
        is_known = all(self._looked_at.get(id(x)) is x for x in jax.tree.leaves(batch))
        counts = {n: x for n, x in metrics.items() if n.startswith("embeddings/")}
        self._counts.append({} if is_known else counts)

    def refuse_counted(self, num_running: int = 1) -> None:
        """Raise `ValueError` where a program has counted ids that are in no table.

        Args:
          num_running: the last programs, which may be at work still and are not waited for.
        """
        while self._embeddings is not None and len(self._counts) > num_running:
            counts = self._counts.popleft()
            self._embeddings.refuse({name: count_here(x) for name, x in counts.items()})

    def _refuse_ids(self, embeddings: Embeddings, batch: PyTree, layout: Layout) -> bool:
        """Raise `ValueError` for ids of the host that are in no table.

        Returns:
          Whether all ids were there to look at: also of arrays of the host `inputs` may make some
          of a device.
        """
        host = [x for x in jax.tree.leaves(batch) if isinstance(x, np.ndarray)]
        if not host:
            return False
        axes = self._layouts.data_axes(layout)
        parts = parts_given(host[0], self._mesh, axes, self._host_batch)
        bags = embeddings.bags_of(batch)
        embeddings.check(bags, num_parts=parts)
        return all(isinstance(own.ids, np.ndarray) for own in bags.values())

    def placed(self, batch: PyTree, weight: Any, layout: Layout) -> tuple[PyTree, jax.Array | None]:
        """A batch and its weight on the devices; shapes alone stay shapes."""
        axes = self._layouts.data_axes(layout)
        return (
            placed_batch(batch, self._mesh, axes, self._host_batch),
            placed_weight(weight, self._mesh, self._axis_name, self._host_batch),
        )

    def share(self, batch: PyTree, layout: Layout) -> PyTree:
        """Types of what one device has of a batch of arrays."""
        axes = self._layouts.data_axes(layout)

        def share(x: Any) -> jax.ShapeDtypeStruct:
            parts = parts_given(x, self._mesh, axes, self._host_batch)
            return jax.ShapeDtypeStruct((x.shape[0] // parts, *x.shape[1:]), jnp.result_type(x))

        return jax.tree.map(share, batch)


def count_here(count: Any) -> int:
    """The sum of a count, (replicas,), over the replicas of this process; waits for it.

    0 while it is traced.
    """
    if isinstance(count, Tracer):
        return 0
    if not isinstance(count, jax.Array) or count.is_fully_addressable:
        return int(np.sum(count))
    # Devices of one replica hold the same part.
    parts = {str(shard.index): shard.data for shard in count.addressable_shards}
    return int(sum(np.sum(np.asarray(part)) for part in parts.values()))
