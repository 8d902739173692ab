"""Divide the layers of a model into stages, and stack the parameters of all stages in one tree."""

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ..._support.types import PyTree
from ...mesh import axis_names, leaf_specs
from ...tree import Leaf, LeafPlace, Staged, in_model_form, leaf_names, type_text
from ._layered import LayeredModel, Run
from ._optimizer import StagePacking


class Block(NamedTuple):
    """A stage of the model: layers `start` to `end`, without `end`."""

    start: int
    end: int


def model_blocks(
    num_layers: int, num_stages: int, num_chunks: int, parts: Sequence[Any] | None
) -> tuple[Block, ...]:
    """Return the stages of a model, in the model's order.

    Args:
      num_layers: number of layers of the model.
      num_stages: number of device stages.
      num_chunks: number of stages of the model on each device stage.
      parts: the result of a function such as `js.partition_uniform`: for each device stage a list
        of [start, end), one per chunk. None if there are fewer layers than stages of the model.

    Returns:
      `num_stages * num_chunks` blocks.

    Raises:
      ValueError: more stages than layers, a stage without layers, a wrong number of blocks, layers
        in no block or in several.
    """
    count = num_stages * num_chunks
    if count > num_layers:
        raise ValueError(
            "`schedule` must have a layer for each stage and chunk, got "
            f"{num_stages} stages * {num_chunks} chunks for {num_layers} layers."
        )
    blocks = _blocks_of(parts, num_stages, num_chunks)
    ends = [0, *(block.end for block in blocks)]
    starts = [*(block.start for block in blocks), num_layers]
    if ends != starts or any(block.start >= block.end for block in blocks):
        raise ValueError(
            f"`parts` must cover the {num_layers} layers once each, in order, and have no empty "
            f"stage, got {', '.join(f'[{b.start}, {b.end})' for b in blocks)}."
        )
    return tuple(blocks)


def _blocks_of(parts: Any, num_stages: int, num_chunks: int) -> list[Block]:
    """Return the intervals in `parts`, in the order of the model."""
    try:
        stages = [
            [Block(operator.index(start), operator.index(end)) for start, end in stage]
            for stage in parts
        ]
    except (TypeError, ValueError):
        stages = []
    if len(stages) != num_stages or any(len(stage) != num_chunks for stage in stages):
        raise ValueError(
            f"`parts` must have {num_chunks} [start, end) for each of the {num_stages} stages of "
            f"`schedule`, got {parts!r}."
        )
    return sorted(block for stage in stages for block in stage)


