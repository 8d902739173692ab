"""Stacked replicas of one copy of a tree, and the layouts of their leaves over devices.

The copy must be the same on all processes; `check_same_tree` compares it.
"""

import functools
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .._support.checks import ArgumentError, warn_user
from .._support.types import AxisName, PyTree, axis_names
from ..tree import check_arrays, leaf_names
from ._axes import restrict_spec
from ._meshes import (
    AnyMesh,
    device_mesh,
    has_device_per_position,
    map_replicas,
    model_axes,
    placement,
    replica_count,
)

Description = dict[str, str]
"""The type of every leaf by its name, in flattening order."""

_VALUES = " of values "


def is_host_local(x: Any) -> bool:
    """Return whether `x` has values that only this process holds, so that others' may differ.

    False for arrays over several processes, for shapes without values and for traced values.
    """
    if isinstance(x, jax.ShapeDtypeStruct | Tracer):
        return False
    return not isinstance(x, jax.Array) or x.is_fully_addressable


def digest(arrays: Sequence[Any]) -> str:
    """Return a hash, 16 hexadecimal digits, of the bits of arrays that this process can read."""
    hasher = hashlib.blake2b(digest_size=8)
    for x in arrays:
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        hasher.update(np.ascontiguousarray(x).tobytes())
    return hasher.hexdigest()


def describe(tree: PyTree, *, with_values: bool = False) -> Description:
    """Return the type of every leaf by its name, such as `{"layer/w": "float32[3,4]"}`.

    Args:
      tree: any tree of arrays.
      with_values: whether to append a digest to the type of leaves of which this process alone
        knows the values; the default is False.
    """
    seen: Counter[str] = Counter()
    lines: Description = {}
    for name, leaf in zip(leaf_names(tree), jax.tree.leaves(tree), strict=True):
        seen[name] += 1
        unique = name if seen[name] == 1 else f"{name} (no. {seen[name]})"
        shape = ",".join(map(str, np.shape(leaf)))
        values = f"{_VALUES}{digest([leaf])}" if with_values and is_host_local(leaf) else ""
        lines[unique] = f"{jax.typeof(leaf).dtype}[{shape}]{values}"
    return lines


def differences(
    descriptions: Sequence[Description], processes: Sequence[int] | None = None
) -> list[str]:
    """Return a line for each leaf that differs between processes: its type on each of them.

    Args:
      descriptions: one `Description` per process.
      processes: the processes' numbers; the default is 0, 1, ...
    """
    numbers = range(len(descriptions)) if processes is None else processes
    by_process = dict(zip(numbers, descriptions, strict=True))
    names = dict.fromkeys(name for types in by_process.values() for name in types)
    lines = []
    for name in names:
        groups: dict[str, list[int]] = {}
        for process, types in by_process.items():
            groups.setdefault(types.get(name, "missing"), []).append(process)
        if len(groups) > 1:
            parts = [f"{what} on {name_processes(where)}" for what, where in groups.items()]
            lines.append(f"{name}: {', '.join(parts)}")
    if not lines:
        first = list(descriptions[0])
        if other := [process for process, types in by_process.items() if list(types) != first]:
            lines.append(
                f"the same leaves in another order than process {numbers[0]} on "
                f"{name_processes(other)}"
            )
    return lines


def name_processes(which: Sequence[int]) -> str:
    """Return the text for these processes, such as "processes 0, 3"."""
    return f"process{'es' if len(which) > 1 else ''} {', '.join(map(str, which))}"


def check_same_tree(params: PyTree) -> None:
    """Check that all processes hold the same tree: names, shapes and dtypes of its leaves.

    `js.replicate`, `js.init` and `step.init` do this by themselves.
    All processes must call it. Values are not compared: see `js.check_in_sync`.

    Args:
      params: any tree of arrays.

    Raises:
      ValueError: some leaf differs or is missing somewhere; raised on every process with the same
        text, which lists each such leaf, what it is, and on which processes.

    Communication: none with one process; else two gathers of a few KiB through the host.
    """
    compare_trees(params)


