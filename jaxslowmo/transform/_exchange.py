"""What an exchange between replicas is over: one value in place of four arguments."""

import dataclasses
from dataclasses import dataclass

import jax
from jax.sharding import PartitionSpec

from .._support.checks import checked_int
from .._support.types import AxisName, PyTree
from ..collectives.codecs import Codec
from ..mesh import axis_names


@dataclass(frozen=True)
class Exchange:
    """Over which axes trees are exchanged, in which pieces, and in which form.

    Attributes:
      axis_name: mapped axis of the replicas, or several.
      local_axis_name: axis of the devices inside a replica, which hold equal trees: each then
        exchanges 1/L of them. None: every device exchanges all.
      param_specs: `PartitionSpec` per leaf (or prefix of the tree) over automatic axes inside a
        replica. None: leaves are whole there, or their types tell (Explicit axes).
      bucket_bytes: at which size a flat buffer closes; None: one buffer per dtype.
      codec: the form in which buffers travel that it narrows; None: as they are.
    """

    axis_name: AxisName
    local_axis_name: AxisName | None = None
    param_specs: PyTree | None = None
    bucket_bytes: int | None = None
    codec: Codec | None = None

    def with_specs(self, param_specs: PyTree) -> "Exchange":
        """The same for leaves of which the layout is known; specs that were given stay."""
        if self.param_specs is not None:
            return self
        return dataclasses.replace(self, param_specs=param_specs)


def check_axis_argument(owner: str, argument: str, axis_name: object) -> None:
    """Raise `ValueError` unless `axis_name` is a name or a tuple of distinct names."""
    # Before anything is traced: a misspelt name is found at trace time, a wrong type here.
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not names or not all(isinstance(n, str) and n for n in names):
        raise ValueError(
            f"{owner}: `{argument}` must be the name of a mapped axis or a tuple of names, "
            f"got {axis_name!r}."
        )
    if len(set(names)) != len(names):
        raise ValueError(f"{owner}: `{argument}` names an axis twice, got {axis_name!r}.")


def check_are_specs(owner: str, param_specs: PyTree | None) -> list[PartitionSpec]:
    """The leaves of a tree of specs; raise `ValueError` where it holds something else."""
    specs = jax.tree.leaves(param_specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    if wrong := [x for x in specs if not isinstance(x, PartitionSpec)]:
        raise ValueError(
            f"{owner}: `param_specs` must be a tree of PartitionSpec, got a leaf of type "
            f"{type(wrong[0]).__name__}."
        )
    return specs


def checked_bytes(owner: str, argument: str, size: object) -> int:
    """Return a size in bytes as an int; raise `ValueError` unless it is an integer >= 0."""
    return checked_int(f"{owner}: `{argument}` is a size in bytes and", size, 0)


def checked_exchange(
    owner: str,
    axis_name: AxisName,
    local_axis_name: AxisName | None = None,
    param_specs: PyTree | None = None,
    bucket_bytes: int | None = None,
    codec: Codec | None = None,
) -> Exchange:
    """The `Exchange` of these arguments.

    Raises:
      ValueError: axes that are no names, specs that are none or of stacked leaves, a negative
        size, or a codec that is none.
    """
    check_axis_argument(owner, "axis_name", axis_name)
    if local_axis_name is not None:
        check_axis_argument(owner, "local_axis_name", local_axis_name)
    if bucket_bytes is not None:
        bucket_bytes = checked_bytes(owner, "bucket_bytes", bucket_bytes)
    specs = check_are_specs(owner, param_specs)
    replicas = set(axis_names(axis_name))
    if stacked := [x for x in specs if replicas & {n for e in x for n in axis_names(e or ())}]:
        raise ValueError(
            f"{owner}: `param_specs` are of one copy of the parameters and must not name the axis "
            f"of the replicas, {axis_name!r}, got {stacked[0]}. Off stacked leaves they are read "
            "as `P(*leaf.sharding.spec[1:])`."
        )
    if codec is not None and not isinstance(codec, Codec):
        raise ValueError(
            f"{owner}: `codec` must be None or one of js.codecs, such as js.codecs.bfloat16() or "
            f"js.codecs.float16(error_feedback=True), got {codec!r}."
        )
    return Exchange(axis_name, local_axis_name, param_specs, bucket_bytes, codec)
