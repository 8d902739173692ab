"""What a replica does on each device's own part of the tables."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from ...tree import reshaped

Kinds = Any
"""How arguments and results relate to the devices of a replica: a tree, a prefix of theirs.

`"whole"`: the same on all of them. `"device"`: another on each, stacked outside along a leading
axis. `"batch"`: split along the leading dimension. A `PartitionSpec` over the axis says more.
"""


def on_shards(
    axis: str | None, fn: Callable[..., Any], *args: Any, kinds: tuple[Kinds, ...], out: Kinds
) -> Any:
    """`fn` of each device's own parts along an axis that the compiler has.

    Args:
      axis: between whose devices the tables of a replica are sharded; None: it is bound already,
        or there is none, and every value is this device's own.
      fn: function of the arguments; in it `axis` is bound.
      *args: of the replica.
      kinds: of the arguments.
      out: of the results.

    Communication: that of `fn`.
    """
    if axis is None:
        return fn(*args)

    kinds = tuple("whole" if x is None else kind for x, kind in zip(args, kinds, strict=True))

    def on_one(*args: Any) -> Any:
        return _each(_stacked, out, fn(*_each(_own, kinds, args)))

    return jax.shard_map(
        on_one,
        in_specs=_specs(kinds, axis),
        out_specs=_specs(out, axis),
        axis_names={axis},
    )(*args)


def _is_kind(x: Any) -> bool:
    return isinstance(x, str | P)


def _each(change: Callable[[Any, Any], Any], kinds: Kinds, tree: Any) -> Any:
    return jax.tree.map(lambda kind, part: change(part, kind), kinds, tree, is_leaf=_is_kind)


def _specs(kinds: Kinds, axis: str) -> Any:
    def spec(kind: str | P) -> P:
        if isinstance(kind, P):
            return kind
        return P() if kind == "whole" else P(axis)

    return jax.tree.map(spec, kinds, is_leaf=_is_kind)


def _own(tree: Any, kind: str | P) -> Any:
    if kind != "device":
        return tree
    return jax.tree.map(lambda x: reshaped(x, x.shape[1:]), tree)


def _stacked(tree: Any, kind: str | P) -> Any:
    if kind != "device":
        return tree
    return jax.tree.map(lambda x: reshaped(x, (1, *x.shape)), tree)