def compare_trees(params: PyTree, *, with_values: bool = False, name: str = "params") -> None:
    """Check what `check_same_tree` does; `with_values` also compares values on single processes.

    `name` is that of the argument, for the message.
    """
    if jax.process_count() == 1:
        return
    descriptions = _all_gather_descriptions(describe(params, with_values=with_values))
    types = [
        {name: what.partition(_VALUES)[0] for name, what in description.items()}
        for description in descriptions
    ]
    lines = differences(types) or _shorten(differences(descriptions))
    if lines:
        raise ValueError(f"{name}: the trees differ between processes: {'; '.join(lines)}.")


def compare_descriptions(what: str, lines: Description) -> None:
    """Raise `ValueError` on every process if lines differ between processes, and list these.

    Communication: two gathers of the lines through the host.
    """
    if wrong := differences(_all_gather_descriptions(lines)):
        raise ValueError(f"{what} differ between processes: {'; '.join(wrong)}.")


def _all_gather_descriptions(lines: Description) -> list[Description]:
    payload = np.frombuffer(json.dumps(lines).encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.array([payload.size], np.int32)).reshape(-1)
    padded = np.zeros(int(lengths.max()), np.uint8)
    padded[: payload.size] = payload
    gathered = multihost_utils.process_allgather(padded).reshape(lengths.size, -1)
    texts = [bytes(row[:length]) for row, length in zip(gathered, lengths, strict=True)]
    return [json.loads(text) for text in texts]


_NUM_VALUES = 4


def _shorten(lines: list[str]) -> list[str]:
    """Return the first of these lines and advice; often the values of all leaves differ."""
    if not lines:
        return []
    more = [f"{len(lines) - _NUM_VALUES} more"] if len(lines) > _NUM_VALUES else []
    return [*lines[:_NUM_VALUES], *more, "all must start from the same seed or file"]


def _is_on(x: Any, mesh: Mesh | AbstractMesh) -> bool:
    sharding = getattr(x, "sharding", None)
    return isinstance(sharding, NamedSharding) and sharding.mesh == mesh


def put_on_all_devices(tree: PyTree, mesh: AnyMesh) -> PyTree:
    """Place leaves on `mesh`, whole on every device unless they are on it already."""
    where = placement(mesh, P())
    return jax.tree.map(lambda x: _device_put(x, where, _device_put_equal), tree)


def _device_put(
    x: Any,
    sharding: NamedSharding,
    put_one: Callable[[Any, NamedSharding], jax.Array] = jax.device_put,
) -> jax.Array:
    """Put an array on devices, unless it is on their mesh already."""
    if _is_on(x, sharding.mesh) or (isinstance(x, Tracer) and sharding.mesh.size == 1):
        return x  # for one device a traced value is left to its program, which may run on another
    if not isinstance(x, jax.Array) or not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return put_one(x, sharding)
    # Put the bits: jax cannot put typed keys on devices of other processes.
    bits = put_one(jax.random.key_data(x), sharding)
    return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(x))


def _device_put_equal(x: Any, sharding: NamedSharding) -> jax.Array:
    """Put an array that all processes have on devices; `device_put` would gather it to compare.

    Communication: none.
    """
    if not (sharding.mesh.is_multi_process and is_host_local(x)):
        return jax.device_put(x, sharding)
    values = np.asarray(x).astype(jax.typeof(x).dtype)  # narrows float64 and Python's numbers
    return array_from_host(values.shape, sharding, lambda where: values[where])


def array_from_host(
    shape: tuple[int, ...], sharding: jax.sharding.Sharding, part: Callable[[Any], Any]
) -> jax.Array:
    """Return an array on devices of which the host makes the part of each device of this process.

    It is `jax.make_array_from_callback` with explicit transfers, which `jax.transfer_guard` allows
    where a program forbids implicit ones.

    Args:
      shape: shape of the whole array.
      sharding: its placement, over devices of one process or of several.
      part: function from a device's index, a tuple of slices of the whole, to its part.

    Communication: none between processes; host to device.
    """
    places = sharding.addressable_devices_indices_map(shape)
    parts = jax.device_put([part(index) for index in places.values()], [*places])
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def check_replica_axis(owner: str, tree: PyTree, mesh: AnyMesh, axis_name: AxisName) -> int:
    """Return the number of replicas; raise `ValueError` that names leaves without that axis."""
    count = replica_count(owner, mesh, axis_name)
    wrong = [
        f"{name} {tuple(np.shape(leaf))}"
        for name, leaf in zip(leaf_names(tree), jax.tree.leaves(tree), strict=True)
        if np.ndim(leaf) < 1 or np.shape(leaf)[0] != count
    ]
    if wrong:
        raise ValueError(
            f"{owner}: every leaf needs a leading axis of {count} replicas (`axis_name` "
            f"{axis_name!r}), as `js.replicate` makes it; got {', '.join(wrong)}."
        )
    return count


