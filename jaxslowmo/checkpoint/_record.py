"""What stands beside the arrays of a checkpoint: all that is needed to read them."""

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
from ..mesh import model_axes, only_over, specs_of_leaves
from ..train import TrainState
from ..transform import ParameterTransform, SavedForm, StatePlacement
from ..tree import leaf_names
from ._folder import ARRAYS, RECORD, CheckpointError, UnreadableError, epath
from ._stages import layout_of, parts_of, spec_to_json

FORMAT = 1
_MARK = "jaxslowmo_checkpoint"
# Fields of states that were renamed, since optax's tools set hyperparameters by these names: the
# name in checkpoints of before, the name now, and a field that tells the state class.
_RENAMED = (
    ("learning_rate", "last_rate", "made_at"),
    ("scale", "loss_scale", "hysteresis_left"),
    ("scale", "clip_factor", "norm"),
)


@dataclass(frozen=True)
class LeafRecord:
    """One array of a checkpoint.

    Attributes:
      key: under which it is stored.
      name: of the leaf in the state, such as `"params/w"`.
      shape: stacked, `(replicas, *s)`.
      dtype: its name.
      key_impl: implementation of PRNG keys, which are stored as their data; "" for other arrays.
    """

    key: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    key_impl: str = ""

    def text(self) -> str:
        """Dtype and shape of one replica, for messages."""
        kind = f"key<{self.key_impl}>" if self.key_impl else self.dtype
        return f"{kind}[{','.join(map(str, self.shape[1:]))}]"


@dataclass(frozen=True)
class Record:
    """What is known of a checkpoint beside its arrays.

    Attributes:
      step: updates so far.
      replicas: their number.
      axis_sizes: of the mesh; None for one without devices, which leaves no trace in the arrays.
      automatic: axes over which parameters are sharded inside a replica.
      shards: how state is cut that is kept in shards: a `PartitionSpec` over these axes for each
        leaf of the parameters. None: not known.
      leaves: in flattening order.
      prints: fingerprints of the arrays, in that order.
      extra: the caller's.
      layout: what lies where in buffers of stages, plain JSON as `layout_of` returns it. None:
        there are no stages, or the record is of a version that did not note it.
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

    def to_json(self) -> dict[str, Any]:
        """As it is stored."""
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
            "versions": {p: version(p) for p in ("jaxslowmo", "jax", "orbax-checkpoint")},
        }
        return {_MARK: FORMAT, "crc32": _crc32(content), **content}

    def only(self, part: str) -> "Record":
        """The record of one field of the state."""
        own = tuple(x for x in self.leaves if x.name.split("/")[0] == part)
        return replace(self, leaves=own)

    def whole(self) -> "Record":
        """Return the record of the state with the model's own trees in the places of the stages'.

        Its leaves are those that `parts_of` lists; keys are of the arrays that hold them.
        """
        leaves = []
        for name, index, place in parts_of(self.layout, [x.name for x in self.leaves]):
            leaf = replace(self.leaves[index], name=name)
            if place is not None:
                leaf = replace(leaf, shape=(*leaf.shape[:1], *place.shape))
            leaves.append(leaf)
        return replace(self, leaves=tuple(leaves), layout=None)

    def with_names_of(self, run: "Record") -> "Record":
        """Return this record with the names that `run` has for fields that were renamed.

        A name changes only where `run` has the new name and lacks the old one: parameters and the
        states of other libraries may have names that are listed in `_RENAMED`, too.
        """
        saved, wanted = {x.name for x in self.leaves}, {x.name for x in run.leaves}

        def name_now(name: str) -> str:
            state, _, field = name.rpartition("/")
            if name not in wanted and name.startswith("opt_state/"):
                for before, now, beside in _RENAMED:
                    is_state = field == before and f"{state}/{beside}" in saved
                    if is_state and f"{state}/{now}" in wanted:
                        return f"{state}/{now}"
            return name

        return replace(self, leaves=tuple(replace(x, name=name_now(x.name)) for x in self.leaves))

    def placement(self, like: StatePlacement, form: SavedForm | None = None) -> StatePlacement:
        """Where the arrays come from; what is not known is taken from `like`."""
        certain = self.axis_sizes is not None
        sizes = self.axis_sizes if self.axis_sizes is not None else like.axis_sizes
        automatic = frozenset(self.automatic)
        return StatePlacement(self.replicas, sizes, automatic, certain, self.shards, form)


def read_json(path: epath.Path) -> Any:
    """Return what stands beside the arrays in this folder; None where there is no such file.

    Raises:
      UnreadableError: the file cannot be read, or holds something else than JSON.
    """
    file = path / RECORD / "metadata"
    try:
        return json.loads(file.read_text()) if file.exists() else None
    except (OSError, ValueError) as error:
        raise UnreadableError(f"{path} is damaged: {file} is no JSON ({error}).") from error


def read_record(path: epath.Path) -> Record:
    """The record of a checkpoint.

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
        # Also what a damaged digit looks like: an older checkpoint may do.
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
            leaves=tuple(
                LeafRecord(key, name, tuple(shape), dtype, impl)
                for key, name, shape, dtype, impl in value["leaves"]
            ),
            prints=tuple((first, second) for first, second in value["prints"]),
            extra=value["extra"],
            layout=value.get("layout"),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UnreadableError(f"{path} has a damaged record ({error!r}).") from error


