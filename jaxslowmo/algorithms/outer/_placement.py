"""Whether the state of an outer optimizer is sharded over the replicas, and why."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import optax

from ..._support.types import PyTree
from ...collectives import shard_layout
from ...tracing import ProgramReader, Reading
from ...tree import Staged, at_least_float32


@dataclass(frozen=True)
class _OnModel:
    """The result of reading an optimizer for the tree of a model.

    Attributes:
      optimizer: the optimizer.
      types: the types of the tree's leaves.
      reader: the reader of its programs.
      reading: what it proved.
      why_whole: why the optimizer can't step flat buffers; "" if it can.
    """

    optimizer: optax.GradientTransformationExtraArgs
    types: Sequence[Any]
    reader: ProgramReader
    reading: Reading
    why_whole: str = ""

    @classmethod
    def read(cls, optimizer: optax.GradientTransformationExtraArgs, types: PyTree) -> "_OnModel":
        reader, leaves = ProgramReader(), jax.tree.leaves(types)
        on_model = cls(optimizer, leaves, reader, reader.read(optimizer, types))
        # Shards exist only inside of the axis; these buffers are those of a single replica.
        sizes = dict.fromkeys([x.dtype for x in leaves], 0)
        for x in leaves:
            sizes[x.dtype] += x.size
        layouts = [(shard_layout(size, 1), dtype) for dtype, size in sizes.items()]
        buffers = tuple(jax.ShapeDtypeStruct((n.rows, n.lanes), dtype) for n, dtype in layouts)
        return replace(on_model, why_whole=on_model.why_not(buffers))

    def why_not(self, buffers: PyTree) -> str:
        """Return why the optimizer can't step these buffers in the place of the leaves in them."""
        if self.reading.kind != "element-wise":
            return self.reading.why
        own, dtypes = ([x.dtype for x in tree] for tree in (self.types, jax.tree.leaves(buffers)))
        types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), buffers)
        on_buffers = self.reader.read(self.optimizer, types)
        if self.reading.equals_on_buffers(on_buffers, [own.index(x) for x in dtypes]):
            return ""
        return on_buffers.why or "it treats flat buffers and the leaves in them differently"


@dataclass(frozen=True)
class Placement:
    """The decision where the anchor and the state of an outer optimizer are stored.

    An optimizer that is element-wise on the model's tree can step shards of flat buffers, since it
    has no use for names and shapes of leaves.

    Attributes:
      owner: public name of the transform, for messages.
      shard_state: whether state is sharded; None: where the optimizer is element-wise.
      optimizer: the user's optimizer; None: one of this package, which is element-wise.
      models: maps the types of a model to what was read for it.
    """

    owner: str
    shard_state: bool | None
    optimizer: optax.GradientTransformationExtraArgs | None = None
    models: dict[Any, _OnModel] = field(default_factory=dict, compare=False)

    def is_sharded(self, params: PyTree) -> bool:
        """Return whether state is sharded for these parameters, of which only types matter.

        Raises:
          ValueError: `shard_state` is True, and the optimizer is not element-wise.
        """
        if self.shard_state is False:
            return False
        why = self.why_whole(params)
        if why and self.shard_state:
            self._refuse(why)
        return not why

    def why_whole(self, params: PyTree) -> str:
        """Return why the optimizer can't step flat buffers; "" if it can."""
        on_model = self._on_model(params)
        return on_model.why_whole if on_model is not None else ""

    def check_shards(self, params: PyTree, shards: Sequence[Any]) -> None:
        """Raise `ValueError` if the optimizer does not treat these shards as the leaves in them."""
        on_model = self._on_model(params)
        if on_model is not None and (why := on_model.why_not(tuple(shards))):
            self._refuse(why)

    def last(self) -> bool | None:
        """Return whether state is sharded for the last model; None if there was none."""
        if self.shard_state is not None or self.optimizer is None:
            return bool(self.shard_state)
        return not [*self.models.values()][-1].why_whole if self.models else None

    def text(self) -> str:
        """Return where state is stored, and why, for the last model."""
        is_sharded = self.last()
        if is_sharded is None:
            return "sharded where `outer_optimizer` is element-wise on the model's tree, else whole"
        if self.shard_state is False:
            return "whole on each replica"
        if is_sharded:
            return "sharded over the replicas, since the outer optimizer is element-wise"
        why = [*self.models.values()][-1].why_whole
        return f"whole on each replica, since the outer optimizer is not element-wise: {why}"

    def _on_model(self, params: PyTree) -> _OnModel | None:
        if self.optimizer is None:
            return None
        leaves, structure = jax.tree.flatten(types := model_types(params))
        key = structure, tuple(leaves)
        if key not in self.models:
            self.models[key] = _OnModel.read(self.optimizer, types)
        return self.models[key]

    def _refuse(self, why: str) -> None:
        raise ValueError(
            f"{self.owner}: with shard_state=True `outer_optimizer` steps shards of flat buffers, "
            f"so it must be element-wise, and {why}. Leave `shard_state` out or set it to False: "
            "it then steps the model's own leaves."
        )


def model_types(params: PyTree) -> PyTree:
    """Return the types of the model's own tree, in the dtypes of an anchor."""

    def of(x: Any) -> Any:
        return x.packing.model_types(x.buffers) if isinstance(x, Staged) else x

    tree = jax.tree.map(of, params, is_leaf=lambda x: isinstance(x, Staged))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, at_least_float32(x.dtype)), tree)