@functools.lru_cache(maxsize=64)
def _replicate_fn(mesh: AnyMesh, axis_name: AxisName, automatic: frozenset[str]):
    copied = functools.partial(jax.tree.map, jnp.copy)
    mapped = map_replicas(
        copied, mesh=mesh, axis_name=axis_name, in_roles=("shared",), automatic=automatic
    )
    # On one device the compiler need not say that it is split, by which it is known as stacked.
    where = None if has_device_per_position(mesh) else placement(mesh, P(axis_names(axis_name)))
    return jax.jit(mapped, out_shardings=where)


def replicate(params: PyTree, *, mesh: AnyMesh, axis_name: AxisName = "replica") -> PyTree:
    """Stack one copy of `params` for every replica.

    Args:
      params: tree of arrays of shapes `s`; leaves already sharded over other axes of `mesh` stay
        so. Copies on the host of stacked leaves (`np.asarray(state.params["w"])`) cannot be
        recognised as stacked, and would be stacked again.
      mesh: mesh with `axis_name`, or a `VirtualMesh`.
      axis_name: the replica axis, or several.

    Returns:
      Tree of arrays `(replicas, *s)`, split over `axis_name`: each replica holds one copy. Equal on
      all replicas, and never an alias of `params`.

    Raises:
      ValueError: `axis_name` is not an axis of `mesh`, leaves are no arrays (named), `params` are
        stacked already, or trees differ between processes in names, shapes or dtypes (every
        difference listed), or in values.
      UserWarning: leaves that are sharded over `axis_name`, which are gathered.

    Communication: none between replicas; host to device, each device receives one copy. With
      several processes one exchange of names, shapes, dtypes and digests of 8 bytes per leaf
      through the host.
    """
    return replicate_argument("params", params, mesh=mesh, axis_name=axis_name)


def replicate_argument(name: str, params: PyTree, *, mesh: AnyMesh, axis_name: AxisName) -> PyTree:
    """Do what `replicate` does, for the argument `name`, which messages use."""
    replicas = replica_count("replicate", mesh, axis_name)
    if _has_replica_axis(jax.tree.leaves(params), replicas, mesh, axis_name):
        raise ArgumentError(
            name,
            f"replicate: `{name}` must be one copy, and these are stacked for {replicas} replicas "
            "already: of what was trained, `js.consensus(...)` is one copy.",
        )
    check_arrays("replicate", params)
    leaves = zip(leaf_names(params), jax.tree.leaves(params), strict=True)
    over = {axis for axis in axis_names(axis_name) if device_mesh(mesh).shape.get(axis, 1) > 1}
    if split := [n for n, x in leaves if over & model_axes(x, mesh, ())]:
        warn_user(
            f"replicate: `{name}` are sharded over the axis of the replicas, {axis_name!r}, so "
            f"they are gathered: {', '.join(split[:_NUM_VALUES])}. Shard over another axis."
        )
    compare_trees(params, with_values=True, name=name)
    placed = put_on_all_devices(params, mesh)
    automatic = model_axes(placed, mesh, axis_name)
    return _replicate_fn(mesh, axis_name, automatic)(placed)


def _has_replica_axis(leaves: list[Any], replicas: int, mesh: AnyMesh, axis_name: AxisName) -> bool:
    """Return whether all leaves have a replica axis, by their shardings."""
    where = placement(mesh, P(axis_names(axis_name)))
    first = [*map(axis_names, where.spec)]  # none if virtual replicas have no devices of their own

    def is_split(x: Any) -> bool:
        is_alike = _is_on(x, where.mesh) and np.shape(x)[:1] == (replicas,)
        return is_alike and first == [*map(axis_names, x.sharding.spec[:1])] != []

    return bool(leaves) and all(map(is_split, leaves))


