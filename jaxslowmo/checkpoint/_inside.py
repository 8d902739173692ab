"""How a state lies inside its replicas: as it was saved, and as it shall be."""

import base64
import json
from typing import Any

from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .._support.types import PyTree
from ..mesh import only_over
from ..transform import ParameterTransform, StatePlacement
from ._folder import ARRAYS, CheckpointError
from ._orbax import epath
from ._record import Record

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
