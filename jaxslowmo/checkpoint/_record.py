"""Records of checkpoints, as JSON next to the arrays, and the arrays that they describe.

Orbax's checkpointers wait for the other processes at barriers, so a process that cannot read its
part would leave them waiting. Its handlers do not: each process reads without the others, and they
agree on the outcome afterwards. Zarr does not notice if files were damaged. Fingerprints do.
"""

import asyncio
import json
import logging
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib.metadata import version
from pathlib import PurePath
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._support.extras import needed_by
from .._support.files import io_errno
from .._support.types import PyTree
from .._version import __version__
from ..embedding import Embeddings
from ..mesh import array_from_host, fingerprint
from ..train import ReplicaState, TrainState
from ..tree import leaf_names
from ._stages import stage_layout, stored_leaves

# The extra `train` installs both; the other files of this package import them from here.
with needed_by("jaxslowmo.checkpoint"):
    import orbax.checkpoint as ocp
    from etils import epath


FORMAT = 3  # 2 kept anchors in blocks, in the state of the optimizer
SHARED = "exchange/shared/"  # begins the names of leaves that all replicas have together
ARRAYS, RECORD = "state", "record"  # the two items of a checkpoint
_FORMAT_KEY = "jaxslowmo_checkpoint"


class CheckpointError(RuntimeError):
    """Raised if a checkpoint cannot be written or used; the message says what can be done.

    Attributes:
      errno: number of the operating system's error that caused it, on any process; None if there
        was none.
      reason: the cause alone, without its consequences and what can be done.
      older_step: step of an older checkpoint that `fallback=True` would restore, if this one cannot
        be read; None otherwise.
    """

    def __init__(
        self,
        message: str,
        errno: int | None = None,
        reason: str | None = None,
        older_step: int | None = None,
    ) -> None:
        super().__init__(message)
        self.errno, self.reason = errno, message if reason is None else reason
        self.older_step = older_step


class UnreadableError(CheckpointError):
    """Raised if files are missing, truncated or from another library; an older one may be whole."""


class UnansweredError(CheckpointError):
    """Raised if another process did not answer in time; the checkpoint may be complete or not."""


class LeafRecord(NamedTuple):
    """One array of a checkpoint.

    Attributes:
      key: name under which orbax stores it.
      name: name of the leaf in the state, such as `"params/w"`.
      shape: stacked shape, `(replicas, *s)`; of what all replicas have together its own shape.
      dtype: name of its dtype.
      key_impl: implementation of PRNG keys, which are stored as their data; "" for other arrays.
    """

    key: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    key_impl: str = ""

    @property
    def own_shape(self) -> tuple[int, ...]:
        """The shape of one replica's part, or of what all replicas have together."""
        return self.shape if self.name.startswith(SHARED) else self.shape[1:]

    def text(self) -> str:
        """Return dtype and shape of one replica's part, for messages."""
        kind = f"key<{self.key_impl}>" if self.key_impl else self.dtype
        return f"{kind}[{','.join(map(str, self.own_shape))}]"

    def struct(self, sharding: Any = None) -> jax.ShapeDtypeStruct:
        """Return the type of the array as it is stored."""
        words = ()
        if self.key_impl:  # the shape of the data of one key
            key = lambda: jax.random.key_data(jax.random.key(0, impl=self.key_impl))  # noqa: E731
            words = jax.eval_shape(key).shape
        return jax.ShapeDtypeStruct((*self.shape, *words), self.dtype, sharding=sharding)


