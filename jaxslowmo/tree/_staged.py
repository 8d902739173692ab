"""Parameters of a model whose stages are placed on different devices, as one tree."""

import math
from collections.abc import (
    Hashable,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    Sequence,
    ValuesView,
)
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._support.types import axis_names

# A leaf and its blocks. They are numbered row-major over the axes that split the leaf, as
# `PartitionSpec((a, b))` splits a dimension.


def to_blocks(x: Any, spec: Iterable[Any], sizes: Mapping[str, int], num_lead: int = 0) -> Any:
    """Return the blocks of a leaf, (*lead, *sizes, elements of a block), by NumPy or jax.

    Args:
      x: array (*lead, *shape).
      spec: the axes that split each dimension of the leaf, as in a `PartitionSpec`.
      sizes: sizes of these axes; their order is that of the blocks.
      num_lead: number of dimensions that the array has before those of the leaf, such as replicas.
    """
    lead, shape = x.shape[:num_lead], x.shape[num_lead:]
    local, order = _to_whole(shape, spec, sizes, num_lead)
    split = (*lead, *sizes.values(), *local)
    x = x.reshape([split[i] for i in order]).transpose([int(i) for i in np.argsort(order)])
    return x.reshape((*lead, *sizes.values(), math.prod(local)))


def from_blocks(
    blocks: Any, shape: Sequence[int], spec: Iterable[Any], sizes: Mapping[str, int]
) -> Any:
    """Return the leaf (*lead, *shape) of these blocks; the inverse of `to_blocks`."""
    lead = blocks.shape[: blocks.ndim - len(sizes) - 1]
    local, order = _to_whole(shape, spec, sizes, len(lead))
    whole = blocks.reshape((*lead, *sizes.values(), *local)).transpose(order)
    return whole.reshape((*lead, *shape))


def _to_whole(
    shape: Sequence[int], spec: Iterable[Any], sizes: Mapping[str, int], num_lead: int = 0
) -> tuple[tuple[int, ...], list[int]]:
    """Return the shape of a block, and the order in which the axes come to their dimensions."""
    entries = [axis_names(entry or ()) for entry in spec]
    entries += [()] * (len(shape) - len(entries))
    local = [
        size // math.prod(sizes[axis] for axis in entry)
        for size, entry in zip(shape, entries, strict=True)
    ]
    places = {axis: num_lead + i for i, axis in enumerate(sizes)}
    order = [*range(num_lead)]
    for dim, entry in enumerate(entries, start=num_lead + len(sizes)):
        # If an entry of the spec names several axes, the first one varies slowest.
        order += [*(places[axis] for axis in entry), dim]
    return tuple(local), order


class Leaf(NamedTuple):
    """One array of a model, or of a tree like its parameters.

    Attributes:
      shape: shape of the whole array.
      spec: its sharding over axes inside a stage, a `PartitionSpec` or the axes of each dimension.
      sizes: (axis, size) of the axes that shard it, in the order in which its buffer has them.
      buffer: name of the buffer that holds it, dtype and axes, such as `"float32/fsdp"`.
    """

    shape: tuple[int, ...]
    spec: Iterable[Any]
    sizes: tuple[tuple[str, int], ...]
    buffer: str

    @classmethod
    def from_array(
        cls, x: Any, spec: Iterable[Any], axis_sizes: Sequence[tuple[str, int]]
    ) -> "Leaf":
        """Return the leaf of an array or type; `axis_sizes` are all axes, in the mesh's order."""
        split = {name for entry in spec for name in axis_names(entry or ())}
        sizes = tuple((axis, size) for axis, size in axis_sizes if axis in split)
        names = np.dtype(jnp.result_type(x)).name, *(axis for axis, _ in sizes)
        return cls(jnp.shape(x), spec, sizes, "/".join(names))

    @property
    def part_size(self) -> int:
        """The number of elements in one part of the buffer, of one device inside a stage."""
        return math.prod(self.shape) // math.prod(size for _, size in self.sizes)

    def flat(self, x: Any, numpy: Any = jnp, num_lead: int = 0) -> Any:
        """Return the array (*lead, *shape) in the form of a buffer, (*lead, *sizes, elements)."""
        return to_blocks(numpy.asarray(x), self.spec, dict(self.sizes), num_lead)


class LeafPlace(NamedTuple):
    """The place of a leaf: device stage `stage`, from element `start` of its buffer on.

    The leaves of several equal layers that follow each other are one leaf (layers, *shape).
    """

    stage: int
    start: Any  # int, or () int32 while tracing
    leaf: Leaf

    def part(self, buffer: Any) -> Any:
        """Return the elements (*lead, *sizes, elements) of the leaf in its stage's buffer."""
        size = self.leaf.part_size
        if isinstance(self.start, int):
            return buffer[..., self.start : self.start + size]
        return lax.dynamic_slice_in_dim(buffer, self.start, size, buffer.ndim - 1)

    def read(self, buffer: Any) -> Any:
        """Return the leaf (*lead, *shape) from its stage's buffer, (*lead, *sizes, elements)."""
        leaf = self.leaf
        return from_blocks(self.part(buffer), leaf.shape, leaf.spec, dict(leaf.sizes))

    def write(self, buffer: jax.Array, part: jax.Array) -> jax.Array:
        """Return the stage's buffer with these elements in place of `part(buffer)`."""
        part = part.astype(buffer.dtype)
        return lax.dynamic_update_slice_in_dim(buffer, part, self.start, buffer.ndim - 1)


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
        elements of a buffer are copies of tied parameters in another stage (`tied_copy_mask`).
        `axis_name` is the stage axis, `model_tree(buffers)` returns the model's own tree, and
        `model_types(buffers)` its types.
    """

    def __init__(self, buffers: dict[str, Any], packing: Any) -> None:
        self.buffers, self.packing = buffers, packing

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], Hashable]:
        """Return the buffers in the order of their names, and their names and layout."""
        names = tuple(sorted(self.buffers))
        held = tuple((jax.tree_util.DictKey(name), self.buffers[name]) for name in names)
        return held, (names, self.packing)

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
