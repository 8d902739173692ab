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
        own = _reshaped(args, kinds, lambda x: x.shape[1:])
        return _reshaped(fn(*own), out, lambda x: (1, *x.shape))

    def specs(kinds: Kinds) -> Any:
        known = {"whole": P(), "device": P(axis), "batch": P(axis)}
        return jax.tree.map(
            lambda kind: kind if isinstance(kind, P) else known[kind], kinds, is_leaf=_is_kind
        )

    return jax.shard_map(on_one, in_specs=specs(kinds), out_specs=specs(out), axis_names={axis})(
        *args
    )


def _is_kind(x: Any) -> bool:
    return isinstance(x, str | P)


def _reshaped(tree: Any, kinds: Kinds, shape: Callable[[jax.Array], tuple[int, ...]]) -> Any:
    """`tree`, whose arrays of the kind `"device"` have another shape."""

    def change(kind: str | P, part: Any) -> Any:
        if kind != "device":
            return part
        return jax.tree.map(lambda x: reshaped(x, shape(x)), part)

    return jax.tree.map(change, kinds, tree, is_leaf=_is_kind)
