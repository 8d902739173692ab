"""Facts about named axes at trace time, and values that are equal or differ along them.

`shard_map(check_vma=True)`, the default, types every value with the axes it varies over; under
`vmap`, `pmap` and `check_vma=False` no value carries such a type. The functions here work in all
of these cases, and often have nothing to do.
"""

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from .._support.checks import ArgumentError
from .._support.private_jax import mapped_axis_sizes, spmd_axes
from .._support.types import AxisName, PyTree, axis_names, checks_varying, varying_axes


def require_axes(owner: str, argument: str, axis_name: AxisName, more: str = "") -> None:
    """Raise `ValueError` that lists the bound axes if any name in `axis_name` is not bound.

    A misspelt axis would otherwise fail in a collective with an empty AssertionError. `more` is
    appended to the message.
    """
    for name in axis_names(axis_name):
        if not is_bound(name):
            bound = ", ".join(repr(str(a)) for a in mapped_axis_sizes()) or "none"
            raise ArgumentError(
                argument,
                f"{owner}: `{argument}` {name!r} is not a mapped axis here (bound: {bound}): map "
                f"it by shard_map, pmap or vmap; `js.init` makes states.{more and f' {more}'}",
            )


def is_bound(name: str) -> bool:
    """Return whether `name` is a mapped axis at this point of the trace."""
    return name in mapped_axis_sizes()


def is_spmd(axis_name: AxisName) -> bool:
    """Return whether the axis is one of `vmap(spmd_axis_name=...)`, whose leaves are sharded."""
    names = set(axis_names(axis_name)) - set(jax.sharding.get_abstract_mesh().manual_axes)
    return not spmd_axes().isdisjoint(names)


def axis_size(axis_name: AxisName) -> int:
    """Return the number of positions along `axis_name`: the product of sizes for a tuple."""
    return lax.axis_size(axis_name)


