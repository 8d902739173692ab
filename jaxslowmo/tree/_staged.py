"""Parameters of a model whose stages lie on different devices, in one tree for all of them."""

from collections.abc import Hashable, ItemsView, Iterator, KeysView, ValuesView
from typing import Any, Protocol

import jax

from .._typing import PyTree


class Packing(Protocol):
    """What a `Staged` tree knows of its buffers; two trees are alike if theirs are equal."""

    def __hash__(self) -> int: ...

    def init(self, tx: Any, params: "Staged") -> PyTree:
        """Return the state of an optax transform, made of each stage's own leaves."""
        ...

    def update(
        self, tx: Any, updates: "Staged", state: PyTree, params: PyTree, extra: dict[str, Any]
    ) -> tuple[PyTree, PyTree]:
        """Return what an optax transform makes of each stage's own leaves."""
        ...

    def repeated(self, name: str) -> jax.Array | None:
        """Return where a buffer holds parameters that count elsewhere; None: nowhere."""
        ...


@jax.tree_util.register_pytree_with_keys_class
class Staged:
    """Leaves of a model that is cut into stages, as one buffer for each dtype and layout.

    Each device along the axis of the stages holds the leaves of its own stage, one after the other.
    All devices run one program, and their leaves are unlike, so it is the buffers that the program
    knows. `js.pipelined(...).layout` makes such trees, of parameters and of what is like them.

    Attributes:
      buffers: by name an array (stages, *sizes of the axes over which its leaves are sharded,
        elements of the fullest stage), or what stands for it, such as a `PartitionSpec`.
      packing: what lies where.
    """

    def __init__(self, buffers: dict[str, Any], packing: Packing) -> None:
        self.buffers, self.packing = buffers, packing

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], Hashable]:
        """Return the buffers in the order of their names, and what tells such trees apart."""
        names = tuple(sorted(self.buffers))
        keys = map(jax.tree_util.DictKey, names)
        return tuple(zip(keys, map(self.buffers.__getitem__, names), strict=True)), (
            names,
            self.packing,
        )

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> "Staged":
        """Return the tree of these buffers."""
        names, packing = aux
        return cls(dict(zip(names, children, strict=True)), packing)

    def __getitem__(self, name: str) -> Any:
        """Return the buffer of this name."""
        return self.buffers[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the buffers."""
        return iter(self.buffers)

    def keys(self) -> KeysView[str]:
        """Return the names of the buffers."""
        return self.buffers.keys()

    def values(self) -> ValuesView[Any]:
        """Return the buffers."""
        return self.buffers.values()

    def items(self) -> ItemsView[str, Any]:
        """Return names and buffers."""
        return self.buffers.items()

    def __repr__(self) -> str:
        return f"Staged({self.buffers!r})"
