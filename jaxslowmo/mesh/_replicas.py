"""One copy of a tree, the same on all processes, to stacked replicas, and how their leaves lie."""

import functools
import hashlib
import json
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .._support.types import AxisName, PyTree
from ..tree import check_arrays, leaf_names
from ._axes import axis_names, only_over, vary_over
from ._meshes import AnyMesh, VirtualMesh, map_replicas, model_axes, replica_count

Description = list[tuple[str, str]]
"""Name and type of every leaf, in flattening order."""

_VALUES = " of values "


def is_of_host(x: Any) -> bool:
    """Whether this process alone knows `x`.

    Not arrays over several processes, nor shapes without values or values under a trace, which are
    all of the whole.
    """
    if isinstance(x, jax.ShapeDtypeStruct | Tracer):
        return False
    return not isinstance(x, jax.Array) or x.is_fully_addressable


def digest(arrays: Sequence[Any]) -> str:
    """16 letters that stand for the bits of arrays that this process has."""
    found = hashlib.blake2b(digest_size=8)
    for x in arrays:
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        found.update(np.ascontiguousarray(x).tobytes())
    return found.hexdigest()


def describe(tree: PyTree, *, with_values: bool = False) -> Description:
    """Name and type, such as `("layer/w", "float32[3,4]")`, of every leaf.

    Args:
      tree: of arrays.
      with_values: also a digest of the values that this process alone knows.
    """
    seen: Counter[str] = Counter()
    lines = []
    for name, leaf in zip(leaf_names(tree), jax.tree.leaves(tree), strict=True):
        seen[name] += 1
        unique = name if seen[name] == 1 else f"{name} (no. {seen[name]})"
        shape = ",".join(map(str, np.shape(leaf)))
        values = f"{_VALUES}{digest([leaf])}" if with_values and is_of_host(leaf) else ""
        lines.append((unique, f"{jax.typeof(leaf).dtype}[{shape}]{values}"))
    return lines


def differences(
    descriptions: Sequence[Description], processes: Sequence[int] | None = None
) -> list[str]:
    """One line for each leaf that is not the same everywhere: what it is on which processes.

    Args:
      descriptions: one per process.
      processes: their numbers; None: 0, 1, ...
    """
    numbers = range(len(descriptions)) if processes is None else processes
    by_process = dict(zip(numbers, map(dict, descriptions), strict=True))
    names = dict.fromkeys(name for types in by_process.values() for name in types)
    found = []
    for name in names:
        groups: dict[str, list[int]] = {}
        for process, types in by_process.items():
            groups.setdefault(types.get(name, "missing"), []).append(process)
        if len(groups) > 1:
            parts = [f"{what} on {name_processes(where)}" for what, where in groups.items()]
            found.append(f"{name}: {', '.join(parts)}")
    if not found:
        orders = [[name for name, _ in description] for description in descriptions]
        other = [
            process for process, order in zip(numbers, orders, strict=True) if order != orders[0]
        ]
        if other:
            found.append(
                f"the same leaves in another order than process {numbers[0]} on "
                f"{name_processes(other)}"
            )
    return found


def name_processes(which: Sequence[int]) -> str:
    """Such as "processes 0, 3"."""
    return f"process{'es' if len(which) > 1 else ''} {', '.join(map(str, which))}"


def check_same_tree(params: PyTree) -> None:
    """Check that all processes hold the same tree: names, shapes and dtypes of its leaves.

    `js.replicate`, `js.init` and `js.TrainState.create` (so `step.init` too) do this by themselves.
    All processes must call it. Values are not compared: see `js.check_in_sync`.

    Args:
      params: any tree of arrays.

    Raises:
      ValueError: some leaf differs or is missing somewhere; raised on every process with the same
        text, which lists each such leaf, what it is, and on which processes.

    Communication: none with one process; else two gathers of a few KiB through the host.
    """
    compare_trees(params)


def compare_trees(params: PyTree, *, with_values: bool = False) -> None:
    """`check_same_tree`, also of the values that each process has by itself."""
    if jax.process_count() == 1:
        return
    described = describe(params, with_values=with_values)
    payload = np.frombuffer(json.dumps(described).encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.array([payload.size], np.int32)).reshape(-1)
    padded = np.zeros(int(lengths.max()), np.uint8)
    padded[: payload.size] = payload
    gathered = multihost_utils.process_allgather(padded).reshape(lengths.size, -1)
    told: list[Description] = [
        [(name, what) for name, what in json.loads(bytes(row[:length]).decode())]
        for row, length in zip(gathered, lengths, strict=True)
    ]
    types = [[(name, what.partition(_VALUES)[0]) for name, what in own] for own in told]
    found = differences(types) or _few(differences(told))
    if found:
        raise ValueError(
            f"params: the parameter trees differ between processes: {'; '.join(found)}."
        )


