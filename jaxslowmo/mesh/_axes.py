"""Facts about named axes at trace time: bound or not, size, and which values vary over them.

`shard_map(check_vma=True)`, the default, types every value with the axes it varies over; under
`vmap`, `pmap` and `check_vma=False` no value carries such a type. The helpers here do the right
thing, often nothing, in each of these.
"""

from collections.abc import Iterable

import jax
from jax import custom_batching, lax

from .._typing import AxisName, PyTree


def axis_names(axis_name: AxisName) -> tuple[str, ...]:
    """`axis_name` as a tuple of names."""
    return axis_name if isinstance(axis_name, tuple) else (axis_name,)


def _bound_axes() -> list[str]:
    """Names of the axes bound here, for messages."""
    try:  # No public way lists the axes that vmap binds.
        from jax._src.core import get_axis_env

        return [str(name) for name in get_axis_env().axis_sizes]
    except (ImportError, AttributeError):
        return [str(name) for name in jax.sharding.get_abstract_mesh().manual_axes]


def require_axes(owner: str, argument: str, axis_name: AxisName) -> None:
    """Raise `ValueError` if any name in `axis_name` is not bound here, saying which are.

    A misspelt axis would otherwise die in a collective with an empty AssertionError.
    """
    for name in axis_names(axis_name):
        try:
            lax.axis_size(name)
        except NameError:
            bound = ", ".join(repr(a) for a in _bound_axes()) or "none"
            raise ValueError(
                f"{owner}: `{argument}` {name!r} is not a mapped axis here (bound: {bound}). Call "
                "it inside shard_map, pmap or vmap(axis_name=...) over that axis; states are made "
                "by `js.init(tx, stacked_params, mesh=mesh, axis_name=...)`."
            ) from None


def axis_size(axis_name: AxisName) -> int:
    """Number of positions along `axis_name`; product over a tuple."""
    return lax.axis_size(axis_name)


def varying_axes(x: jax.Array | jax.ShapeDtypeStruct) -> frozenset[str]:
    """Axes that the type of `x` says it varies over; empty where nothing is tracked."""
    aval = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    tracked = getattr(aval, "manual_axis_type", None)
    return frozenset(tracked.varying if tracked is not None else getattr(aval, "vma", ()))


def checks_varying(name: str) -> bool:
    """Whether values here are typed with whether they vary over axis `name`."""
    return name in varying_axes(lax.axis_index(name))


def vary_over(tree: PyTree, axes: Iterable[str]) -> PyTree:
    """Mark every leaf as varying over `axes`, where that is tracked and not yet so."""
    tracked = [a for a in axes if checks_varying(a)]

    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(a for a in tracked if a not in varying_axes(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def settle(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """`x`, equal over axes of size 1 as it is, typed so too.

    Communication: none (a sum over one position, where that is tracked).
    """
    tracked = tuple(a for a in axis_names(axis_name) if a in varying_axes(x))
    return lax.psum(x, tracked) if tracked else x


def match_varying(tree: PyTree, like: PyTree) -> PyTree:
    """Mark each leaf of `tree` as varying at least over the axes its partner in `like` does."""
    return jax.tree.map(lambda x, ref: vary_over(x, varying_axes(ref)), tree, like)


@custom_batching.custom_vmap
def uniform(predicate: jax.Array) -> jax.Array:
    """Identity on a predicate that is equal on all replicas, which keeps `lax.cond` a cond.

    Under `vmap` a cond with a batched predicate becomes a select that computes both branches.
    Replicas count alike, so the batching rule takes the first one's value, unbatched. So a further
    `vmap` over runs whose counters differ is not possible.
    """
    return predicate


@uniform.def_vmap
def _uniform_vmap(axis_size: int, in_batched: list[bool], predicate: jax.Array):
    del axis_size
    # Again through `uniform`, so that the next vmap out does the same.
    return uniform(predicate[0] if in_batched[0] else predicate), False
