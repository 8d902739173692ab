"""Export of the consensus parameters as safetensors, for any program, and their import."""

import json
import zlib
from collections import Counter
from collections.abc import Mapping
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from .._support.extras import needed_by
from .._support.files import EXPORT_ARRAYS, EXPORT_RECORD
from .._support.types import AxisName, PyTree
from ..embedding import Embeddings, WithTables
from ..mesh import AnyMesh, Shares, consensus
from ..tree import leaf_names, type_text
from ._record import CheckpointError, checked_json, epath, read_versioned_json
from ._writing import (
    Notes,
    catch_failure,
    commit_folder,
    explain_write_errors,
    remove,
    remove_partial_writes,
    resolve_path,
    unfinished_path,
)

with needed_by("jaxslowmo.checkpoint"):
    from safetensors import deserialize
    from safetensors import numpy as safetensors

_FORMAT = 2  # 1 was a checkpoint of orbax
_FORMAT_KEY = "jaxslowmo_consensus"


def export_consensus(
    folder: str | PathLike[str],
    params: PyTree,
    *,
    mesh: AnyMesh,
    axis_name: AxisName = "replica",
    shares: Shares | None = None,
    extra: Mapping[str, Any] | None = None,
    patience: float = 600,
    embeddings: Embeddings | None = None,
) -> None:
    """Write the mean of the replicas' parameters as one model, in safetensors.

    The folder becomes visible when it is complete. `model.safetensors` holds the arrays in their
    dtypes, named by their paths such as "layers/0/kernel"; other programs read it without this
    library. `jaxslowmo.json` holds `extra`. All processes must call it. Process 0 writes: it holds
    the whole model in its memory twice, the others one array at a time.

    Args:
      folder: a new path; one that holds an earlier export is replaced.
      params: stacked tree, leaves `(replicas, *s)`: `state.params`. One array alone is a tree, too,
        and is named "(root)".
      mesh: mesh with `axis_name`, or a `VirtualMesh`.
      axis_name: the replica axis, or several.
      shares: the weights of the mean, `step.shares(state)`, which gossip needs; see `js.consensus`.
        By default all replicas weigh the same.
      extra: plain JSON to save with it.
      patience: seconds that a process waits for the others while nothing is being written; the
        default is 600.
      embeddings: `step.embeddings` of a step with tables: each is written as (num_rows, dim), in
        the order of its ids. Without it they are written as devices store them, which
        `step.embeddings.read` reads.

    Raises:
      ValueError: arguments that `js.consensus` rejects, `extra` that is no JSON, or two leaves of
        one name, such as `{"a/b": x, "a": {"b": y}}`.
      CheckpointError: the folder holds something else, or cannot be written; safetensors has no
        such dtype (int4).

    Communication: that of `js.consensus`: one all-reduce of the parameters over `axis_name`, and
      with weights one of 4 bytes; leaves that are sharded over processes are gathered to all, one
      after the other; some messages through the coordinator.
    """
    if embeddings is not None and not (
        isinstance(embeddings, Embeddings) and isinstance(params, WithTables)
    ):
        raise ValueError(
            "export_consensus: `embeddings` and `params` must be of one step with tables, got "
            f"{type(embeddings).__name__} and {type(params).__name__}."
        )
    path, notes = resolve_path(folder), Notes(patience)
    record = {_FORMAT_KEY: _FORMAT, "extra": checked_json("export_consensus", extra)}
    mean = consensus(params, mesh=mesh, axis_name=axis_name, shares=shares)
    if embeddings is not None:
        mean = mean._replace(tables=embeddings.read(mean.tables))
    names = leaf_names(mean)
    if wrong := sorted(name for name, n in Counter(["__metadata__", *names]).items() if n > 1):
        raise ValueError(
            "export_consensus: `params` must have leaves of different names, and none named "
            f"__metadata__, got {', '.join(wrong)}."
        )
    arrays = {}
    for name, x in zip(names, jax.tree.leaves(mean), strict=True):
        if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
            x = multihost_utils.process_allgather(x, tiled=True)
        if jax.process_index() == 0:
            arrays[name] = np.asarray(x, order="C")
    with explain_write_errors(path, "the model"):
        is_first = jax.process_index() == 0
        notes.raise_on_all(catch_failure(_write, path, arrays, record) if is_first else None)


def _write(path: epath.Path, arrays: dict[str, np.ndarray], record: dict[str, Any]) -> None:
    if path.exists() and not (path / EXPORT_RECORD).exists():
        raise CheckpointError(
            f"{path} holds something else than an export, which would be lost: give a new path."
        )
    remove_partial_writes(path.parent, f"{path.name}.")
    folder = unfinished_path(path, 0)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        data = safetensors.save(arrays)
        (folder / EXPORT_ARRAYS).write_bytes(data)
        dtypes = {name: x.dtype.name for name, x in arrays.items()}
        about = record | {"crc32": zlib.crc32(data), "dtypes": dtypes}
        (folder / EXPORT_RECORD).write_text(json.dumps(about, indent=1))
        commit_folder(folder, path)
    except BaseException:
        remove(folder)
        raise


def load_consensus(folder: str | PathLike[str], like: PyTree | None = None) -> PyTree:
    """Load the parameters that `export_consensus` wrote.

    Args:
      folder: folder of the export.
      like: a tree of arrays or structs with the same names, shapes and dtypes, whose structure the
        result has. None returns a dict by name, such as `{"layers/0/kernel": array}`.

    Returns:
      NumPy arrays of one model, as `step.init` takes them.

    Raises:
      CheckpointError: no export in the folder, damaged files, or another model than `like`.

    Communication: none; each process reads all files.
    """
    path = resolve_path(folder)
    record = _record(path)
    try:
        data = (path / EXPORT_ARRAYS).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} is damaged: {error}.", error.errno) from error
    if zlib.crc32(data) != record["crc32"]:
        raise CheckpointError(f"{path} is damaged: {EXPORT_ARRAYS} is not as it was written.")
    stored = dict(deserialize(data))
    arrays = {
        name: np.frombuffer(stored[name]["data"], jnp.dtype(dtype)).reshape(stored[name]["shape"])
        for name, dtype in record["dtypes"].items()
    }
    if like is None:
        return arrays
    names = leaf_names(like)
    wanted = dict(zip(names, map(type_text, jax.tree.leaves(like)), strict=True))
    saved = {name: type_text(x) for name, x in arrays.items()}
    wrong = [
        f"{name} is {saved.get(name, 'missing')} and not {wanted.get(name, 'missing')}"
        for name in wanted | saved
        if saved.get(name) != wanted.get(name)
    ]
    if wrong:
        raise CheckpointError(f"{path} is of another model than `like`: {'; '.join(wrong[:3])}.")
    return jax.tree.structure(like).unflatten([arrays[name] for name in names])


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
    return _record(resolve_path(folder))["extra"]


def _record(path: epath.Path) -> dict[str, Any]:
    return read_versioned_json(path, EXPORT_RECORD, _FORMAT_KEY, _FORMAT)