_NUM_VALUES = 4


def _few(found: list[str]) -> list[str]:
    """Some of the leaves of other values, which may be all there are, and what to do."""
    if not found:
        return []
    more = [f"{len(found) - _NUM_VALUES} more"] if len(found) > _NUM_VALUES else []
    return [*found[:_NUM_VALUES], *more, "all must start from the same seed or file"]


def _is_on(x: Any, mesh: Mesh) -> bool:
    sharding = getattr(x, "sharding", None)
    return isinstance(sharding, NamedSharding) and sharding.mesh == mesh


def _place(tree: PyTree, mesh: AnyMesh) -> PyTree:
    """Leaves on `mesh`, whole on every device unless they are sharded over it already."""
    if isinstance(mesh, VirtualMesh):
        return jax.tree.map(jnp.asarray, tree)

    def put(x: Any) -> jax.Array:
        if _is_on(x, mesh):
            return x
        put_one = _put_equal if mesh.is_multi_process and is_of_host(x) else jax.device_put
        return _put(x, NamedSharding(mesh, P()), put_one)

    return jax.tree.map(put, tree)


def _put(
    x: Any,
    sharding: NamedSharding,
    put_one: Callable[[Any, NamedSharding], jax.Array] = jax.device_put,
) -> jax.Array:
    if not isinstance(x, jax.Array) or not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return put_one(x, sharding)
    # As bits: of keys themselves jax puts none on devices of other processes.
    bits = put_one(jax.random.key_data(x), sharding)
    return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(x))


def _put_equal(x: Any, sharding: NamedSharding) -> jax.Array:
    """`device_put` of what is known to be equal on all processes, which that would gather it for.

    Communication: none.
    """
    values = np.asarray(x).astype(jax.typeof(x).dtype)  # of float64 and Python's numbers, too
    return jax.make_array_from_callback(values.shape, sharding, lambda where: values[where])


def check_stacked(owner: str, tree: PyTree, mesh: AnyMesh, axis_name: AxisName) -> int:
    """Number of replicas; `ValueError` naming every leaf without that leading axis."""
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
    def per_replica(tree: PyTree) -> PyTree:
        return vary_over(jax.tree.map(jnp.copy, tree), axis_names(axis_name))

    return jax.jit(
        map_replicas(
            per_replica,
            mesh=mesh,
            axis_name=axis_name,
            in_roles=("shared",),
            automatic=automatic,
        )
    )


def replicate(params: PyTree, *, mesh: AnyMesh, axis_name: AxisName = "replica") -> PyTree:
    """Stack one copy of `params` for every replica.

    Args:
      params: tree of arrays of shapes `s`; leaves already sharded over other axes of `mesh` stay
        so. Copies on the host of what is stacked already (`np.asarray(state.params["w"])`) tell
        nobody that they are, and would be stacked again.
      mesh: mesh with `axis_name`, or a `VirtualMesh`.
      axis_name: the replica axis, or several.

    Returns:
      Tree of arrays `(replicas, *s)`, split over `axis_name`: each replica holds one copy. Equal on
      all replicas, and never an alias of `params`.

    Raises:
      ValueError: `axis_name` is not an axis of `mesh`, leaves are no arrays (named), `params` are
        stacked already, or trees differ between processes in names, shapes or dtypes (every
        difference listed), or in values.

    Communication: none between replicas; host to device, each device receives one copy. With
      several processes one exchange of names, shapes, dtypes and digests of 8 bytes per leaf
      through the host.
    """
    replicas = replica_count("replicate", mesh, axis_name)
    if _is_stacked(jax.tree.leaves(params), replicas, mesh, axis_name):
        raise ValueError(
            "replicate: `params` must be one copy, and these are stacked for "
            f"{replicas} replicas already: pass what was given to `js.replicate` before, or one "
            "copy of what was trained, `js.consensus(...)`."
        )
    check_arrays("replicate", params)
    compare_trees(params, with_values=True)
    placed = _place(params, mesh)
    automatic = model_axes(placed, mesh, axis_name)
    stacked = _replicate_fn(mesh, axis_name, automatic)(placed)
    if isinstance(mesh, VirtualMesh):
        _made.update({id(x): x for x in jax.tree.leaves(stacked)})
    return stacked


