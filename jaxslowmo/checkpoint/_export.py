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
from ._folder import ARRAYS, CheckpointError, ocp, quiet_orbax, remove_unfinished, resolved
from ._record import checked_json, read_json
from ._writing import FolderWrite

_FORMAT = 1
_MARK = "jaxslowmo_consensus"


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
      params: stacked tree, leaves `(replicas, *s)`: `state.params`.
      mesh: mesh with `axis_name`, or a `VirtualMesh`.
      axis_name: the replica axis, or several.
      shares: the weights of the mean, `step.shares(state)`, which gossip needs; see `js.consensus`.
        By default all replicas weigh the same.
      extra: plain JSON to save with it.
      patience: seconds that a process waits for the others while nothing is being written; the
        default is 600.

    Raises:
      ValueError: arguments that `js.consensus` rejects, `extra` that is no JSON, or a leaf of size
        0.
      CheckpointError: the folder holds something else, or cannot be written.

    Communication: that of `js.consensus`: one all-reduce of the parameters over `axis_name`, and
      with weights one of 4 bytes; some messages through the coordinator.
    """
    quiet_orbax()
    leaves = zip(leaf_names(params), jax.tree.leaves(params), strict=True)
    if empty := [name for name, x in leaves if not np.size(x)]:
        raise ValueError(
            "export_consensus: `params` must hold something in every leaf, which orbax requires, "
            f"got leaves of size 0: {', '.join(empty)}. Leave them out."
        )
    path, extra_json = resolved(folder), checked_json("export_consensus", extra)
    placed = consensus(params, mesh=mesh, axis_name=axis_name, shares=shares)
    if path.exists():
        _record(path)  # raises unless the folder holds an export, which may be replaced
    prints = prints_of(jax.tree.leaves(placed))
    mean = jax.tree.map(_on_host, placed)
    record = {_MARK: _FORMAT, "leaves": _leaves(mean), "prints": prints, "extra": extra_json}
    try:
        before = functools.partial(remove_unfinished, path.parent, f"{path.name}.")
        FolderWrite(path, mean, record, seconds=patience, before=before).result()
    except Exception as error:
        reason = str(error) if isinstance(error, CheckpointError) else repr(error)
        raise CheckpointError(
            f"{path} could not be written ({reason}). Is there space, and may this user write "
            "there?",
            io_errno(error),
        ) from error


def load_consensus(folder: str | PathLike[str], like: PyTree | None = None) -> PyTree:
    """Load the parameters that `export_consensus` wrote.

    Args:
      folder: folder of the export.
      like: a tree of arrays or structs with the same names, shapes and dtypes, whose structure the
        result has. None returns nested dicts and lists.

    Returns:
      NumPy arrays of one model, as `step.init` takes them.

    Raises:
      CheckpointError: no export in the folder, damaged files, or another model than `like`.

    Communication: none; each process reads all files.
    """
    quiet_orbax()
    path = resolved(folder)
    record = _record(path)
    names = [name for name, _, _ in record["leaves"]]
    if like is not None:
        _check_like(path, record["leaves"], _leaves(like))
    arrays = read_arrays(path / ARRAYS, [_key(name) for name in names], None)
    check_prints(path, names, [host_print(x) for x in arrays], record["prints"])
    if like is not None:
        return jax.tree.structure(like).unflatten(arrays)
    try:
        nested = ocp.PyTreeCheckpointHandler().metadata(path / ARRAYS).tree
    except Exception as error:
        raise CheckpointError(f"{path} is damaged: {first_line(error)}.") from error
    return jax.tree.structure(nested).unflatten(
        [dict(zip(names, arrays, strict=True))[name] for name in leaf_names(nested)]
    )


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


def _key(name: str) -> str:
    """Return the key under which orbax stores a leaf."""
    return name.replace("/", ".")


def _check_like(path: Any, saved: list[list[Any]], wanted: list[list[Any]]) -> None:
    if saved == wanted:
        return
    differ = [f"{a} and not {b}" for a, b in zip(saved, wanted, strict=False) if a != b]
    differ += [f"{len(saved)} leaves and not {len(wanted)}"] * (len(saved) != len(wanted))
    raise CheckpointError(
        f"{path} is of another model than `like`: it has {'; '.join(differ[:3])}."
    )


def _leaves(tree: PyTree) -> list[list[Any]]:
    leaves = zip(leaf_names(tree), jax.tree.leaves(tree), strict=True)
    return [[name, list(np.shape(x)), jax.typeof(x).dtype.name] for name, x in leaves]


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
