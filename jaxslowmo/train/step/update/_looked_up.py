"""Batches that are looked up in tables, and the gradients of what was found."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax

from ...._typing import PyTree
from ....embedding import Embeddings, Requests
from ....mesh import axis_size
from ._loss import WithVectors
from ._rows import Rows


class Requested(NamedTuple):
    """A device's part of a batch, and what it asked for.

    Attributes:
      batch: as the step was given it.
      requests: what it asks the tables for, and is asked by others.
      vectors: by table, the rows that it asked for.
    """

    batch: PyTree
    requests: Requests
    vectors: PyTree


@dataclass(frozen=True)
class LookedUp:
    """A batch `WithVectors`, and the way back.

    Attributes:
      batch: as the loss function sees it.
      pull: from gradients of what was looked up to those of rows, and of the dense parameters.
      send_back: from gradients of rows asked for to those of rows held.
    """

    batch: WithVectors
    pull: Callable[[PyTree], tuple[PyTree, PyTree]]
    send_back: Callable[[PyTree], Rows]

    def gradients(self, grads: PyTree, own: PyTree) -> tuple[PyTree, Rows]:
        """Those of the dense parameters and of the rows that this device holds.

        Args:
          grads: of the dense parameters, of the loss.
          own: of what was looked up.

        Communication: per table one all-to-all of the rows that were asked for.
        """
        of_vectors, of_dense = self.pull(own)
        # Weights by position are parameters, too, and are used before the loss.
        grads = jax.tree.map(lambda g, more: g + more, grads, of_dense)
        return grads, self.send_back(of_vectors)


def pooled(embeddings: Embeddings, requested: Requested, params: PyTree) -> LookedUp:
    """What a batch looks up, from the rows that it asked for.

    Args:
      embeddings: the tables.
      requested: a batch.
      params: the dense ones; varying over the axes over which gradients are averaged later.

    Communication: none.
    """
    batch, requests, vectors = requested

    def of(vectors: PyTree, params: PyTree) -> PyTree:
        return embeddings.pooled(vectors, requests, params)

    # A program that has the rows already computes just what one does that looks them up first.
    vectors = jax.lax.optimization_barrier(vectors)
    embedded, pull = jax.vjp(of, vectors, params)
    axis = embeddings.axis_name
    devices = 1 if axis is None else axis_size(axis)

    def send_back(grads: PyTree) -> Rows:
        # The loss of a replica is the mean of its devices' losses.
        scaled = jax.tree.map(lambda g: g / devices, grads)
        return embeddings.send_back(scaled, requests)

    return LookedUp(WithVectors(batch, embedded), pull, send_back)
