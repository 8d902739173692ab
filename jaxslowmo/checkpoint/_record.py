"""Records of checkpoints: everything that is needed to read the arrays, as JSON next to them."""

import base64
import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .._support.types import PyTree
from .._version import __version__
from ..mesh import model_axes, only_over, specs_of_leaves
from ..train import TrainState
from ..transform import ParameterTransform, SavedForm, StatePlacement
from ..tree import leaf_names
from ._folder import ARRAYS, RECORD, CheckpointError, UnreadableError, epath
from ._stages import layout_of, parts_of, spec_to_json

FORMAT = 1
_MARK = "jaxslowmo_checkpoint"


@dataclass(frozen=True)
class LeafRecord:
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


@dataclass(frozen=True)
class Record:
    """A description of a checkpoint and its arrays.

    Attributes:
      step: number of updates so far.
      replicas: number of replicas.
      axis_sizes: sizes of the mesh's axes by name. None for a mesh without devices, which the
        arrays do not show.
      automatic: axes over which parameters are sharded inside a replica.
      shards: the specs by which state that is kept in shards is cut: a `PartitionSpec` over
        `automatic` for each leaf of the parameters. None: unknown.
      leaves: records of the leaves in flattening order.
      prints: fingerprints of the arrays in the order of `leaves`.
      extra: the `extra` of the caller of `save`.
      layout: the places of leaves in buffers of stages, plain JSON as `layout_of` returns it. None:
        there are no stages.
      division: how the state of `sync` divides the parameters, plain JSON that `Sync.division`
        returns. None: it does not, or the state is not the result of a step.
    """

    step: int
    replicas: int
    axis_sizes: Mapping[str, int] | None
    automatic: tuple[str, ...]
    shards: tuple[P, ...] | None
    leaves: tuple[LeafRecord, ...]
    prints: tuple[tuple[int, int], ...]
    extra: dict[str, Any]
    layout: dict[str, Any] | None = None
    division: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the record as it is stored, with a checksum."""
        content = {
            "step": self.step,
            "replicas": self.replicas,
            "axes": None if self.axis_sizes is None else [list(a) for a in self.axis_sizes.items()],
            "automatic": list(self.automatic),
            "shards": None if self.shards is None else [spec_to_json(s) for s in self.shards],
            "leaves": [
                [leaf.key, leaf.name, list(leaf.shape), leaf.dtype, leaf.key_impl]
                for leaf in self.leaves
            ],
            "prints": [list(p) for p in self.prints],
            "extra": self.extra,
            "layout": self.layout,
            "division": self.division,
            "versions": {"jaxslowmo": __version__}
            | {package: version(package) for package in ("jax", "orbax-checkpoint")},
        }
        return {_MARK: FORMAT, "crc32": _crc32(content), **content}

    def only(self, part: str) -> "Record":
        """Return the record of one field of the state, such as "params"."""
        leaves = tuple(x for x in self.leaves if x.name.split("/")[0] == part)
        return replace(self, leaves=leaves)

    def whole(self) -> "Record":
        """Return the record of the state with the model's trees in place of those of stages.

        Its leaves are those that `parts_of` lists. Each has the key of the array that holds it.
        """
        leaves = []
        for name, index, place in parts_of(self.layout, [x.name for x in self.leaves]):
            leaf = replace(self.leaves[index], name=name)
            if place is not None:
                leaf = replace(leaf, shape=(*leaf.shape[:1], *place.leaf.shape))
            leaves.append(leaf)
        return replace(self, leaves=tuple(leaves), layout=None)

    def placement(self, like: StatePlacement, form: SavedForm | None = None) -> StatePlacement:
        """Return the placement of the arrays; values that are unknown are taken from `like`."""
        certain = self.axis_sizes is not None
        sizes = self.axis_sizes if self.axis_sizes is not None else like.axis_sizes
        automatic = frozenset(self.automatic)
        return StatePlacement(
            self.replicas, sizes, automatic, certain, self.shards, form, self.division
        )


def read_json(path: epath.Path) -> Any:
    """Return the JSON next to the arrays in this folder; None if there is no such file.

    Raises:
      UnreadableError: the file cannot be read, or is no JSON.
    """
    file = path / RECORD / "metadata"
    try:
        return json.loads(file.read_text()) if file.exists() else None
    except (OSError, ValueError) as error:
        raise UnreadableError(f"{path} is damaged: {file} is no JSON ({error}).") from error


def read_record(path: epath.Path) -> Record:
    """Read the record of a checkpoint.

    Raises:
      UnreadableError: a missing or damaged file, another library's checkpoint, another format.
    """
    value = read_json(path)
    if value is None:
        raise UnreadableError(
            f"{path} has no file {RECORD}/metadata: it is damaged, or was not written by "
            "jaxslowmo.checkpoint."
        )
    if not isinstance(value, dict) or _MARK not in value:
        raise UnreadableError(
            f"{path} was not written by jaxslowmo.checkpoint: give the folder of a run of "
            "jaxslowmo, or read it with the library that wrote it."
        )
    if value[_MARK] != FORMAT:
        # A damaged digit looks the same, so the error lets `fallback` try an older checkpoint.
        raise UnreadableError(
            f"{path} has format {value[_MARK]}, written by {value.get('versions')}, and this "
            f"version of jaxslowmo reads format {FORMAT}: use the version that wrote it. If "
            "that is this one, the record is damaged."
        )
    content = {key: x for key, x in value.items() if key not in (_MARK, "crc32")}
    if _crc32(content) != value.get("crc32"):
        raise UnreadableError(f"{path} is damaged: its record is not as it was written.")
    try:
        axes = value["axes"]
        return Record(
            step=value["step"],
            replicas=value["replicas"],
            axis_sizes=None if axes is None else dict(axes),
            automatic=tuple(value["automatic"]),
            shards=_shards_from_json(value),
            leaves=tuple(_leaf_from_json(*entry) for entry in value["leaves"]),
            prints=tuple((first, second) for first, second in value["prints"]),
            extra=value["extra"],
            layout=value["layout"],
            division=value.get("division"),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UnreadableError(f"{path} has a damaged record ({error!r}).") from error


def checked_json(owner: str, extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return `extra` as JSON will return it when it is read.

    Raises:
      ValueError: `extra` is no plain JSON.
    """
    try:
        return json.loads(json.dumps({} if extra is None else dict(extra)))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{owner}: `extra` must be plain JSON: {error}.") from None


