"""Parameters of a model whose stages lie on different devices, in one tree for all of them."""

from collections.abc import Hashable, ItemsView, Iterator, KeysView, ValuesView
from typing import Any

import jax


@jax.tree_util.register_pytree_with_keys_class
class Staged:
    """Leaves of a model that is cut into stages, as one buffer for each dtype and layout.

    Each device along the axis of the stages holds the leaves of its own stage, one after the other.
    All devices run one program, and their leaves are unlike, so it is the buffers that the program
    knows. `js.pipelined(...).layout` makes such trees, of parameters and of what is like them.

    Attributes:
      buffers: by name an array (stages, *sizes of the axes over which its leaves are sharded,
        elements of the fullest stage), or what stands for it, such as a `PartitionSpec`.
      packing: what lies where, hashable; two trees are alike if theirs are equal. It applies
        optax transforms to the leaves of each stage (`init`, `update`), and says which elements of
        a buffer count elsewhere, being copies of tied parameters (`repeated`). `axis_name` is
        the axis of the stages, and `model_tree(buffers)` the way back to the model's own tree.
    """

    def __init__(self, buffers: dict[str, Any], packing: Any) -> None:
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
        """Return names and types; the elements of a buffer tell nothing."""

        def text(x: Any) -> str:
            has_type = hasattr(x, "shape") and hasattr(x, "dtype")
            return f"{x.dtype}{list(x.shape)}" if has_type else repr(x)

        return f"Staged({', '.join(f'{name}: {text(x)}' for name, x in self.buffers.items())})"


def in_model_form(tree: Any) -> Any:
    """Return `tree` with the model's own trees in the places of those of stages."""

    def own(x: Any) -> Any:
        return x.packing.model_tree(x.buffers) if isinstance(x, Staged) else x

    return jax.tree.map(own, tree, is_leaf=lambda x: isinstance(x, Staged))
