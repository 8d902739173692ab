"""Facts about named axes at trace time, and values that are equal or differ along them.

`shard_map(check_vma=True)`, the default, types every value with the axes it varies over; under
`vmap`, `pmap` and `check_vma=False` no value carries such a type. The helpers here do the right
thing, often nothing, in each of these.
"""

from collections.abc import Collection, Hashable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import core, lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from .._support.types import AxisName, PyTree


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


def require_axes(owner: str, argument: str, axis_name: AxisName, more: str = "") -> None:
    """Raise `ValueError` if any name in `axis_name` is not bound here, saying which are.

    A misspelt axis would otherwise die in a collective with an empty AssertionError. `more` is what
    else to say.
    """
    for name in axis_names(axis_name):
        if not is_bound(name):
            bound = ", ".join(repr(a) for a in _bound_axes()) or "none"
            raise ValueError(
                f"{owner}: `{argument}` {name!r} is not a mapped axis here (bound: {bound}). Call "
                "it inside shard_map, pmap or vmap(axis_name=...) over that axis; states are made "
                "by `js.init(tx, stacked_params, mesh=mesh, axis_name=...)`."
                f"{more and f' {more}'}"
            )


def is_bound(name: str) -> bool:
    """Whether `name` is a mapped axis here."""
    try:
        lax.axis_size(name)
    except NameError:
        return False
    return True


def axis_size(axis_name: AxisName) -> int:
    """Number of positions along `axis_name`; product over a tuple."""
    return lax.axis_size(axis_name)


def varying_axes(x: Any) -> frozenset[str]:
    """Axes that an array or type `x` is typed as varying over; empty where nothing is tracked."""
    is_type = isinstance(x, jax.ShapeDtypeStruct | core.ShapedArray)
    aval = x if is_type else jax.typeof(x)
    tracked = getattr(aval, "manual_axis_type", None)
    return frozenset(tracked.varying if tracked is not None else getattr(aval, "vma", ()))


def axes_of(tree: PyTree) -> frozenset[str]:
    """Axes that some leaf is typed as varying over."""
    return frozenset[str]().union(*map(varying_axes, jax.tree.leaves(tree)))


def checks_varying(name: str) -> bool:
    """Whether values here are typed with whether they vary over axis `name`."""
    return name in varying_axes(lax.axis_index(name))


def vary_over(tree: PyTree, axes: Iterable[str]) -> PyTree:
    """Mark every leaf as varying over `axes`, where that is tracked and not yet so."""
    wanted = tuple(axes)
    leaves, treedef = jax.tree.flatten(tree)
    lacking = [{a for a in wanted if a not in has} for has in map(varying_axes, leaves)]
    # Asked once per axis and tree, and not at all where nothing is lacking: asking is an equation.
    tracked = {a for a in wanted if any(a in each for each in lacking) and checks_varying(a)}
    return treedef.unflatten(
        [cast_varying(x, each & tracked) for x, each in zip(leaves, lacking, strict=True)]
    )


def cast_varying(x: jax.Array, axes: Collection[str]) -> jax.Array:
    """`x`, which does not vary over any of `axes` yet, as varying there; types must be tracked."""
    # In an order that does not change from process to process, as that of a set does.
    return lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x