def shard_replicas(tree: PyTree, mesh: AnyMesh, axis_name: AxisName) -> PyTree:
    """Place stacked leaves that are not on `mesh` yet, split over the replica axis."""
    where = placement(mesh, P(axis_names(axis_name)))
    return jax.tree.map(lambda x: _device_put(x, where), tree)


Layouts = tuple[tuple[tuple[Any, ...], tuple[int, ...], P], ...]
"""Path, shape and layout inside a replica of each parameter that has one."""


def inner_specs(stacked: PyTree, axes: frozenset[str]) -> PyTree:
    """Return a `PartitionSpec` per leaf over the axes inside a replica, read from concrete arrays.

    Args:
      stacked: arrays `(replicas, *s)`, sharded or not.
      axes: the axes inside a replica, from `model_axes`.

    Returns:
      A tree like `stacked`, of specs for `s`.
    """

    def spec_of(x: Any) -> P:
        sharding = getattr(x, "sharding", None)
        is_named = isinstance(sharding, NamedSharding)
        return restrict_spec(sharding.spec[1:], axes) if is_named else P()

    return jax.tree.map(spec_of, stacked)


def inner_layouts(stacked_params: PyTree) -> Layouts:
    """Return the layout inside a replica of stacked parameters `(replicas, *s)`."""
    return tuple(
        (path, leaf.shape[1:], P(*leaf.sharding.spec[1:]))
        for path, leaf in jax.tree_util.tree_leaves_with_path(stacked_params)
        if isinstance(leaf.sharding, NamedSharding)
    )


def constrain_layout(tree: PyTree, specs: PyTree) -> PyTree:
    """Constrain every leaf of `tree` to the layout of its spec, over the automatic axes.

    Without constraints the compiler may split a whole array and gather it again for its next use.
    With Explicit axes nothing is changed: types carry the layout already.

    Communication: what the compiler needs to change a leaf's layout.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit in mesh.axis_types:
        return tree
    automatic = frozenset(mesh.auto_axes)

    def place(x: jax.Array, spec: P) -> jax.Array:
        return lax.with_sharding_constraint(x, restrict_spec(spec, automatic))

    return jax.tree.map(place, tree, specs) if automatic else tree


def shard_like(state: PyTree, layouts: Layouts, num_replicas: int) -> PyTree:
    """Shard the leaves of `state` that mirror a parameter as the parameter is inside a replica.

    Fresh zeros carry no layout, so the compiler would keep moments of sharded parameters whole on
    every device. A leaf mirrors a parameter if its path ends in the parameter's path and the shapes
    are equal, as in optax's states, or if it has the shape of this replica's block of it.

    Args:
      state: one replica's state, under the replica axis.
      layouts: layouts of the parameters inside a replica, from `inner_layouts`.
      num_replicas: number of blocks into which shared state is cut.

    Communication: none.
    """

    def is_block(x: jax.Array, shape: tuple[int, ...], spec: P) -> bool:
        if x.ndim != len(shape):
            return False
        cut = [d for d, (a, b) in enumerate(zip(x.shape, shape, strict=True)) if a != b]
        inner = [math.prod(mesh.shape[name] for name in axis_names(e or ())) for e in spec]
        return (
            len(cut) == 1
            and x.shape[cut[0]] * num_replicas == shape[cut[0]]
            and all(size % n == 0 for size, n in zip(x.shape, inner, strict=False))
        )

    def place(path: tuple, x: jax.Array) -> jax.Array:
        for suffix, shape, spec in layouts:
            is_of = path[len(path) - len(suffix) :] == suffix
            if is_of and (x.shape == shape or is_block(x, shape, spec)):
                return lax.with_sharding_constraint(x, spec)
        return x

    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit in mesh.axis_types:  # types carry the layout already
        return state
    return jax.tree_util.tree_map_with_path(place, state)
