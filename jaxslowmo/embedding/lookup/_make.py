"""What a step looks up, from what `js.make_train_step` is given as `embeddings`."""

from dataclasses import replace

from ..._support.types import AxisName
from ...mesh import AnyMesh, VirtualMesh, axis_names
from .._embeddings import Embeddings
from ._lookup import Lookup


def lookup_of(embeddings: Embeddings, mesh: AnyMesh, axis_name: AxisName) -> Lookup:
    """What a step looks up, in the tables of `embeddings=`.

    Raises:
      ValueError: what is no `Embeddings`; an axis that the mesh lacks, or one of the replicas';
        several shards on a `VirtualMesh`.
    """
    if not isinstance(embeddings, Embeddings):
        raise ValueError(
            f"`embeddings` must be made by js.embeddings, got {type(embeddings).__name__}."
        )
    axis = embeddings.axis_name
    if axis is None:
        return Lookup(embeddings)
    if axis not in mesh.shape:
        raise ValueError(
            f"`embeddings` are sharded over {axis!r}, and `mesh` has the axes "
            f"{list(mesh.axis_names)}: name one of these as `axis_name` of js.embeddings, or None "
            "for tables that each device holds whole."
        )
    embeddings = embeddings.over(mesh)
    if axis in axis_names(axis_name):
        raise ValueError(
            f"`embeddings` are sharded over {axis!r}, along which the replicas of this step lie: "
            "every replica has tables of its own, sharded over an axis inside of it."
        )
    if not isinstance(mesh, VirtualMesh):
        return Lookup(embeddings, axis, axis)
    if mesh.shape[axis] > 1:
        raise ValueError(
            f"`embeddings` are sharded over {axis!r} of size {mesh.shape[axis]}, and virtual "
            "replicas have no devices inside: use js.make_mesh, or axis_name=None."
        )
    return Lookup(replace(embeddings, axis_name=None), axis)
