"""Export of the consensus parameters to disk without the rest of the state, and their import."""

import functools
from collections.abc import Mapping
from os import PathLike
from typing import Any

import jax
import numpy as np

from .._support.files import io_errno
from .._support.types import AxisName, PyTree
from ..mesh import AnyMesh, Shares, consensus
from ..tree import leaf_names
from ._arrays import check_prints, first_line, host_print, prints_of, read_arrays
from ._folder import (
    ARRAYS,
    CheckpointError,
    advice_on,
    ocp,
    quiet_orbax,
    remove_unfinished,
    resolved,
)
from ._record import as_stored, checked_json, is_key, read_json
from ._writing import FolderWrite

_FORMAT = 1
_MARK = "jaxslowmo_consensus"
_ROOT = "params"  # the name of a tree inside the tree that orbax writes, if it needs one
_KEY = "key<"  # how the dtype of PRNG keys begins in a record: "key<threefry2x32>"


def export_consensus(
    folder: str | PathLike[str],
    params: PyTree,
    *,
    mesh: AnyMesh,
    axis_name: AxisName = "replica",
    shares: Shares | None = None,
    extra: Mapping[str, Any] | None = None,
    patience: float = 600,
) -> None:
    """Write the mean of the replicas' parameters as one model.

    The folder becomes visible when it is complete. It holds an orbax PyTree checkpoint, `state`,
    that other programs can read without this library. All processes must call it.

    Args:
      folder: a new path; one that holds an earlier export is replaced.
      params: stacked tree, leaves `(replicas, *s)`: `state.params`. One array alone is a tree, too.
      mesh: mesh with `axis_name`, or a `VirtualMesh`.
      axis_name: the replica axis, or several.
      shares: the weights of the mean, `step.shares(state)`, which gossip needs; see `js.consensus`.
        By default all replicas weigh the same.
      extra: plain JSON to save with it.
      patience: seconds that a process waits for the others while nothing is being written; the
        default is 600.

    Raises:
      ValueError: arguments that `js.consensus` rejects, `extra` that is no JSON, no array or a leaf
        of size 0, or two leaves that orbax stores under one key: it joins the parts of a path with
        dots, so `{"a.b": x, "a": {"b": y}}` are two of "a.b".
      CheckpointError: the folder holds something else, or cannot be written.

    Communication: that of `js.consensus`: one all-reduce of the parameters over `axis_name`, and
      with weights one of 4 bytes; some messages through the coordinator.
    """
    quiet_orbax()
    path, extra_json = resolved(folder), checked_json("export_consensus", extra)
    mean = consensus(params, mesh=mesh, axis_name=axis_name, shares=shares)
    # Orbax has no key for one array alone, whose path is empty, nor for the name "".
    root = _ROOT if "" in _files(mean) else None
    written = mean if root is None else {root: mean}
    _check_storable(mean, _files(written))
    if path.exists():
        _record(path)  # raises unless the folder holds an export, which may be replaced
    stored, leaves = as_stored(mean), _leaves(mean)
    record = {_MARK: _FORMAT, "leaves": leaves, "prints": prints_of(stored), "extra": extra_json}
    if (keys := _keys(written)) != _keys_of_names(leaves):
        record |= {"keys": keys, "root": root}
    arrays = jax.tree.structure(written).unflatten(map(_on_host, stored))
    try:
        before = functools.partial(remove_unfinished, path.parent, f"{path.name}.")
        FolderWrite(path, arrays, record, seconds=patience, before=before).result()
    except Exception as error:
        reason = str(error) if isinstance(error, CheckpointError) else repr(error)
        raise CheckpointError(
            f"{path} could not be written ({reason}).{advice_on(error)}",
            io_errno(error),
        ) from error


def load_consensus(folder: str | PathLike[str], like: PyTree | None = None) -> PyTree:
    """Load the parameters that `export_consensus` wrote.

    Args:
      folder: folder of the export.
      like: a tree of arrays or structs with the same names, shapes and dtypes, whose structure the
        result has. None returns nested dicts and lists.

    Returns:
      NumPy arrays of one model, as `step.init` takes them; PRNG keys are keys of jax.

    Raises:
      CheckpointError: no export in the folder, damaged files, or another model than `like`.

    Communication: none; each process reads all files.
    """
    quiet_orbax()
    path = resolved(folder)
    record = _record(path)
    leaves = record["leaves"]
    if like is not None:
        _check_like(path, leaves, _leaves(like))
    keys = record.get("keys", _keys_of_names(leaves))
    stored = read_arrays(path / ARRAYS, keys, None)
    prints = [host_print(x) for x in stored]
    check_prints(path, [name for name, _, _ in leaves], prints, record["prints"])
    arrays = [_from_stored(x, dtype) for x, (_, _, dtype) in zip(stored, leaves, strict=True)]
    if like is not None:
        return jax.tree.structure(like).unflatten(arrays)
    try:
        nested = ocp.PyTreeCheckpointHandler().metadata(path / ARRAYS).tree
    except Exception as error:
        raise CheckpointError(f"{path} is damaged: {first_line(error)}.") from error
    by_key = dict(zip(keys, arrays, strict=True))
    tree = jax.tree.structure(nested).unflatten([by_key[key] for key in _keys(nested)])
    return tree if record.get("root") is None else tree[record["root"]]


