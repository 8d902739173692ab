"""What travels between stages: one type for all of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..._typing import PyTree
from ._rings import Values, empty


@dataclass(frozen=True)
class Activations:
    """The type of what every stage but the last gives to the next.

    Attributes:
      treedef: of it.
      types: of its leaves.
    """

    treedef: Any
    types: tuple[Any, ...]

    @property
    def floating(self) -> tuple[int, ...]:
        """Positions of the leaves that have cotangents."""
        return tuple(i for i, x in enumerate(self.types) if jnp.issubdtype(x.dtype, jnp.inexact))

    @property
    def cotangents(self) -> tuple[Any, ...]:
        """Types of the cotangents."""
        return tuple(self.types[i] for i in self.floating)

    def flat(self, y: PyTree) -> list[jax.Array]:
        """The leaves, of the dtypes that the type says."""
        leaves = jax.tree.leaves(y)
        return [jnp.asarray(x, t.dtype) for x, t in zip(leaves, self.types, strict=True)]

    def tree(self, leaves: Values) -> PyTree:
        """The way back from `flat`."""
        return self.treedef.unflatten(leaves)

    def flat_cotangents(self, dx: PyTree) -> list[jax.Array]:
        """Of a tree with None for leaves without any."""
        leaves = self.treedef.flatten_up_to(dx)
        return [jnp.asarray(leaves[i], self.types[i].dtype) for i in self.floating]

    def cotangent_tree(self, leaves: Values) -> PyTree:
        """The way back from `flat_cotangents`."""
        own = dict(zip(self.floating, leaves, strict=True))
        return self.treedef.unflatten([own.get(i) for i in range(len(self.types))])


def nothing(types: Sequence[Any]) -> list[jax.Array]:
    """What is sent where nothing is to be sent."""
    return [empty(x.shape, x.dtype) for x in types]


def activations_of(results: Sequence[PyTree]) -> Activations:
    """The one type of what the stages before the last give.

    Args:
      results: types of their results, in the order of the model.

    Raises:
      ValueError: two that differ in structure, shapes or dtypes.
    """
    if not results:
        return Activations(jax.tree.structure(()), ())
    leaves, treedef = jax.tree.flatten(results[0])
    first = _text(results[0])
    for k, other in enumerate(results[1:], start=1):
        if _text(other) != first or jax.tree.structure(other) != treedef:
            raise ValueError(
                "`model`: one program sends activations of one type between all stages, and here "
                f"stage 0 gives {first}, but stage {k} {_text(other)}. Cut the model elsewhere "
                "(`parts`), let layers give the same type, or use js.HostPipeline, which does not "
                "need it."
            )
    return Activations(treedef, tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves))


def _text(tree: PyTree) -> str:
    return str(jax.tree.map(lambda x: _Type(f"{x.dtype}{list(x.shape)}"), tree))


class _Type(str):
    """A type that prints without quotes."""

    def __repr__(self) -> str:
        return str(self)
