"""Exchanges in few bits: what a replica sends, and what replicas remember of what was not sent."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._support.checks import ArgumentError
from .._support.types import PyTree
from ..collectives import scale
from ..collectives.codecs import Codec, Half
from ..transform import ReplicaGroup
from ..tree import add, at_least_float32


class ErrorFeedback(NamedTuple):
    """The memory of exchanges in a codec, in trees like the parameters and at least float32.

    Summed over replicas, the displacements that were applied and `residual` are all displacements.
    """

    residual: PyTree = ()  # what this replica has not sent yet; () without error feedback
    reference: PyTree = ()  # from where all replicas measure, equal on all; (): the anchor


def first_memory(codec: Codec | None, params: PyTree, *, has_reference: bool) -> Any:
    """Return the first `ErrorFeedback` of a codec; () without a codec."""
    if codec is None:
        return ()
    wide = jax.tree.map(lambda x: x.astype(at_least_float32(x.dtype)), params)
    residual = jax.tree.map(jnp.zeros_like, wide) if codec.error_feedback else ()
    return ErrorFeedback(residual, wide if has_reference else ())


def part_to_send(
    displaced: PyTree, residual: PyTree, replicas: ReplicaGroup, weight: jax.Array | None
) -> tuple[PyTree, jax.Array | None]:
    """Return what a replica sends: its share of the mean, and what it has not sent before.

    Args:
      displaced: how far this replica has moved, at least float32.
      residual: a tree like it, or () without one.
      replicas: the replicas that exchange.
      weight: () number >= 0, this replica's share in the mean; None weighs all replicas equally. Of
        a replica of weight 0, whatever its values, only `residual` is sent.

    Returns:
      The tree, and whether any replica has a weight above 0, () bool; None without weights.

    Communication: with a weight one all-reduce of 8 bytes over the axes.
    """
    factor, anyone = replicas.shares(weight)
    if factor is not None:
        displaced = jax.tree.map(lambda x: scale(x, factor), displaced)
    return jax.tree.map(add, displaced, residual) if has_leaves(residual) else displaced, anyone


def next_residual(codec: Codec, lost: PyTree) -> PyTree:
    """Return the residual after an exchange, of what it lost: () without error feedback.

    What is not finite becomes 0, so that one bad update has no lasting effect.
    """
    if not codec.error_feedback:
        return ()
    return jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x)), lost)


def has_leaves(tree: PyTree) -> bool:
    """Return whether a tree is more than ()."""
    return bool(jax.tree.leaves(tree))


def check_sends_parameters(owner: str, codec: Codec | None) -> None:
    """Raise `ValueError` for a codec in which parameters themselves cannot be sent."""
    if codec is not None and not isinstance(codec, Half):
        raise ArgumentError(
            "codec",
            f"{owner}: `codec` must be None, js.codecs.bfloat16() or js.codecs.float16(), since "
            f"parameters themselves are sent, which others are too coarse for; got {codec!r}.",
        )
