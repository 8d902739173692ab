"""Parameters of a model whose stages are placed on different devices, as one tree."""

from collections.abc import Hashable, ItemsView, Iterator, KeysView, ValuesView
from typing import Any

import jax


@jax.tree_util.register_pytree_with_keys_class
class Staged:
    """The leaves of a model that is cut into stages, as one buffer per dtype and layout.

    Each device along the stage axis holds the leaves of its stage, one after the other. All devices
    run one program though their leaves differ, so the program works on the buffers.
    `js.pipelined(...).layout` makes such trees, of parameters and of trees like them.

    Attributes:
      buffers: maps a name to an array (stages, *sizes of the axes over which its leaves are
        sharded, elements of the fullest stage), or to a value for it, such as a `PartitionSpec`.
      packing: hashable layout of the leaves; trees with equal layouts have equal structure. It
        applies optax transforms to the leaves of each stage (`init`, `update`), and knows which
        elements of a buffer are copies of tied parameters in another stage (`repeated`).
        `axis_name` is the stage axis, `model_tree(buffers)` returns the model's own tree, and
        `model_types(buffers)` its types.
    """

    def __init__(self, buffers: dict[str, Any], packing: Any) -> None:
        self.buffers, self.packing = buffers, packing

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], Hashable]:
        """Return the buffers in the order of their names, and their names and layout."""
        names = tuple(sorted(self.buffers))
        keys = map(jax.tree_util.DictKey, names)
        return tuple(zip(keys, map(self.buffers.__getitem__, names), strict=True)), (
            names,
            self.packing,
        )

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> "Staged":
        """Return the tree with these buffers."""
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
        """Return names and types of the buffers; their elements would not be informative."""

        def text(x: Any) -> str:
            has_type = hasattr(x, "shape") and hasattr(x, "dtype")
            return f"{x.dtype}{list(x.shape)}" if has_type else repr(x)

        return f"Staged({', '.join(f'{name}: {text(x)}' for name, x in self.buffers.items())})"


def in_model_form(tree: Any) -> Any:
    """Return `tree` with every `Staged` replaced by the model's own tree."""

    def model_form(x: Any) -> Any:
        return x.packing.model_tree(x.buffers) if isinstance(x, Staged) else x

    return jax.tree.map(model_form, tree, is_leaf=lambda x: isinstance(x, Staged))