def cast_varying(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """Return `x` typed as varying over these tracked axes, too."""
    # Sorted, because the order of a set differs between processes and all need the same program.
    missing = tuple(sorted(axes - varying_axes(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def vary_over(tree: PyTree, axes: Iterable[str]) -> PyTree:
    """Return `tree` with every leaf typed as varying over those of `axes` that are tracked."""
    tracked = frozenset(filter(checks_varying, axes))
    return jax.tree.map(lambda x: cast_varying(x, tracked), tree) if tracked else tree


def match_varying(tree: PyTree, like: PyTree) -> PyTree:
    """Return `tree` with each leaf typed as varying over the axes that its partner varies over."""
    return jax.tree.map(lambda x, ref: cast_varying(x, varying_axes(ref)), tree, like)


def sum_over(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """Return the sum of `x` over `axis_name`, typed as equal over it.

    Communication: one all-reduce of `x`; none if the axis has size 1, or `x` no element.
    """
    return _typed_reduction(lax.psum, x, axis_names(axis_name))


def max_over(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """Return the maximum of `x` over `axis_name`, typed as equal over it.

    Communication: as of `sum_over`.
    """
    return _typed_reduction(lax.pmax, x, axis_names(axis_name))


def _typed_reduction(reduce: Callable[..., Any], x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    typed = tuple(name for name in names if name in varying_axes(x))
    if axis_size(names) == 1 or x.size == 0:
        # It is equal already, and reducing it with nothing else changes the type alone.
        return reduce(x, typed) if typed else x
    # jax refuses a value that is typed as varying over some of the axes.
    return reduce(vary_over(x, names) if typed else x, names)


def uniform(value: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Return a predicate or index, equal along `axes`, in a type for which `lax.cond` stays a cond.

    Under `vmap` a cond with a batched predicate becomes a select that computes both branches. The
    maximum along those of `axes` that `vmap` maps is not batched. An outer `vmap` over runs whose
    values differ still makes a select, as it must.

    Communication: none; along axes of devices the value is taken as it is.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    mapped = tuple(sorted(a for a in axes if a not in manual and is_bound(a)))
    if not mapped:
        return value
    largest = lax.pmax(value.astype(jnp.int32), mapped)
    return largest > 0 if value.dtype == jnp.bool_ else largest


def typed_specs(tree: PyTree) -> PyTree | None:
    """Return a `PartitionSpec` per leaf over the Explicit axes, read from the leaves' types.

    None where no leaf is sharded over such an axis.
    """
    inside = frozenset(jax.sharding.get_abstract_mesh().explicit_axes)
    if not inside:
        return None
    specs = jax.tree.map(lambda x: restrict_spec(jax.typeof(x).sharding.spec, inside), tree)
    return specs if any(spec != P() for spec in jax.tree.leaves(specs)) else None


def specs_key(specs: PyTree | None) -> Hashable:
    """Return a dictionary key that is equal for equal trees of specs."""
    leaves, treedef = jax.tree.flatten(specs)
    return treedef, tuple(leaves)


def leaf_specs(specs: PyTree | None, tree: PyTree) -> tuple[P, ...]:
    """Return a spec for each leaf of `tree`; `specs` is a prefix of it, None for whole leaves."""
    return tuple(jax.tree.leaves(jax.tree.broadcast(P() if specs is None else specs, tree)))


def restrict_spec(spec: Any, axes: frozenset[str]) -> P:
    """Return `spec` restricted to `axes`, without trailing entries that split nothing."""
    entries: list[Any] = []
    for entry in spec:
        names = tuple(n for n in axis_names(entry or ()) if n in axes)
        entries.append(names[0] if len(names) == 1 else names or None)
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)


def is_device_axis(axis_name: AxisName) -> bool:
    """Return whether the axis is one of devices (shard_map, pmap), as opposed to vmap."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return all(name in manual for name in axis_names(axis_name))


def is_between_cpu_processes(axis_name: AxisName) -> bool:
    """Return whether collectives over the axis run between processes on CPU.

    Some collectives need another form there. False on other platforms, for the devices of one
    process, and under vmap, where nothing is sent: XLA's collectives are right for these.
    """
    is_multi_process_cpu = jax.default_backend() == "cpu" and jax.process_count() > 1
    return is_multi_process_cpu and is_device_axis(axis_name)


def is_on_tpu(axis_name: AxisName) -> bool:
    """Return whether collectives over the axis run on TPUs; False under vmap: none run."""
    return platform() == "tpu" and is_device_axis(axis_name)


def platform() -> str:
    """Return the platform of the devices that a program is traced for, which may be described."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def broadcast_from_first(tree: PyTree, axis_name: AxisName) -> PyTree:
    """Return every leaf as position 0 of `axis_name` has it; any dtype, PRNG keys included.

    Communication: one all-reduce of each leaf over `axis_name` (all others add zeros); none where
      its size is 1.
    """

    def first(x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            implementation = jax.random.key_impl(x)
            return jax.random.wrap_key_data(first(jax.random.key_data(x)), impl=implementation)
        if axis_size(axis_name) == 1:
            return sum_over(x, axis_name)
        summand = jnp.where(lax.axis_index(axis_name) == 0, x, jnp.zeros_like(x))
        return lax.psum(summand, axis_name).astype(x.dtype)

    return jax.tree.map(first, tree)


def per_replica_keys(tree: PyTree, axes: AxisName, *, inside: bool = False) -> PyTree:
    """Return `tree` with a different PRNG key on every replica; the first keeps its key.

    Only typed keys (`jax.random.key`) change: raw keys cannot be distinguished from other arrays.

    Args:
      tree: arrays of any dtypes.
      axes: the replica axes; or with `inside` those inside a replica, perhaps none.
      inside: whether each device of a replica gets a key of its own; none of these is a key that
        another replica has, whatever their numbers.

    Communication: none.
    """

    def own(x: jax.Array) -> jax.Array:
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return fold_in_number(x, lax.axis_index(axes), inside=inside) if is_key else x

    return jax.tree.map(own, tree) if axes else tree


def default_generator() -> str:
    """Return the name of the generator of keys that are made without one, such as "rbg"."""
    config: Any = jax.config  # has its options as attributes
    return str(config.jax_default_prng_impl)


def key_bits(seed: int) -> jax.Array:
    """Return the data of the key of a seed, of jax's default generator, (words,) uint32."""
    with jax.transfer_guard_host_to_device("allow"):  # of the seed; jax.random has no explicit way
        return jax.random.key_data(jax.random.key(seed))


def position_key(key: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Return the key of this position along `axes`: one number, folded in once.

    Communication: none.
    """
    return jax.random.fold_in(key, lax.axis_index(axes)) if axes else key


# Folded into a replica's key before the number of a device: a replica's own number is below it.
_INSIDE = 0x9E3779B9


def fold_in_number(keys: jax.Array, number: jax.Array, *, inside: bool = False) -> jax.Array:
    """Return keys of any shape with `number` folded in; number 0 leaves them unchanged.

    `inside` says that it is the number of a device inside a replica, not of a replica.
    """

    def fold_number(key: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(key, _INSIDE) if inside else key, number)

    new = jax.vmap(fold_number)(keys.reshape(-1)).reshape(keys.shape)
    data = jnp.where(number == 0, jax.random.key_data(keys), jax.random.key_data(new))
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(keys))