@dataclass(frozen=True)
class Record:
    """A description of a checkpoint and its arrays; all but `leaves` is plain JSON.

    Attributes:
      replicas: number of replicas.
      parts: for each leaf of the parameters, or of a library's state, the shape of a replica's part
        on one of its devices.
      leaves: records of the leaves in flattening order.
      layout: the places of leaves in buffers of stages, as `stage_layout` returns it. None: there
        are no stages.
      empty: names of the empty nodes among what each replica has for its exchanges.
      table_rows: the number of rows of each embedding table, which arrays with padding do not show.
        None: there are no tables, or they were not given.
      step: number of updates so far.
      prints: fingerprints of the arrays in the order of `leaves`.
      extra: the `extra` of the caller of `save`.
      metrics: the `metrics` of the caller of `save`.
    """

    replicas: int
    parts: list[list[int]]
    leaves: list[LeafRecord]
    layout: dict[str, Any] | None
    empty: list[str]
    table_rows: Mapping[str, int] | None
    step: int = 0
    prints: list[list[int]] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the record as it is stored, with a checksum."""
        packages = {package: version(package) for package in ("jax", "orbax-checkpoint")}
        content = {**vars(self), "versions": {"jaxslowmo": __version__, **packages}}
        return {_FORMAT_KEY: FORMAT, "crc32": _crc32(content), **content}

    @property
    def made_by(self) -> str:
        """The function that makes the steps of such a state."""
        is_of_library = all(leaf.name != "rng" for leaf in self.leaves)
        return "js.with_exchange" if is_of_library else "js.make_train_step"

    def without_stages(self) -> "Record":
        """Return the record of the state with the model's trees in place of those of stages.

        Its leaves are those of `stored_leaves`. Each has the key of the array that holds it.
        """
        leaves = []
        for name, index, place in stored_leaves(self.layout, [x.name for x in self.leaves]):
            leaf = self.leaves[index]._replace(name=name)
            if place is not None:
                lead = leaf.shape[: len(leaf.shape) - len(leaf.own_shape)]
                leaf = leaf._replace(shape=(*lead, *place.leaf.shape))
            leaves.append(leaf)
        return replace(self, leaves=leaves, layout=None)

    def read(self, path: epath.Path, shardings: Iterable[Any]) -> list[Any]:
        """Read this process's part of the arrays; without a sharding a whole NumPy array."""
        pairs = zip(self.leaves, shardings, strict=True)
        return read_arrays(path / ARRAYS, {leaf.key: leaf.struct(to) for leaf, to in pairs})

    def check_fingerprints(self, path: epath.Path, prints: list[list[int]]) -> None:
        """Raise `UnreadableError` unless arrays that were read have the saved fingerprints."""
        saved = zip(self.leaves, prints, self.prints, strict=True)
        if wrong := [leaf.name for leaf, one, own in saved if one != own]:
            raise UnreadableError(
                f"{path} is damaged: it gives other values than were saved in "
                f"{', '.join(wrong[:5])}."
            )


def make_record(
    state: TrainState | ReplicaState, embeddings: Embeddings | None = None, **about: Any
) -> Record:
    """Return the record of a state of arrays or of types, with further fields `about` it."""
    leaves = leaves_by_name(state).items()
    sharded = state.params if isinstance(state, TrainState) else state.state
    rows = None
    if embeddings is not None:
        rows = {name: table.num_rows for name, table in embeddings.tables.items()}
    return Record(
        replicas=state.step.shape[0],
        parts=[_part_shape(x) for x in jax.tree.leaves(sharded)],
        leaves=[_leaf_record(i, name, leaf) for i, (name, leaf) in enumerate(leaves)],
        layout=stage_layout(state),
        empty=_empty_nodes(state.exchange.local),
        table_rows=rows,
        **about,
    )


def _leaf_record(index: int, name: str, leaf: Any) -> LeafRecord:
    key = f"{index:04d}-{re.sub(r'[^0-9A-Za-z_.-]', '_', name)}"[:120]
    # `key_impl` needs an array, and `leaf` may be a type.
    impl = str(jax.random.key_impl(jnp.empty((), leaf.dtype))) if is_key(leaf) else ""
    dtype = "uint32" if impl else jnp.dtype(leaf.dtype).name
    return LeafRecord(key, name, tuple(leaf.shape), dtype, impl)