def consensus_extra(folder: str | PathLike[str]) -> dict[str, Any]:
    """Return the `extra` of an export, without reading the parameters.

    Args:
      folder: folder of the export.

    Returns:
      The `extra` of `export_consensus`; {} by default.

    Raises:
      CheckpointError: no export in the folder.

    Communication: none; each process reads independently.
    """
    return _record(resolved(folder)).get("extra") or {}


def _on_host(x: jax.Array) -> Any:
    """Return a NumPy array if this process has all values, so that reading needs no devices."""
    if x.is_fully_replicated:
        return np.asarray(x.addressable_data(0))
    return np.asarray(x) if x.is_fully_addressable else x


def _keys(tree: PyTree) -> list[str]:
    """Return the key under which orbax stores each leaf: the parts of its path, joined by dots."""
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [".".join(jax.tree_util.keystr((k,), simple=True) for k in path) for path, _ in paths]


def _keys_of_names(leaves: list[list[Any]]) -> list[str]:
    """Return the keys of a record that lists none: no part of a path is empty or holds a slash."""
    return [name.replace("/", ".") for name, _, _ in leaves]


def _files(tree: PyTree) -> list[str]:
    """Return a text for each leaf that is equal for those that zarr stores in the same files."""
    return [key.removesuffix("/") for key in _keys(tree)]  # zarr appends a slash where none is


def _check_storable(tree: PyTree, files: list[str]) -> None:
    """Raise `ValueError` for a tree that orbax cannot store in these `_files`."""
    leaves = jax.tree.leaves(tree)
    if not leaves:
        raise ValueError("export_consensus: `params` must hold an array, got none.")
    named = zip(leaf_names(tree), leaves, strict=True)
    if empty := [name for name, x in named if not x.size]:
        raise ValueError(
            "export_consensus: `params` must hold something in every leaf, which orbax requires, "
            f"got leaves of size 0: {', '.join(empty)}. Leave them out."
        )
    first: dict[str, str] = {}
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)]
    for key, path in zip(files, paths, strict=True):
        if key in first:
            raise ValueError(
                "export_consensus: `params` must have leaves whose paths differ when their parts "
                f"are joined by dots, as orbax does, got {first[key]} and {path}, which are both "
                f"{key!r}. Rename one."
            )
        first[key] = path


def _from_stored(x: np.ndarray, dtype: str) -> Any:
    """Return a leaf from the array that `as_stored` makes of it."""
    if not dtype.startswith(_KEY):
        return x
    return jax.random.wrap_key_data(jax.numpy.asarray(x), impl=dtype[len(_KEY) : -1])


def _check_like(path: Any, saved: list[list[Any]], wanted: list[list[Any]]) -> None:
    if saved == wanted:
        return
    differ = [f"{a} and not {b}" for a, b in zip(saved, wanted, strict=False) if a != b]
    differ += [f"{len(saved)} leaves and not {len(wanted)}"] * (len(saved) != len(wanted))
    raise CheckpointError(
        f"{path} is of another model than `like`: it has {'; '.join(differ[:3])}."
    )


def _leaves(tree: PyTree) -> list[list[Any]]:
    """Return name, shape and dtype of each leaf, as a record lists them."""
    leaves = zip(leaf_names(tree), jax.tree.leaves(tree), strict=True)
    return [[name, list(np.shape(x)), _dtype_text(jax.typeof(x))] for name, x in leaves]


def _dtype_text(kind: Any) -> str:
    if not is_key(kind):
        return kind.dtype.name
    # `key_impl` needs an array, and `kind` is a type.
    return f"{_KEY}{jax.random.key_impl(jax.numpy.empty((), kind.dtype))}>"


def _record(path: Any) -> dict[str, Any]:
    value = read_json(path)
    if not isinstance(value, dict) or value.get(_MARK) is None:
        raise CheckpointError(
            f"{path} is no model that export_consensus wrote: give the folder of one."
        )
    if value[_MARK] != _FORMAT:
        raise CheckpointError(
            f"{path} has format {value[_MARK]}, and this version of jaxslowmo reads format "
            f"{_FORMAT}: install a newer one."
        )
    return value