class StageLayout:
    """The layout of the parameters of all stages in one tree; made by `js.pipelined`.

    One program on all devices needs one tree for all stages. This tree has one buffer for each
    dtype, (stages, elements), in which a device holds the leaves of its stage one after the other,
    padded to the number of elements of the fullest stage (a large one to a multiple of 64, which
    replicas can divide). Leaves that are sharded over axes inside
    a stage are in separate buffers, (stages, *sizes of these axes, elements), of which each device
    holds its part.

    An optimizer of `js.make_train_step` sees the model's own tree, and each stage runs the part of
    its program that is for the stage's leaves. Transforms that need all gradients,
    `js.clip_by_global_norm` and `js.dynamic_loss_scale`, see the buffers.

    Attributes:
      packing: the place of each leaf in the buffers.
      specs: a `PartitionSpec` for each buffer, for states, `param_specs` of transforms and
        checkpoints.
      blocks: the layers of each stage of the model.
      placement: the device stage that holds each stage of the model.
      all_runs: the layers of each stage of the model, with consecutive equal layers as one run.
      num_padding: number of elements that hold no parameter, on all devices together.
    """

    def __init__(
        self,
        model: LayeredModel,
        params: Sequence[PyTree],
        blocks: Sequence[Block],
        placement: Sequence[int],
        *,
        mesh: Mesh,
        axis_name: str = "stage",
        param_specs: PyTree | None = None,
        beside: Sequence[PyTree] | None = None,
        runs: Sequence[tuple[Run, ...]] | None = None,
    ) -> None:
        """Lay out the parameters of a model.

        Args:
          model: the layers.
          params: one tree per layer, arrays or types.
          blocks: the layers of each stage of the model.
          placement: the device stage that holds each stage of the model.
          mesh: the devices.
          axis_name: the axis of the stages.
          param_specs: a `PartitionSpec` per leaf over axes inside a stage, or a prefix.
          beside: one further tree per layer, such as its model state, whose types must also be
            equal for layers of a run.
          runs: the layers of each stage of the model in runs; None: consecutive equal layers are
            one run.
        """
        model.check_params(params)
        self._model = model
        self.blocks, self.placement = tuple(blocks), tuple(placement)
        treedefs = [jax.tree.structure(layer) for layer in params]
        sizes = tuple((a, mesh.shape[a]) for a in mesh.axis_names if a != axis_name)
        leaves = _leaves_of(params, param_specs, sizes)
        paths = [leaf_names(layer) for layer in params]
        self._first = np.cumsum([0, *(d.num_leaves for d in treedefs)]).tolist()
        also = [str(jax.tree.map(type_text, x)) for x in beside or [None] * len(params)]
        kinds = list(zip(treedefs, map(tuple, leaves), map(tuple, paths), also, strict=True))
        rows = [model.runs(kinds, *block) for block in self.blocks]
        self.all_runs: list[tuple[Run, ...]] = rows if runs is None else list(runs)
        self._treedefs = treedefs
        stages: list[list[int]] = [[] for _ in range(mesh.shape[axis_name])]
        for runs_of_stage, stage in zip(self.all_runs, placement, strict=True):
            for run in runs_of_stage:
                # Leaf by leaf: a leaf of all layers of the run is then one array in the buffer.
                for i in range(treedefs[run.start].num_leaves):
                    each = range(run.start, run.start + run.count)
                    stages[stage] += [self._first[layer] + i for layer in each]
        flat = [leaf for of_layer in leaves for leaf in of_layer]
        self.packing = StagePacking(
            outer=jax.tree.structure(params),
            subtrees=tuple(jax.tree.structure(0) for _ in flat),
            leaves=tuple((leaf,) for leaf in flat),
            stages=tuple(map(tuple, stages)),
            ties=model.tied_positions(params),
            axis_sizes=sizes,
            axis_name=axis_name,
            mesh=mesh,
        )
        self.specs = self.packing.wrap_buffers(self.packing.specs)
        held = sum(math.prod(leaf.shape) for leaf in flat)
        shapes = self.packing.shapes.values()
        self.num_padding: int = sum(math.prod(shape) for shape in shapes) - held

    @property
    def types(self) -> Staged:
        """The types of `stack(params)`."""
        dtypes = {name: np.dtype(name.partition("/")[0]) for name in self.packing.axes}
        return self.packing.wrap_buffers(self.packing.buffer_types(dtypes))

    def places(self, model_stage: int) -> tuple[Any, tuple[LeafPlace, ...]]:
        """Return the leaves of a stage of the model, one tree per run of layers.

        Returns:
          The structure of a tuple of such trees, and the places of its leaves.
        """
        runs, places = self.all_runs[model_stage], []
        for run in runs:
            first, last = self._first[run.start : run.start + 2]
            for place, *_ in self.packing.places[first:last]:
                leaf = place.leaf
                if run.count > 1:
                    shape = (run.count, *leaf.shape)
                    leaf = leaf._replace(shape=shape, spec=P(None, *leaf.spec))
                places.append(place._replace(leaf=leaf))
        trees = [self._treedefs[run.start] for run in runs]
        return jax.tree_util.treedef_tuple(trees), tuple(places)

    def tied_places(self) -> list[list[LeafPlace]]:
        """Return the places of the copies of each tied parameter.

        Raises:
          ValueError: copies that are sharded differently.
        """
        groups = []
        for group, positions in zip(self._model.tied, self.packing.ties, strict=True):
            places = [self.packing.places[i][0] for i in positions]
            specs = [place.leaf.spec for place in places]
            if len(set(specs)) > 1:
                raise ValueError(f"`param_specs` must be equal in {group}, got {specs}.")
            groups.append(places)
        return groups

    def stack(self, params: Sequence[PyTree]) -> Staged:
        """Return one tree of all stages, from one tree per layer.

        Args:
          params: arrays of jax or NumPy, or `ShapeDtypeStruct`s; all leaves of a tied group get the
            value of the first.

        Returns:
          Buffers on the mesh, where each device holds only its own stage; types for types.

        Raises:
          ValueError: parameters of other layers, shapes or dtypes.

        Communication: none between stages if the arrays are on other devices or on the host;
          otherwise the copies that move them to their stages.
        """
        self._model.check_params(params)
        whole = jax.tree.map(_as_array, type(params)(self._model.tie_params(params)))  # type: ignore
        if jax.tree.structure(whole) != self.packing.outer:
            raise ValueError("`params` must have the layers that the layout was made of.")
        named = zip(leaf_names(whole), jax.tree.leaves(whole), self.packing.leaves, strict=True)
        for name, x, (leaf,) in named:
            if x.shape != leaf.shape:
                raise ValueError(
                    f"`params` must have {list(leaf.shape)} at {name!r}, got {list(x.shape)}."
                )
        return self.packing.stack(whole, on_mesh=True)

    def unstack(self, buffers: Staged | Mapping[str, Any]) -> PyTree:
        """Return one tree per layer, from one tree of all stages; padding is left out.

        Arrays on a mesh are placed on it by `param_specs`, and replicated over the stages: pass
        NumPy arrays of a model that no device can hold.
        """
        names = list(self.packing.axes)
        if not isinstance(buffers, Staged | Mapping) or sorted(buffers) != sorted(names):
            raise ValueError(
                f"`buffers` must be {names}, as `stack` makes them, got "
                f"{list(buffers) if isinstance(buffers, Mapping) else type(buffers).__name__}."
            )
        return self.packing.model_tree(dict(buffers.items()))

    def unstack_like(self, tree: PyTree) -> PyTree:
        """Return `tree` with each part in buffers, such as moments, as one tree per layer."""
        return in_model_form(tree)