def record_of(step: int, state: TrainState, extra: dict[str, Any]) -> Record:
    """Return the record, without fingerprints, of a state of arrays or of types."""
    sharding = getattr(state.step, "sharding", None)
    axis_sizes, automatic, shards, division = None, frozenset(), None, None
    if isinstance(sharding, NamedSharding):
        axis_sizes = dict(sharding.mesh.shape)
        entry = sharding.spec[0] if sharding.spec else None
        over = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        automatic = model_axes(state.params, sharding.mesh, over)  # pyright: ignore
    # Arrays do not show the shards' specs: they are unknown for a state that no step returned.
    if state.known_layout is not None:
        shards = specs_of_leaves(state.known_layout.shards, state.params)
        division = state.known_layout.division
    names = leaf_names(state)
    leaves = tuple(
        _leaf_record(i, name, leaf)
        for i, (name, leaf) in enumerate(zip(names, jax.tree.leaves(state), strict=True))
    )
    return Record(
        step=step,
        replicas=state.step.shape[0],
        axis_sizes=axis_sizes,
        automatic=tuple(sorted(automatic)),
        shards=shards,
        leaves=leaves,
        prints=(),
        extra=extra,
        layout=layout_of(state),
        division=None if division is None else dict(division),
    )


def _leaf_from_json(key: str, name: str, shape: list[int], dtype: str, impl: str) -> LeafRecord:
    if name == "rng" and impl:  # 0.2.0 had a typed key here, and stored what is now the leaf
        words = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl))).shape
        return LeafRecord(key, name, (*shape, *words), dtype)
    return LeafRecord(key, name, tuple(shape), dtype, impl)


def _shards_from_json(value: dict[str, Any]) -> tuple[P, ...] | None:
    """Return the specs of shards; None where they are unknown."""
    if value["shards"] is not None:
        return tuple(P(*(tuple(e) or None for e in spec)) for spec in value["shards"])
    if value["automatic"]:
        return None
    # Without axes inside a replica, shards were cut from whole leaves.
    return (P(),) * sum(name.split("/")[0] == "params" for _, name, *_ in value["leaves"])


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


_SHARDINGS = "_sharding"  # orbax's file with the sharding of each array


def has_equal_layout(
    path: epath.Path,
    record: Record,
    structs: PyTree,
    wanted: list[Any],
    sync: ParameterTransform | None,
    old: StatePlacement,
    new: StatePlacement,
) -> bool:
    """Return whether the arrays have the layout of the new run, including state in shards.

    Args:
      path: path of the checkpoint.
      record: record of the checkpoint.
      structs: types of the state of the new run's parameter transform.
      wanted: types of the new run's arrays, in the order of the leaves.
      sync: the parameter transform of the new run, or None.
      old: placement of the checkpoint.
      new: placement of the new run.

    Raises:
      CheckpointError: the checkpoint does not record how shards were cut, and the files do not show
        that they were cut as in the new run.
    """
    same_mesh = _large_axes(old) == _large_axes(new) and old.automatic == new.automatic
    is_equal = same_mesh and old.form is None
    if sync is None or not sync.shards(structs):
        return is_equal
    if old.specs is None:
        if is_equal and _has_equal_shardings(path, record, wanted):
            return True
        raise CheckpointError(
            f"{path} does not record how the anchor and its related state were cut inside a "
            f"replica (over {', '.join(sorted(old.automatic))}), since the state was not the "
            "result of a step. Restore it with the same mesh and `param_specs`, and save it again "
            "after a step."
        )
    return is_equal and _cuts(old) == _cuts(new)


def _large_axes(at: StatePlacement) -> dict[str, int]:
    return {name: size for name, size in at.axis_sizes.items() if size > 1}


def _cuts(at: StatePlacement) -> list[P]:
    return [only_over(spec, at.automatic) for spec in at.specs or ()]


def _has_equal_shardings(path: epath.Path, record: Record, wanted: list[Any]) -> bool:
    """Return whether orbax's file of shardings has those of `wanted` for all arrays."""
    try:
        notes = json.loads((path / ARRAYS / _SHARDINGS).read_text())
    except (OSError, ValueError):
        return False
    for leaf, struct in zip(record.leaves, wanted, strict=True):
        note = notes.get(base64.b64encode(leaf.key.encode()).decode())
        if note is None or not isinstance(struct.sharding, NamedSharding):
            return False
        axes = frozenset(struct.sharding.mesh.axis_names)
        entries = [tuple(e) if isinstance(e, list) else e for e in _entries(note)]
        if only_over(entries, axes) != only_over(struct.sharding.spec, axes):
            return False
    return True


def _entries(note: str) -> list[Any]:
    entries = json.loads(note).get("partition_spec")
    return entries if isinstance(entries, list) else []
