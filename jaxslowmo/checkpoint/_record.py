"""Records of checkpoints: everything that is needed to read the arrays, as JSON next to them."""

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from importlib.metadata import version
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .._support.files import io_errno
from .._support.types import PyTree
from .._version import __version__
from ..mesh import axis_names, inner_specs, model_axes
from ..train import TrainState
from ..tree import leaf_names
from ._arrays import first_line, prints_of
from ._folder import RECORD, UnreadableError, epath
from ._placement import SavedForm, StatePlacement
from ._stages import layout_of, parts_of, spec_to_json

FORMAT = 2  # 1 kept the anchor in flat buffers
_MARK = "jaxslowmo_checkpoint"


class LeafRecord(NamedTuple):
    """One array of a checkpoint.

    Attributes:
      key: name under which orbax stores it.
      name: name of the leaf in the state, such as `"params/w"`.
      shape: stacked shape, `(replicas, *s)`.
      dtype: name of its dtype.
      key_impl: implementation of PRNG keys, which are stored as their data; "" for other arrays.
    """

    key: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    key_impl: str = ""

    def text(self) -> str:
        """Return dtype and shape of one replica's part, for messages."""
        kind = f"key<{self.key_impl}>" if self.key_impl else self.dtype
        return f"{kind}[{','.join(map(str, self.shape[1:]))}]"

    def struct(self, sharding: Any = None) -> jax.ShapeDtypeStruct:
        """Return the type of the array as it is stored."""
        words = _key_words(self.key_impl) if self.key_impl else ()
        return jax.ShapeDtypeStruct((*self.shape, *words), self.dtype, sharding=sharding)


def _key_words(impl: str) -> tuple[int, ...]:
    """Return the shape of the data of one PRNG key."""
    return jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl))).shape


@dataclass(frozen=True)
class Record:
    """A description of a checkpoint and its arrays; all but `leaves` is plain JSON.

    Attributes:
      replicas: number of replicas.
      axes: pairs of name and size of the mesh's axes. None for a mesh without devices, which the
        arrays do not show.
      automatic: axes over which parameters are sharded inside a replica.
      specs: for each leaf of the parameters the axes among `automatic` that split each dimension.
      leaves: records of the leaves in flattening order.
      layout: the places of leaves in buffers of stages, as `layout_of` returns it. None: there are
        no stages.
      table_rows: the number of rows of each embedding table. None: there are none, or the state is
        not the result of a step.
      step: number of updates so far.
      prints: fingerprints of the arrays in the order of `leaves`.
      extra: the `extra` of the caller of `save`.
      metrics: the `metrics` of the caller of `save`.
    """

    replicas: int
    axes: list[tuple[str, int]] | None
    automatic: list[str]
    specs: list[list[list[str]]]
    leaves: list[LeafRecord]
    layout: dict[str, Any] | None
    table_rows: Mapping[str, int] | None
    step: int = 0
    prints: list[list[int]] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the record as it is stored, with a checksum."""
        packages = {package: version(package) for package in ("jax", "orbax-checkpoint")}
        content = {**vars(self), "versions": {"jaxslowmo": __version__, **packages}}
        return {_MARK: FORMAT, "crc32": _crc32(content), **content}

    def with_arrays(self, stored: list[jax.Array], **about: Any) -> "Record":
        """Return the record with the fingerprints of these arrays, and with `about` them.

        Communication: that of `prints_of`.
        """
        return replace(self, prints=prints_of(stored), **about)

    def only(self, part: str) -> "Record":
        """Return the record of one field of the state, such as "params"."""
        return replace(self, leaves=[x for x in self.leaves if x.name.split("/")[0] == part])

    def whole(self) -> "Record":
        """Return the record of the state with the model's trees in place of those of stages.

        Its leaves are those that `parts_of` lists. Each has the key of the array that holds it.
        """
        leaves = []
        for name, index, place in parts_of(self.layout, [x.name for x in self.leaves]):
            leaf = self.leaves[index]._replace(name=name)
            if place is not None:
                leaf = leaf._replace(shape=(*leaf.shape[:1], *place.leaf.shape))
            leaves.append(leaf)
        return replace(self, leaves=leaves, layout=None)

    def placement(
        self, axis_sizes: Mapping[str, int], form: SavedForm | None = None
    ) -> StatePlacement:
        """Return the placement of the arrays; `axis_sizes` are those of the mesh if unknown."""
        return StatePlacement(
            self.replicas,
            axis_sizes if self.axes is None else dict(self.axes),
            frozenset(self.automatic),
            self.axes is not None,
            form,
            tuple(P(*map(tuple, spec)) for spec in self.specs),
        )

    def check_prints(self, path: epath.Path, prints: list[list[int]]) -> None:
        """Raise `UnreadableError` unless arrays that were read have the saved fingerprints."""
        saved = zip(self.leaves, prints, self.prints, strict=True)
        if wrong := [leaf.name for leaf, one, own in saved if one != own]:
            raise UnreadableError(
                f"{path} is damaged: it gives other values than were saved in "
                f"{', '.join(wrong[:5])}."
            )


def read_record(path: epath.Path) -> Record:
    """Read the record of a checkpoint.

    Raises:
      UnreadableError: a missing or damaged file, another library's checkpoint, another format.
    """
    value = read_marked(path, f"{RECORD}/metadata", _MARK, FORMAT)
    content = {key: x for key, x in value.items() if key not in (_MARK, "crc32")}
    if _crc32(content) != value.get("crc32"):
        raise UnreadableError(f"{path} is damaged: its record is not as it was written.")
    known: dict[str, Any] = {x.name: value.get(x.name) for x in fields(Record)}
    known["leaves"] = [_leaf_from_json(*entry) for entry in value["leaves"]]
    return Record(**known)


def read_marked(path: epath.Path, name: str, mark: str, number: int) -> dict[str, Any]:
    """Return the JSON of a file that this package wrote.

    Args:
      path: path of the checkpoint or the export.
      name: path of the file in it.
      mark: name of the value that only files of this kind have: the number of their format.
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
    if not isinstance(value, dict) or mark not in value:
        raise UnreadableError(
            f"{path} was not written by jaxslowmo: {name} has no {mark!r}. Give a "
            "folder that jaxslowmo wrote, or read it with the library that wrote it."
        )
    if value[mark] != number:
        # A damaged digit looks the same, so the error lets `fallback` try an older checkpoint.
        raise UnreadableError(
            f"{path} has format {value[mark]}, written by {value.get('versions', 'another')}, and "
            f"this version of jaxslowmo reads format {number}: use the version that wrote it. If "
            "that is this one, the file is damaged."
        )
    return value