# What was made for one device, where no sharding tells of replicas.
_made: weakref.WeakValueDictionary[int, jax.Array] = weakref.WeakValueDictionary()


def _is_stacked(leaves: list[Any], replicas: int, mesh: AnyMesh, axis_name: AxisName) -> bool:
    """Whether leaves have a replica axis, by how all of them lie or by where one comes from."""
    if isinstance(mesh, VirtualMesh):
        return any(_made.get(id(x)) is x for x in leaves)

    def is_split(x: Any) -> bool:
        if not _is_on(x, mesh) or np.shape(x)[:1] != (replicas,) or not x.sharding.spec:
            return False
        entry = x.sharding.spec[0]
        return (entry if isinstance(entry, tuple) else (entry,)) == axis_names(axis_name)

    return bool(leaves) and all(map(is_split, leaves))


def on_mesh(tree: PyTree, mesh: AnyMesh, axis_name: AxisName) -> PyTree:
    """Stacked leaves that are not placed yet, split over the replica axis."""
    if not isinstance(mesh, Mesh):
        return tree
    sharding = NamedSharding(mesh, P(axis_names(axis_name)))
    return jax.tree.map(
        lambda x: x if _is_on(x, mesh) else _put(x, sharding),
        tree,
    )


Layouts = tuple[tuple[tuple[Any, ...], tuple[int, ...], P], ...]
"""Path, shape and layout inside a replica of each parameter that has one."""


def inner_specs(stacked: PyTree, mesh: AnyMesh, axis_name: AxisName) -> PyTree | None:
    """A `PartitionSpec` per leaf over the axes inside a replica, read off concrete arrays.

    Args:
      stacked: arrays `(replicas, *s)`, on `mesh` or not; specs are for `s`.
      mesh: where the replicas lie.
      axis_name: the replica axis.

    Returns:
      A tree like `stacked`; None where nothing is sharded inside a replica.
    """
    inside = model_axes(stacked, mesh, axis_name)
    if not inside:
        return None

    def spec_of(x: Any) -> P:
        sharding = getattr(x, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            return P()
        return only_over(sharding.spec[1:], inside)

    return jax.tree.map(spec_of, stacked)


def layouts_of(stacked_params: PyTree) -> Layouts:
    """How parameters `(replicas, *s)` lie inside a replica."""
    return tuple(
        (path, leaf.shape[1:], P(*leaf.sharding.spec[1:]))
        for path, leaf in jax.tree_util.tree_leaves_with_path(stacked_params)
        if isinstance(leaf.sharding, NamedSharding)
    )


def laid_out(tree: PyTree, specs: PyTree) -> PyTree:
    """`tree` with every leaf laid out by its spec, over the axes that are the compiler's here.

    Left to itself it may split what is whole, and gather it again for the next that wants it whole.
    Over Explicit axes nothing is changed: there, types carry the layout already.

    Communication: none of its own.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit in mesh.axis_types:
        return tree
    automatic = frozenset(mesh.auto_axes)

    def place(x: jax.Array, spec: P) -> jax.Array:
        return lax.with_sharding_constraint(x, only_over(spec, automatic))

    return jax.tree.map(place, tree, specs) if automatic else tree


def sharded_like(state: PyTree, layouts: Layouts) -> PyTree:
    """`state` with the leaves that mirror a parameter sharded as it is inside a replica.

    Fresh zeros carry no layout, so the compiler would keep moments of sharded parameters whole on
    every device. A leaf mirrors a parameter if its path ends in the parameter's and its shape is
    the parameter's, as in optax's states.

    Args:
      state: one replica's state, under the replica axis.
      layouts: of the parameters.

    Communication: none.
    """

    def place(path: tuple, x: jax.Array) -> jax.Array:
        for suffix, shape, spec in layouts:
            if x.shape == shape and path[len(path) - len(suffix) :] == suffix:
                return lax.with_sharding_constraint(x, spec)
        return x

    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit in mesh.axis_types:  # there, types carry the layout already
        return state
    return jax.tree_util.tree_map_with_path(place, state)