def is_key(leaf: Any) -> bool:
    """Return whether a leaf, an array or its type, holds typed PRNG keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _part_shape(x: Any) -> list[int]:
    sharding = getattr(x, "sharding", None)
    return list(x.shape if sharding is None else sharding.shard_shape(x.shape))[1:]


def _empty_nodes(tree: PyTree) -> list[str]:
    is_empty = lambda x: isinstance(x, tuple) and not x  # noqa: E731
    paths = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_empty)[0]
    return [
        jax.tree_util.keystr(path, simple=True, separator="/") for path, x in paths if is_empty(x)
    ]


def leaves_by_name(tree: PyTree) -> dict[str, Any]:
    """Return the leaves of a tree by name, in order; of equal names all but one are numbered."""
    found: dict[str, Any] = {}
    times: Counter[str] = Counter()
    for name, leaf in zip(leaf_names(tree), jax.tree.leaves(tree), strict=True):
        found[f"{name}#{times[name]}" if times[name] else name] = leaf
        times[name] += 1
    return found


def storable_leaves(tree: PyTree) -> list[jax.Array]:
    """Return the leaves of a state as they are stored: PRNG keys as their data."""
    return [jax.random.key_data(x) if is_key(x) else x for x in jax.tree.leaves(tree)]


def read_record(path: epath.Path) -> Record:
    """Read the record of a checkpoint.

    Raises:
      UnreadableError: a missing or damaged file, another library's checkpoint, another format.
    """
    value = read_versioned_json(path, f"{RECORD}/metadata", _FORMAT_KEY, FORMAT)
    content = {key: x for key, x in value.items() if key not in (_FORMAT_KEY, "crc32")}
    if _crc32(content) != value.get("crc32"):
        raise UnreadableError(f"{path} is damaged: its record is not as it was written.")
    known: dict[str, Any] = {x.name: value.get(x.name) for x in fields(Record)}
    leaves = (LeafRecord(*entry) for entry in value["leaves"])
    known["leaves"] = [leaf._replace(shape=tuple(leaf.shape)) for leaf in leaves]
    return Record(**known)


def read_versioned_json(
    path: epath.Path, name: str, format_key: str, number: int
) -> dict[str, Any]:
    """Return the JSON of a file that this package wrote.

    Args:
      path: path of the checkpoint or the export.
      name: path of the file in it.
      format_key: name of the value that only files of this kind have: the number of their format.
      number: the format that can be read.

    Raises:
      UnreadableError: a missing or damaged file, another library's, another format.
    """
    try:
        value = json.loads((path / name).read_text())
    except (OSError, ValueError) as error:
        raise UnreadableError(
            f"{path} is damaged, or was not written by Checkpoints or export_consensus: {name}: "
            f"{getattr(error, 'strerror', None) or first_line(error)}.",
            io_errno(error),
        ) from error
    if not isinstance(value, dict) or format_key not in value:
        raise UnreadableError(
            f"{path} was not written by jaxslowmo: {name} has no {format_key!r}. Read it with the "
            "library that wrote it."
        )
    if value[format_key] != number:
        # A damaged digit looks the same, so the error lets `fallback` try an older checkpoint.
        raise UnreadableError(
            f"{path} has format {value[format_key]}, and this jaxslowmo reads format {number}: use "
            f"that which wrote it, {value.get('versions', 'another')}, or the file is damaged."
        )
    return value


def _crc32(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def checked_json(owner: str, extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return `extra` as JSON will return it when it is read.

    Raises:
      ValueError: `extra` is no plain JSON.
    """
    try:
        return json.loads(json.dumps({} if extra is None else dict(extra)))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{owner}: `extra` must be plain JSON: {error}.") from None


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, at most 300 characters; else its type."""
    return str(error).strip().split("\n")[0][:300] or type(error).__name__


# Reading arrays, and their fingerprints.


def read_arrays(path: epath.Path, structs: dict[str, jax.ShapeDtypeStruct]) -> list[Any]:
    """Read stored arrays.

    Args:
      path: path of the checkpoint's item that holds the arrays.
      structs: shape and dtype of each array by the name under which orbax stored it, with the
        sharding of the result: each process reads its part. Without one it is a whole NumPy array.

    Raises:
      UnreadableError: a missing or damaged file.

    Communication: none.
    """

    def how(x: jax.ShapeDtypeStruct) -> ocp.RestoreArgs:
        if x.sharding is None:
            return ocp.RestoreArgs(restore_type=np.ndarray)
        return ocp.ArrayRestoreArgs(sharding=x.sharding, global_shape=x.shape)

    # Orbax stores no arrays of size 0.
    full = {key: x for key, x in structs.items() if x.size}
    args = ocp.args.PyTreeRestore(full, restore_args={key: how(x) for key, x in full.items()})
    reads = _Arrays(), _NumpyArrays()
    try:
        found = make_handler((jax.Array, reads[0]), (np.ndarray, reads[1])).restore(path, args=args)
        if failed := [one.failure for one in reads if one.failure]:
            raise failed[0]
    except Exception as error:  # tensorstore raises many kinds
        raise UnreadableError(f"{path.parent} is damaged: {first_line(error)}.") from error
    return [
        found[key] if x.size else place_array(np.zeros(x.shape, x.dtype), x.sharding)
        for key, x in structs.items()
    ]


def place_array(x: Any, sharding: jax.sharding.Sharding | None) -> Any:
    """Return an array of the host with this sharding; itself for None."""
    return x if sharding is None else array_from_host(x.shape, sharding, lambda index: x[index])


@jax.jit
def _jitted_fingerprints(arrays: list[jax.Array]) -> jax.Array:
    return jnp.stack([fingerprint(x) for x in arrays])


def fingerprints(arrays: Sequence[Any]) -> list[list[int]]:
    """Return a fingerprint, two numbers of 32 bits, for each array; it does not depend on layouts.

    Communication: one all-reduce of 8 bytes per array over all devices that it is split over.
    """
    return jax.device_get(_jitted_fingerprints(list(arrays)).addressable_data(0)).tolist()


_CHUNK = 1 << 20  # elements that are hashed at once, which bounds the additional memory


def host_fingerprint(x: np.ndarray) -> list[int]:
    """Return the fingerprint of an array on the host, equal to that of `fingerprints`."""
    flat, total = x.reshape(-1), np.zeros(2, np.uint32)
    for start in range(0, flat.size, _CHUNK):
        total += fingerprint(flat[start : start + _CHUNK], np, start)
    return total.tolist()


# Orbax without its barriers and logs.


def make_handler(*kinds: tuple[type, Any]) -> ocp.PyTreeCheckpointHandler:
    """Return orbax's handler of trees, without its store of array metadata.

    With that store, a process would wait ten minutes for process 0's folder.

    Args:
      *kinds: pairs of a class of arrays and orbax's handler of such arrays.
    """
    return ocp.PyTreeCheckpointHandler(
        multiprocessing_options=ocp.options.MultiprocessingOptions(
            active_processes=set(range(jax.process_count())), barrier_sync_key_prefix="jaxslowmo"
        ),
        type_handler_registry=_types.create_type_handler_registry(*kinds),
    )


_types = ocp.type_handlers


class _WholeReads(_types.TypeHandler):
    """A handler of orbax's whose reads have all ended when it returns, also if some have failed.

    Orbax ends its event loop when the first read fails. The others would go on without one, and
    each would print an exception that nobody can handle, at whatever time it is collected.
    """

    failure: Exception | None = None

    async def deserialize(self, infos: Any, args: Any = None) -> Any:
        before = asyncio.all_tasks()
        try:
            return await super().deserialize(infos, args)
        except Exception as error:  # tensorstore raises many kinds
            self.failure = error
            while reads := asyncio.all_tasks() - before:
                await asyncio.wait(reads)
            return [None for _ in infos]


class _Arrays(_WholeReads, _types.ArrayHandler):
    pass


class _NumpyArrays(_WholeReads, _types.NumpyHandler):
    pass


def quiet_orbax() -> None:
    """Drop what orbax logs: it logs every file that it touches.

    Records of other users of the same logger are kept. Orbax's errors are dropped, too: it logs a
    save that fails in the background with its stack, and the next `save`, `wait` or `close` raises
    it anyway. If one of several arrays cannot be written, each of the others reports, with its
    stack, that the event loop is closed. These reports are dropped as well.
    """
    logger = logging.getLogger("absl")  # orbax logs through absl
    if _is_not_from_orbax in logger.filters:
        return
    logger.addFilter(_is_not_from_orbax)
    logging.getLogger("asyncio").addFilter(_is_not_about_orbax)
    previous_hook = sys.unraisablehook

    def ignore_closed_loops(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            previous_hook(unraisable)

    sys.unraisablehook = ignore_closed_loops


def _is_not_from_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in PurePath(record.pathname).parts


def _is_not_about_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.getMessage()
