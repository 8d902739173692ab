"""Exchanges in few bits: what a replica sends, and what replicas remember of what was not sent."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._support.types import PyTree
from ..collectives import mean_in_codec, relative_weight, scaled, total_weight
from ..collectives.codecs import Codec, Half
from ..tree import Buffer, added, at_least_float32
from ._replica_exchange import Exchange, packing_of
from ._transform_states import StatePlacement, stacked, wide_types_on


class Sent(NamedTuple):
    """The memory of exchanges in a codec, in trees like the parameters and at least float32.

    The sum over replicas of what was applied and of `lost` is that of what was displaced.
    """

    lost: PyTree = ()  # what this replica has not sent yet; () without error feedback
    view: PyTree = ()  # from where all replicas measure, equal on all; () if the anchor says it


def first_sent(names: Sequence[str] | None, params: PyTree) -> Any:
    """Return the first `Sent` with these fields, () for none."""

    def first(name: str) -> PyTree:
        wide = jax.tree.map(lambda x: x.astype(at_least_float32(x.dtype)), params)
        return jax.tree.map(jnp.zeros_like, wide) if name == "lost" else wide

    return sent_with(names, first)


def part_to_send(
    displaced: PyTree, lost: PyTree, exchange: Exchange, weight: jax.Array | None
) -> tuple[PyTree, jax.Array | None]:
    """Return what a replica sends: its share of the mean, and what it has not sent before.

    Args:
      displaced: how far this replica has moved, at least float32.
      lost: a tree like it, or () without one.
      exchange: the axes of the replicas.
      weight: () number >= 0, this replica's share in the mean; None weighs all replicas equally. Of
        a replica of weight 0, whatever its values, only `lost` is sent.

    Returns:
      The tree, and whether any replica has a weight above 0, () bool; None without weights.

    Communication: with a weight one all-reduce of 8 bytes over the axes.
    """
    anyone = None
    if weight is not None:
        total = total_weight(weight, exchange.axis_name)
        factor, anyone = relative_weight(weight, total, exchange.axis_name), total.weight > 0
        displaced = jax.tree.map(lambda x: scaled(x, factor), displaced)
    return jax.tree.map(added, displaced, lost) if has_leaves(lost) else displaced, anyone


def mean_of_parts(parts: PyTree, exchange: Exchange, *, role: str) -> tuple[PyTree, PyTree]:
    """Return the mean over replicas of what they send, and what of it this replica has lost.

    Communication: that of `mean_in_codec`, for each flat buffer; see `packing_of`.
    """
    codec, axes, local = exchange.codec, exchange.axis_name, exchange.local_axis_name
    assert codec is not None

    def both(buffer: Buffer, flat: jax.Array) -> tuple[jax.Array, jax.Array]:
        del buffer
        return mean_in_codec(flat, axes, codec, local)

    packing = packing_of(parts, exchange)
    pairs = packing.map(both, packing.pack(parts, role=role))
    return packing.unpack([mean for mean, _ in pairs]), packing.unpack([rest for _, rest in pairs])


def kept(codec: Codec, lost: PyTree) -> PyTree:
    """Return what a codec keeps of what was lost: () without error feedback.

    What is not finite becomes 0, so that one bad update has no lasting effect.
    """
    if not codec.error_feedback:
        return ()
    return jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x)), lost)


def has_leaves(tree: PyTree) -> bool:
    """Return whether a tree is more than ()."""
    return bool(jax.tree.leaves(tree))


def narrowed(owner: str, exchange: Exchange) -> Exchange:
    """Return an exchange that sends parameters themselves, which needs 16 bits.

    Raises:
      ValueError: a codec of fewer bits.
    """
    if exchange.codec is not None and not isinstance(exchange.codec, Half):
        raise ValueError(
            f"{owner}: `codec` must be None, js.codecs.bfloat16() or js.codecs.float16(), since "
            "parameters themselves are sent; those with fewer bits are for js.slowmo, js.diloco "
            f"and js.local_sgd, which send how far replicas have moved; got {exchange.codec!r}."
        )
    return exchange


def names_of_sent(codec: Codec | None, *, has_view: bool) -> list[str] | None:
    """Return which fields of `Sent` a state has, as plain JSON; None without a codec."""
    if codec is None:
        return None
    return ["lost"] * codec.error_feedback + ["view"] * has_view


def carried_sent(
    sent: Any,
    names: Sequence[str] | None,
    params: PyTree,
    new: StatePlacement,
    view: Callable[[], PyTree],
) -> tuple[Any, list[str]]:
    """Return a saved `Sent`, or (), with these fields, and sentences that say what was dropped.

    Args:
      sent: NumPy arrays stacked for `new`.
      names: the fields of the result; None for ().
      params: one copy of the parameters, of which only shapes and dtypes matter.
      new: the placement of the result.
      view: `view()` returns one copy of the field of this name, where nothing is saved.
    """

    def field(name: str) -> PyTree:
        if sent and has_leaves(held := getattr(sent, name)):
            return held
        types = wide_types_on(params, new)
        if name == "lost":
            return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), types)
        return jax.tree.map(lambda x, to: stacked(np.asarray(x, to.dtype), new), view(), types)

    drops = sent and has_leaves(sent.lost) and "lost" not in (names or ())
    return sent_with(names, field), ["What the codec had not sent is dropped."] if drops else []


def sent_with(names: Sequence[str] | None, values: Callable[[str], PyTree]) -> Any:
    """Return a `Sent` with `values(name)` of these fields, () for none."""
    return Sent(**{name: values(name) for name in names}) if names else ()
