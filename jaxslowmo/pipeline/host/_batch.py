"""A step's batch, which waits in host memory until a stage needs a microbatch of it."""

from typing import Any

import jax
import numpy as np

from ..._typing import PyTree
from ...tree import leaf_names
from ._programs import Microbatches
from ._submeshes import SubMesh


class HostBatch:
    """Leaves in host memory, (replicas * local batch, ...), cut into microbatches.

    A replica's local batch is cut into microbatches first, and each of those over the data shards.

    Raises:
      ValueError: no leaves, leaves without or with unequal leading dimensions, one that does not
        divide by replicas, shards and microbatches.
    """

    def __init__(self, batch: PyTree, num_microbatches: int, at: SubMesh, rng: Any) -> None:
        self._leaves = [np.asarray(x) for x in jax.tree.leaves(batch)]
        self._tree, self._rng = jax.tree.structure(batch), rng
        self._replicas, self._count = at.replicas, num_microbatches
        sizes = {x.shape[:1] for x in self._leaves}
        if len(sizes) != 1 or sizes == {()}:
            shapes = zip(leaf_names(batch), map(np.shape, self._leaves), strict=True)
            raise ValueError(
                "HostPipeline: leaves of `batch` must have one leading dimension, got "
                f"{', '.join(f'{name} {shape}' for name, shape in shapes) or 'no leaves'}."
            )
        size = sizes.pop()[0]
        parts = at.positions * num_microbatches
        if size % parts or not size:
            raise ValueError(
                f"HostPipeline: the {size} examples of `batch` must divide by {parts}: "
                f"{at.replicas} replicas * {at.shards} data shards * {num_microbatches} "
                "microbatches."
            )
        self._each = size // parts

    @property
    def types(self) -> Microbatches:
        """Of one device's part of a microbatch."""
        types = [
            jax.ShapeDtypeStruct((self._each, *x.shape[1:]), jax.dtypes.canonicalize_dtype(x.dtype))
            for x in self._leaves
        ]
        return Microbatches(tuple(types), self._tree, self._rng is not None)

    def put(self, m: int, reads: tuple[bool, ...], at: SubMesh) -> tuple[list[jax.Array], Any]:
        """Microbatch `m` on the devices `at`, of those leaves that are read there; and its key."""
        rows = [self._rows(x, m) for x, read in zip(self._leaves, reads, strict=True) if read]
        key = None if self._rng is None else jax.random.fold_in(self._rng, m)
        return [jax.device_put(x, at.split) for x in rows], jax.device_put(key, at.whole)

    def _rows(self, leaf: np.ndarray, m: int) -> np.ndarray:
        by_microbatch = leaf.reshape(self._replicas, self._count, -1, *leaf.shape[1:])
        return by_microbatch[:, m].reshape(-1, *leaf.shape[1:])