def checked_json(owner: str, extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return `extra` as JSON will return it when it is read.

    Raises:
      ValueError: `extra` is no plain JSON.
    """
    try:
        return json.loads(json.dumps({} if extra is None else dict(extra)))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{owner}: `extra` must be plain JSON: {error}.") from None


def record_of(state: TrainState) -> Record:
    """Return the record of a state of arrays or of types; `with_arrays` completes it."""
    sharding, known = getattr(state.step, "sharding", None), state.known_layout
    axes, automatic, table_rows = None, frozenset(), None
    if isinstance(sharding, NamedSharding):
        axes = list(sharding.mesh.shape.items())
        entry = sharding.spec[0] if sharding.spec else None
        automatic = model_axes(state.params, sharding.mesh, axis_names(entry or ()))  # pyright: ignore
    if known is not None:
        table_rows = known.table_rows
    named = enumerate(zip(leaf_names(state), jax.tree.leaves(state), strict=True))
    return Record(
        replicas=state.step.shape[0],
        axes=axes,
        automatic=sorted(automatic),
        specs=[spec_to_json(x) for x in jax.tree.leaves(inner_specs(state.params, automatic))],
        leaves=[_leaf_record(i, name, leaf) for i, (name, leaf) in named],
        layout=layout_of(state),
        table_rows=table_rows,
    )


def _leaf_from_json(key: str, name: str, shape: list[int], dtype: str, impl: str) -> LeafRecord:
    if name == "rng" and impl:  # 0.2.0 had a typed key here, and stored what is now the leaf
        return LeafRecord(key, name, (*shape, *_key_words(impl)), dtype)
    return LeafRecord(key, name, tuple(shape), dtype, impl)


def _crc32(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def is_key(leaf: Any) -> bool:
    """Return whether a leaf, an array or its type, holds typed PRNG keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _leaf_record(index: int, name: str, leaf: Any) -> LeafRecord:
    key = f"{index:04d}-{re.sub(r'[^0-9A-Za-z_.-]', '_', name)}"[:120]
    # `key_impl` needs an array, and `leaf` may be a type.
    impl = str(jax.random.key_impl(jnp.empty((), leaf.dtype))) if is_key(leaf) else ""
    dtype = "uint32" if impl else jnp.dtype(leaf.dtype).name
    return LeafRecord(key, name, tuple(leaf.shape), dtype, impl)


def as_stored(tree: PyTree) -> list[jax.Array]:
    """Return the leaves of a state as they are stored: PRNG keys as their data."""
    return [jax.random.key_data(x) if is_key(x) else x for x in jax.tree.leaves(tree)]