def settle(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """`x`, equal over axes of size 1 as it is, typed so too.

    Communication: none (a sum over one position, where that is tracked).
    """
    tracked = tuple(a for a in axis_names(axis_name) if a in varying_axes(x))
    return lax.psum(x, tracked) if tracked else x


def match_varying(tree: PyTree, like: PyTree) -> PyTree:
    """Mark each leaf of `tree` as varying at least over the axes its partner in `like` does."""
    # What a partner varies over is tracked.
    return jax.tree.map(
        lambda x, ref: cast_varying(x, varying_axes(ref) - varying_axes(x)), tree, like
    )


def uniform(value: jax.Array, axes: Iterable[str]) -> jax.Array:
    """A predicate or index that is equal along `axes`, typed so that `lax.cond` stays one.

    Under `vmap` a cond with a batched predicate becomes a select that computes both branches. The
    largest value along those of `axes` that `vmap` maps is unbatched there. A further `vmap`, over
    runs whose values differ, still makes a select, which is what is right for them.

    Communication: none; along axes of devices the value is taken as it is.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    mapped = tuple(sorted(a for a in axes if a not in manual))
    if not mapped:
        return value
    largest = lax.pmax(value.astype(jnp.int32), mapped)
    return largest > 0 if value.dtype == jnp.bool_ else largest


def typed_specs(tree: PyTree) -> PyTree | None:
    """A `PartitionSpec` per leaf over Explicit axes, whose layout is part of the types.

    None where nothing is sharded over one.
    """
    mesh = jax.sharding.get_abstract_mesh()
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    inside = frozenset(name for name, kind in types if kind == AxisType.Explicit)
    if not inside:
        return None
    specs = jax.tree.map(lambda x: only_over(jax.typeof(x).sharding.spec, inside), tree)
    return specs if any(spec != P() for spec in jax.tree.leaves(specs, is_leaf=_is_spec)) else None


def specs_key(specs: PyTree | None) -> Hashable:
    """What tells two trees of specs apart, for dicts."""
    leaves, treedef = jax.tree.flatten(specs, is_leaf=_is_spec)
    return treedef, tuple(leaves)


def specs_over(specs: PyTree, axes: frozenset[str]) -> PyTree:
    """Every spec of a tree without other axes than these."""
    return jax.tree.map(lambda spec: only_over(spec, axes), specs, is_leaf=_is_spec)


def specs_of_leaves(specs: PyTree | None, tree: PyTree) -> tuple[P, ...]:
    """A spec for each leaf of `tree`, of specs that are a prefix of it; None is whole leaves."""
    whole = jax.tree.broadcast(P() if specs is None else specs, tree, is_leaf=_is_spec)
    return tuple(jax.tree.leaves(whole, is_leaf=_is_spec))


def _is_spec(x: Any) -> bool:
    return isinstance(x, P)


def only_over(spec: Any, axes: frozenset[str]) -> P:
    """`spec` without other axes, and without what is whole at its end."""
    entries: list[Any] = []
    for entry in spec:
        names = tuple(n for n in axis_names(entry or ()) if n in axes)
        entries.append(names[0] if len(names) == 1 else names or None)
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)


def between_cpu_processes(axis_name: AxisName) -> bool:
    """Whether collectives over the axis run between processes on CPU: some need another form there.

    False for what is compiled for other platforms, for the devices of one process, and under vmap,
    where nothing is sent: there the compiler's own collectives are what to use.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if not all(name in manual for name in axis_names(axis_name)):
        return False
    return jax.default_backend() == "cpu" and jax.process_count() > 1


def from_first(tree: PyTree, axis_name: AxisName) -> PyTree:
    """Every leaf as position 0 of `axis_name` has it; any dtype, PRNG keys included.

    Communication: one all-reduce of each leaf over `axis_name` (all others add zeros); none where
      its size is 1.
    """

    def first(x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            implementation = jax.random.key_impl(x)
            return jax.random.wrap_key_data(first(jax.random.key_data(x)), impl=implementation)
        if axis_size(axis_name) == 1:
            return settle(x, axis_name)
        mine = jnp.where(lax.axis_index(axis_name) == 0, x, jnp.zeros_like(x))
        return lax.psum(mine, axis_name).astype(x.dtype)

    return jax.tree.map(first, tree)


def own_keys(tree: PyTree, axis_name: AxisName) -> PyTree:
    """`tree` with keys of its own at every position of `axis_name`; position 0 keeps those given.

    Typed keys alone (`jax.random.key`): of others nothing tells that they are keys.

    Communication: none.
    """

    def own(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x
        for name in axis_names(axis_name):
            x = numbered_key(x, lax.axis_index(name))
        return x

    return jax.tree.map(own, tree)


def numbered_key(keys: jax.Array, number: jax.Array) -> jax.Array:
    """Keys of any shape with a number folded in; as they are for number 0."""
    folded = jax.vmap(lambda key: jax.random.fold_in(key, number))(keys.reshape(-1))
    data = jnp.where(
        number == 0, jax.random.key_data(keys), jax.random.key_data(folded.reshape(keys.shape))
    )
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(keys))