def checked_json(owner: str, extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """`extra` as it will come back.

    Raises:
      ValueError: it is no JSON.
    """
    try:
        return json.loads(json.dumps({} if extra is None else dict(extra)))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{owner}: `extra` must be plain JSON: {error}.") from None


def record_of(step: int, state: TrainState, extra: dict[str, Any]) -> Record:
    """The record of a state, which may be abstract; without fingerprints."""
    sharding = getattr(state.step, "sharding", None)
    axis_sizes, automatic, shards = None, frozenset(), None
    if isinstance(sharding, NamedSharding):
        axis_sizes = dict(sharding.mesh.shape)
        entry = sharding.spec[0] if sharding.spec else None
        over = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        automatic = model_axes(state.params, sharding.mesh, over)  # pyright: ignore
    # Arrays do not tell: of a state that was put together otherwise than by a step it is not known.
    if state.known_layout is not None:
        shards = specs_of_leaves(state.known_layout.shards, state.params)
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
    )


def _shards_from_json(value: dict[str, Any]) -> tuple[P, ...] | None:
    """Records of 0.1.0 do not tell; where parameters were not sharded, state was cut whole."""
    if value.get("shards") is not None:
        return tuple(P(*(tuple(e) or None for e in spec)) for spec in value["shards"])
    if value["automatic"]:
        return None
    return (P(),) * sum(name.split("/")[0] == "params" for _, name, *_ in value["leaves"])


def _crc32(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def is_key(leaf: Any) -> bool:
    """Whether these are typed PRNG keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _leaf_record(index: int, name: str, leaf: Any) -> LeafRecord:
    key = f"{index:04d}-{re.sub(r'[^0-9A-Za-z_.-]', '_', name)}"[:120]
    # Of an empty array: of types alone jax does not tell.
    impl = str(jax.random.key_impl(jnp.empty((), leaf.dtype))) if is_key(leaf) else ""
    dtype = "uint32" if impl else jnp.dtype(leaf.dtype).name
    return LeafRecord(key, name, tuple(leaf.shape), dtype, impl)


def as_stored(tree: PyTree) -> list[jax.Array]:
    """The leaves of a state as they are stored: PRNG keys as their data."""
    return [jax.random.key_data(x) if is_key(x) else x for x in jax.tree.leaves(tree)]


_SHARDINGS = "_sharding"  # where orbax notes how each array lay


def lies_alike(
    path: epath.Path,
    record: Record,
    structs: PyTree,
    wanted: list[Any],
    sync: ParameterTransform | None,
    old: StatePlacement,
    new: StatePlacement,
) -> bool:
    """Whether state that is kept in shards lies inside a replica as it shall.

    Args:
      path: of the checkpoint.
      record: of it.
      structs: what the new run's parameter transform keeps.
      wanted: types of the new run's arrays, in the order of the leaves.
      sync: the parameter transform.
      old: where the checkpoint comes from.
      new: where it goes.

    Raises:
      CheckpointError: of a version that did not note how shards were cut, where nothing else tells
        that it was as they shall be.
    """
    same_mesh = _large_axes(old) == _large_axes(new) and old.automatic == new.automatic
    alike = same_mesh and old.form is None
    if sync is None or not sync.shards(structs):
        return alike
    if old.specs is None:
        if alike and _arrays_lie_alike(path, record, wanted):
            return True
        raise CheckpointError(
            f"{path} does not tell how the anchor and what goes with it were cut inside a replica "
            f"(over {', '.join(sorted(old.automatic))}): a version of jaxslowmo before 0.2 wrote "
            "it, or the state was not the result of a step. Restore it with the same mesh and "
            "`param_specs`, and save it again after a step."
        )
    return alike and _cuts(old) == _cuts(new)


def _large_axes(at: StatePlacement) -> dict[str, int]:
    return {name: size for name, size in at.axis_sizes.items() if size > 1}


def _cuts(at: StatePlacement) -> list[P]:
    return [only_over(spec, at.automatic) for spec in at.specs or ()]


def _arrays_lie_alike(path: epath.Path, record: Record, wanted: list[Any]) -> bool:
    """Whether orbax's notes tell that all arrays lay over the axes of a mesh as they shall."""
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
    found = json.loads(note).get("partition_spec")
    return found if isinstance(found, list) else []
