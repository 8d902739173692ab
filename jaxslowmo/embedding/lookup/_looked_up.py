"""Batches that are looked up in tables, and the gradients of what was found."""

from collections.abc import Callable
from typing import Any

import jax

from ..._typing import PyTree
from ...mesh import axis_size
from ...sparse import Rows
from ...transform import isolated
from .._embeddings import Embeddings
from ._asked import Requested, WithVectors


def differentiated(
    embeddings: Embeddings,
    requested: Requested,
    params: PyTree,
    compute: Callable[..., tuple[Any, PyTree, PyTree]],
    *operands: PyTree,
) -> tuple[Any, PyTree, Rows, WithVectors]:
    """What a batch gives that is looked up in tables.

    Args:
      embeddings: the tables.
      requested: a batch.
      params: the dense ones; varying over the axes over which gradients are averaged later.
      compute: of these, a batch and the operands: results, gradients, and those of what was looked
        up.
      *operands: of `compute`.

    Returns:
      The results; gradients of the dense parameters, and of the rows that this device holds; the
      batch as it was given to `compute`.

    Communication: per table one all-to-all of the rows that were asked for.
    """
    requests = requested.requests

    def own(
        requested: Requested, params: PyTree, *operands: PyTree
    ) -> tuple[Any, PyTree, PyTree, WithVectors]:
        batch, pull = pooled(embeddings, requested, params)
        results, grads, of_found = compute(params, batch, *operands)
        of_vectors, of_dense = pull(of_found)
        # Weights by position are parameters, too, and are used before the loss.
        grads = jax.tree.map(lambda g, more: g + more, grads, of_dense)
        return results, grads, of_vectors, batch

    some = next(iter(requested.vectors.values()))
    results, grads, of_vectors, batch = isolated(own, some, requested, params, *operands)
    axis = embeddings.axis_name
    devices = 1 if axis is None else axis_size(axis)
    # The loss of a replica is the mean of its devices' losses.
    scaled = jax.tree.map(lambda g: g / devices, of_vectors)
    return results, grads, embeddings.send_back(scaled, requests), batch


def pooled(
    embeddings: Embeddings, requested: Requested, params: PyTree
) -> tuple[WithVectors, Callable[[PyTree], tuple[PyTree, PyTree]]]:
    """A batch with what it looks up, from the rows that it asked for, and the way back.

    That leads from gradients of what was looked up to those of the rows and of `params`.

    Communication: none.
    """
    batch, requests, vectors, *_ = requested

    def of(vectors: PyTree, params: PyTree) -> PyTree:
        return embeddings.pooled(vectors, requests, params)

    embedded, pull = jax.vjp(of, vectors, params)
    return WithVectors(batch, embedded), pull