def _leaves_of(
    params: Sequence[PyTree], param_specs: PyTree | None, sizes: tuple[tuple[str, int], ...]
) -> list[list[Leaf]]:
    """Return the leaves of each layer.

    Raises:
      ValueError: specs that don't fit the parameters.
    """
    specs, by_layer = iter(leaf_specs(param_specs, list(params))), []
    for layer in params:
        named = zip(leaf_names(layer), jax.tree.leaves(layer), strict=True)
        by_layer.append([_leaf(name, x, next(specs), sizes) for name, x in named])
    return by_layer


def _leaf(name: str, x: Any, spec: P, sizes: Sequence[tuple[str, int]]) -> Leaf:
    if len(spec) > jnp.ndim(x):
        raise ValueError(
            f"`param_specs` has {spec} for {name!r}, which has {jnp.ndim(x)} dimensions."
        )
    while spec and spec[-1] is None:
        spec = P(*spec[:-1])
    named = {axis for entry in spec for axis in axis_names(entry or ())}
    if unknown := sorted(named - set(dict(sizes))):
        raise ValueError(
            f"`param_specs` must name axes of `mesh` inside a stage, {list(dict(sizes))}, got "
            f"{unknown[0]!r} at {name!r}."
        )
    shape = jnp.shape(x)
    for size, entry in zip(shape, spec, strict=False):
        names = axis_names(entry or ())
        parts = math.prod(dict(sizes)[axis] for axis in names)
        if size % parts:
            raise ValueError(
                f"`param_specs` has {spec} for {name!r} of shape {list(shape)}: its dimension of "
                f"{size} does not divide by the {parts} devices along {names}."
            )
    return Leaf.from_array(x, spec, sizes)


def _as_array(x: Any) -> Any:
    """Return `x`; a Python number becomes an array of the dtype that jax gives it."""
    return np.asarray(x, jnp.result_type(x)) if isinstance(x, int | float | complex) else x
