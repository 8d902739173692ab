"""Whether the state of an outer optimizer is sharded over the replicas, and why."""

from dataclasses import dataclass, field
from typing import Any

import jax
import optax

from ..._support.types import PyTree
from ...collectives import shard_layout
from ...tracing import ProgramReader, Reading
from ...tree import Staged, at_least_float32


@dataclass(frozen=True)
class _OnModel:
    """What was read of an optimizer for the tree of a model.

    Attributes:
      optimizer: the optimizer.
      types: the types of the tree.
      reader: the reader of its programs.
      reading: what it proved.
    """

    optimizer: optax.GradientTransformationExtraArgs
    types: PyTree
    reader: ProgramReader
    reading: Reading

    @classmethod
    def read(cls, optimizer: optax.GradientTransformationExtraArgs, types: PyTree) -> "_OnModel":
        reader = ProgramReader()
        return cls(optimizer, types, reader, reader.read(optimizer, types))

    def why_not(self, buffers: PyTree) -> str:
        """Return why the optimizer can't step these buffers in the place of the leaves in them."""
        if self.reading.kind != "element-wise":
            return self.reading.why
        dtypes = [x.dtype for x in jax.tree.leaves(buffers)]
        buffer_of = [dtypes.index(x.dtype) for x in jax.tree.leaves(self.types)]
        types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), buffers)
        on_buffers = self.reader.read(self.optimizer, types)
        if self.reading.equals_on_buffers(on_buffers, buffer_of):
            return ""
        return on_buffers.why or "it treats flat buffers and the leaves in them differently"


@dataclass(frozen=True)
class Placement:
    """Where the anchor and the state of an outer optimizer are stored.

    An optimizer that is element-wise on the model's tree can step shards of flat buffers, since it
    has no use for names and shapes of leaves.

    Attributes:
      owner: public name of the transform, for messages.
      shard_state: whether state is sharded; None: where the optimizer is element-wise.
      optimizer: the user's optimizer; None: one of this package, which is element-wise.
      whys: maps the types of a model to why its state must be whole; "": it need not be.
    """

    owner: str
    shard_state: bool | None
    optimizer: optax.GradientTransformationExtraArgs | None = None
    whys: dict[Any, str] = field(default_factory=dict, compare=False)

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
        if self.optimizer is None:
            return ""
        types = model_types(params)
        leaves, structure = jax.tree.flatten(types)
        key = structure, tuple(leaves)
        if key not in self.whys:
            # Shards exist only inside of the axis; these buffers are those of a single replica.
            sizes = dict.fromkeys([x.dtype for x in leaves], 0)
            for x in leaves:
                sizes[x.dtype] += x.size
            layouts = [(shard_layout(size, 1), dtype) for dtype, size in sizes.items()]
            buffers = tuple(jax.ShapeDtypeStruct((n.rows, n.lanes), t) for n, t in layouts)
            self.whys[key] = _OnModel.read(self.optimizer, types).why_not(buffers)
        return self.whys[key]

    def check_shards(self, params: PyTree, shards: PyTree) -> None:
        """Raise `ValueError` if the optimizer does not treat these shards as the leaves in them."""
        if self.optimizer is not None:
            on_model = _OnModel.read(self.optimizer, model_types(params))
            if why := on_model.why_not(shards):
                self._refuse(why)

    def last(self) -> bool | None:
        """Return whether state was sharded for the last parameters; None if there were none."""
        if self.shard_state is not None or self.optimizer is None:
            return bool(self.shard_state)
        return not [*self.whys.values()][-1] if self.whys else None

    def text(self) -> str:
        """Return where state is stored, and why, for the last parameters."""
        is_sharded = self.last()
        if is_sharded is None:
            return "sharded where `outer_optimizer` is element-wise on the model's tree, else whole"
        where = "sharded over the replicas" if is_sharded else "whole on each replica"
        if self.shard_state is False:
            return where
        why = self.whys and [*self.whys.values()][-1]
        is_one = f"is not element-wise: {why}" if why else "is element-wise on the model's tree"
        return f"{where}, since the outer optimizer {is_one}"

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
