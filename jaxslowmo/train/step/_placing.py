"""Batches and weights where the programs of a step want them."""

from typing import Any

import jax
import jax.numpy as jnp

from ..._typing import AxisName, PyTree
from ...mesh import AnyMesh
from .._state import Layout
from ..batches import (
    Comparison,
    HostBatch,
    as_arrays,
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
    """

    def __init__(
        self, mesh: AnyMesh, axis_name: AxisName, host_batch: HostBatch, layouts: Layouts
    ) -> None:
        self._mesh, self._axis_name, self._layouts = mesh, axis_name, layouts
        self._host_batch: HostBatch = host_batch
        self._compare = Comparison(mesh, host_batch)

    def compared(
        self, batch: PyTree, weight: Any, layout: Layout
    ) -> tuple[PyTree, jax.Array | None]:
        """A batch that is to run, when processes have compared what they give, and its weight."""
        batch = as_arrays(batch)
        self._compare(batch, self._layouts.data_axes(layout))
        return self.placed(batch, weight, layout)

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
