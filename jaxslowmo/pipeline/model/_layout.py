"""The parameters of all stages as one tree, of which each stage holds its part."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..._typing import PyTree
from ...tree import Staged, leaf_names
from ._blocks import Block
from ._layered import LayeredModel
from ._optimizer import StagePacking
from ._packing import Leaf, Packing, Place, buffer_name
from ._runs import Run, runs_of
from ._specs import specs_of_layers


class StageLayout:
    """How the parameters of all stages lie in one tree; made by `js.pipelined`.

    One program on all devices needs one tree for all stages. Here it is one buffer for each dtype,
    (stages, elements), in which a device has the leaves of its own stage one after the other: as
    many elements as the fullest stage has, and no padding beyond. Leaves that are sharded over axes
    inside a stage lie in buffers of their own, (stages, *sizes of these axes, elements), of which
    each device has its part.

    An optimizer of `js.make_train_step` sees, on each stage, the leaves of this stage with the
    paths and shapes that they have in the model (`optax.MaskedNode()` stands for the others). What
    needs all gradients, `js.clip_by_global_norm` and `js.dynamic_loss_scale`, sees the buffers.

    Attributes:
      packing: what lies where.
      specs: a `PartitionSpec` for each buffer, for states, `param_specs` of transforms and
        checkpoints.
      blocks: the layers of each stage of the model.
      placement: for each stage of the model the device stage that holds it.
      all_runs: for each stage of the model its layers, equal ones in a row as one run.
      num_padding: elements that hold no parameter, on all devices together.
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
          placement: for each stage of the model the device stage that holds it.
          mesh: the devices.
          axis_name: the axis of the stages.
          param_specs: a `PartitionSpec` per leaf over axes inside a stage, or a prefix.
          beside: one tree per layer of what else must be alike in layers of a run.
          runs: for each stage of the model its layers in runs; None: rows of equal layers.
        """
        model.check_params(params)
        self._model, self._mesh = model, mesh
        self.blocks, self.placement = tuple(blocks), tuple(placement)
        _refuse_keys(params)
        treedefs = [jax.tree.structure(layer) for layer in params]
        sizes = tuple((a, mesh.shape[a]) for a in mesh.axis_names if a != axis_name)
        leaves = _leaves_of(params, param_specs, sizes)
        paths = [leaf_names(layer) for layer in params]
        self._first = np.cumsum([0, *(d.num_leaves for d in treedefs)]).tolist()
        also = [str(jax.tree.map(_kind_of, x)) for x in beside or [None] * len(params)]
        kinds = list(zip(treedefs, map(tuple, leaves), map(tuple, paths), also, strict=True))
        rows = [runs_of(model.layers, kinds, *block) for block in self.blocks]
        self.all_runs: list[tuple[Run, ...]] = rows if runs is None else list(runs)
        self._paths, self._treedefs = paths, treedefs
        stages: list[list[int]] = [[] for _ in range(mesh.shape[axis_name])]
        for own, stage in zip(self.all_runs, placement, strict=True):
            for run in own:
                # Leaf by leaf, so that those of equal layers are one array.
                for i in range(treedefs[run.start].num_leaves):
                    each = range(run.start, run.start + run.count)
                    stages[stage] += [self._first[layer] + i for layer in each]
        flat = [leaf for own in leaves for leaf in own]
        self.packing = StagePacking(
            outer=jax.tree.structure(params),
            subtrees=tuple(jax.tree.structure(0) for _ in flat),
            leaves=tuple((leaf,) for leaf in flat),
            stages=tuple(map(tuple, stages)),
            copies=frozenset(self._position(*c) for group in model.tied for c in group[1:]),
            axis_sizes=sizes,
            axis_name=axis_name,
            mesh=mesh,
        )
        self.specs = self.packing.staged(self.packing.specs)
        self._dtypes = {name: np.dtype(name.partition("/")[0]) for name in self.packing.axes}
        held = sum(leaf.size for leaf in flat)
        shapes = self.packing.shapes.values()
        self.num_padding: int = sum(int(np.prod(shape)) for shape in shapes) - held

    def _position(self, layer: int, path: str) -> int:
        return self._first[layer] + self._paths[layer].index(path)

    @property
    def types(self) -> Staged:
        """The types of `stack(params)`."""
        return self.packing.staged(self._types(self.packing, self._dtypes, ()))

    def runs(self, model_stage: int) -> tuple[Run, ...]:
        """Return the layers of a stage of the model, equal ones in a row as one run."""
        return self.all_runs[model_stage]

    def places(self, run: Run) -> list[Place]:
        """Return where the leaves of the first layer of a run lie; those of others follow."""
        first = self._first[run.start]
        count = self._treedefs[run.start].num_leaves
        return [self.packing.places[first + i][0] for i in range(count)]

    def treedef(self, layer: int) -> Any:
        """Return the structure of a layer's parameters."""
        return self._treedefs[layer]

    def tied_places(self) -> list[list[Place]]:
        """Return where the copies of each tied parameter lie.

        Raises:
          ValueError: copies that are sharded unlike.
        """
        found = []
        for group in self._model.tied:
            places = [self.packing.places[self._position(*copy)][0] for copy in group]
            specs = [place.leaf.spec for place in places]
            if len(set(specs)) > 1:
                raise ValueError(
                    f"`param_specs` must be equal for tied leaves, got {specs} for {group}."
                )
            found.append(places)
        return found

    @property
    def counted(self) -> Staged:
        """Which elements are in a norm of all parameters, as `js.clip_by_global_norm` takes it.

        For each buffer a mask that broadcasts to it, of tied parameters with the first copy alone;
        None where there are no others. `js.clip_by_global_norm` counts like this by itself.
        """
        repeated = {name: self.packing.repeated(name, np) for name in self.packing.axes}
        return self.packing.staged({n: None if x is None else ~x for n, x in repeated.items()})

    def stack(self, params: Sequence[PyTree]) -> Staged:
        """Return one tree of all stages, from one tree per layer.

        Args:
          params: arrays of jax or NumPy, or `ShapeDtypeStruct`s; where leaves are tied, the first
            of a group counts.

        Returns:
          Buffers on the mesh, each device with its own stage's alone; types stay types.

        Raises:
          ValueError: parameters of other layers, shapes or dtypes.

        Communication: none between stages if the arrays are on other devices or on the host;
          else what moving them takes.
        """
        self._model.check_params(params)
        whole = jax.tree.map(_as_array, type(params)(self._model.as_one(params)))  # type: ignore
        if jax.tree.structure(whole) != self.packing.outer:
            raise ValueError("`params` must have the layers that the layout was made of.")
        named = zip(leaf_names(whole), jax.tree.leaves(whole), self.packing.leaves, strict=True)
        for name, x, (leaf,) in named:
            if x.shape != leaf.shape:
                raise ValueError(
                    f"`params` must have {list(leaf.shape)} at {name!r}, got {list(x.shape)}."
                )
        return self._stacked(self.packing, whole, 0, on_mesh=True)

    def unstack(self, stacked: Staged | Mapping[str, Any]) -> PyTree:
        """Return one tree per layer, from one tree of all stages; padding is left out.

        Arrays on a mesh then lie on it as `param_specs` said, on every stage: of a model that no
        device can hold, give NumPy arrays.
        """
        names = list(self.packing.axes)
        if not isinstance(stacked, Staged | Mapping) or sorted(stacked) != sorted(names):
            raise ValueError(
                f"`stacked` must hold the buffers {names}, got "
                f"{list(stacked) if isinstance(stacked, Mapping) else type(stacked).__name__}."
            )
        return self._unstacked(self.packing, dict(stacked.items()))

    def stack_like(self, tree: PyTree) -> PyTree:
        """Return `tree` with every part that mirrors the parameters stacked, as Adam's moments do.

        Leaves may have further dimensions before their own, such as replicas: as many as those of a
        part have whose shapes are the parameters'. Those of NumPy stay on the host.
        """
        nodes, structure = jax.tree.flatten(tree, is_leaf=self.packing.mirrors)
        num_lead = max(map(self._num_lead, filter(self.packing.mirrors, nodes)), default=0)
        return structure.unflatten([self._stacked_like(x, num_lead) for x in nodes])

    def unstack_like(self, tree: PyTree) -> PyTree:
        """Return what `stack_like` was given."""

        def whole(x: Any) -> Any:
            return self._unstacked(x.packing, x.buffers) if isinstance(x, Staged) else x

        return jax.tree.map(whole, tree, is_leaf=lambda x: isinstance(x, Staged))

    def _num_lead(self, tree: PyTree) -> int:
        """Dimensions before those of the parameters; 0 where shapes are not the parameters'."""
        found = set()
        for part, (leaf,) in zip(
            self.packing.outer.flatten_up_to(tree), self.packing.leaves, strict=True
        ):
            for x in jax.tree.leaves(part):
                lead = np.ndim(x) - len(leaf.shape)
                found.add(lead if lead >= 0 and np.shape(x)[lead:] == leaf.shape else 0)
        return found.pop() if len(found) == 1 else 0

    def _stacked_like(self, x: Any, num_lead: int) -> Any:
        if not self.packing.mirrors(x) or not jax.tree.leaves(x):
            return x
        types = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[num_lead:], a.dtype), x)
        packing = self.packing.like([types] * self.packing.num_stages)
        return self._stacked(packing, x, num_lead, on_mesh=False)

    def _types(
        self, packing: Packing, dtypes: Mapping[str, Any], lead: tuple[int, ...]
    ) -> dict[str, jax.ShapeDtypeStruct]:
        return {
            name: jax.ShapeDtypeStruct(
                (*lead, *shape),
                dtypes[name],
                sharding=NamedSharding(self._mesh, P(*[None] * len(lead), *packing.specs[name])),
            )
            for name, shape in packing.shapes.items()
        }

    def _stacked(self, packing: StagePacking, tree: PyTree, num_lead: int, *, on_mesh: bool) -> Any:
        def stages(numpy: Any, tree: PyTree) -> dict[str, Any]:
            own = [packing.pack(tree, s, numpy, num_lead) for s in range(packing.num_stages)]
            return {name: numpy.stack([x[name] for x in own], num_lead) for name in packing.axes}

        leaves = jax.tree.leaves(tree)
        if not leaves:
            return packing.staged({})
        if any(isinstance(x, Tracer) for x in leaves):
            return packing.staged(stages(jnp, tree))
        if not on_mesh and all(isinstance(x, np.ndarray | np.generic) for x in leaves):
            return packing.staged(stages(np, tree))
        kinds = jax.eval_shape(lambda tree: stages(jnp, tree), tree)
        dtypes = {name: x.dtype for name, x in kinds.items()}
        types = self._types(packing, dtypes, np.shape(leaves[0])[:num_lead])
        if all(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
            return packing.staged(types)
        shardings = {name: x.sharding for name, x in types.items()}
        if all(_is_on(self._mesh, x) for x in leaves):
            fn = _placing(lambda tree: stages(jnp, tree), self._mesh, shardings)
            return packing.staged(fn(tree))
        part = _Part(packing, jax.tree.map(np.asarray, tree), num_lead)
        return packing.staged(
            {
                name: jax.make_array_from_callback(x.shape, x.sharding, part.of(name, x))
                for name, x in types.items()
            }
        )

    def _unstacked(self, packing: Packing, buffers: Mapping[str, Any]) -> PyTree:
        name, shape = next(iter(packing.shapes.items()), ("", ()))
        num_lead = np.ndim(buffers[name]) - len(shape) if name else 0
        for name, shape in packing.shapes.items():
            got = tuple(np.shape(buffers[name]))
            if num_lead < 0 or got[num_lead:] != shape:
                raise ValueError(
                    f"`stacked` must end in {list(shape)} at {name!r}, got an array of {list(got)}."
                )
        lead = (slice(None),) * num_lead

        def whole(buffers: Mapping[str, Any]) -> PyTree:
            parts = []
            for subtree, places in zip(packing.subtrees, packing.places, strict=True):
                own = [(buffers[p.leaf.buffer][(*lead, p.stage)], p) for p in places]
                parts.append(subtree.unflatten([packing.read(x, p, num_lead) for x, p in own]))
            return packing.outer.unflatten(parts)

        arrays = list(buffers.values())
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in arrays):
            return jax.eval_shape(whole, dict(buffers))
        sharding = getattr(arrays[0], "sharding", None) if arrays else None
        if isinstance(arrays[0] if arrays else None, Tracer) or not isinstance(
            sharding, NamedSharding
        ):
            return whole(buffers)
        front = [*sharding.spec, *[None] * num_lead][:num_lead]
        mesh, where = sharding.mesh, iter([p for own in packing.places for p in own])
        kinds = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in buffers.items()}
        shardings = jax.tree.map(
            lambda _: NamedSharding(mesh, P(*front, *next(where).leaf.spec)),
            jax.eval_shape(whole, kinds),
        )
        return _placing(whole, mesh, shardings)(dict(buffers))


def _placing(fn: Any, mesh: Any, shardings: PyTree) -> Any:
    """`fn` of arrays on a mesh, whose results lie as said."""
    if AxisType.Explicit in mesh.axis_types:
        fn = jax.sharding.auto_axes(fn, out_sharding=shardings)
    return jax.jit(fn, out_shardings=shardings)


class _Part:
    """Any part of the buffers of leaves on the host."""

    def __init__(self, packing: Packing, tree: PyTree, num_lead: int) -> None:
        self._packing, self._tree, self._num_lead = packing, tree, num_lead

    def of(self, name: str, kind: Any) -> Any:
        """Return a function of an index of a buffer."""

        def part(index: Any) -> np.ndarray:
            stages = range(*index[self._num_lead].indices(kind.shape[self._num_lead]))
            rest = *index[: self._num_lead], *index[self._num_lead + 1 :]
            packed = (self._packing.pack(self._tree, s, np, self._num_lead) for s in stages)
            return np.stack([own[name][rest] for own in packed], self._num_lead).astype(kind.dtype)

        return part


def _refuse_keys(params: Sequence[PyTree]) -> None:
    named = zip(leaf_names(params), jax.tree.leaves(params), strict=True)
    for name, x in named:
        if jnp.issubdtype(dtype := jnp.result_type(x), jax.dtypes.extended):
            raise ValueError(
                f"`params` must hold numbers, got {name!r} of type {dtype}: pass PRNG keys as "
                "`rng`, of which each layer that takes `key` gets its own."
            )


def _leaves_of(
    params: Sequence[PyTree], param_specs: PyTree | None, sizes: tuple[tuple[str, int], ...]
) -> list[list[Leaf]]:
    """The leaves of each layer.

    Raises:
      ValueError: specs that don't fit the parameters.
    """
    found = []
    for layer, specs in zip(params, specs_of_layers(params, param_specs), strict=True):
        leaves = zip(leaf_names(layer), jax.tree.leaves(layer), specs, strict=True)
        found.append([_leaf(name, x, spec, dict(sizes)) for name, x, spec in leaves])
    return found


def _leaf(name: str, x: Any, spec: P, sizes: Mapping[str, int]) -> Leaf:
    leaf = Leaf(jnp.shape(x), spec, "")
    if unknown := sorted(leaf.axes - set(sizes)):
        others = ", ".join(map(repr, sizes)) or "none"
        raise ValueError(
            f"`param_specs` names axis {unknown[0]!r} at {name!r}; leaves may be sharded over "
            f"the axes of `mesh` inside a stage: {others}."
        )
    for size, entry in zip(leaf.shape, spec, strict=False):
        names = (entry,) if isinstance(entry, str) else entry or ()
        parts = int(np.prod([sizes[a] for a in names]))
        if size % parts:
            raise ValueError(
                f"`param_specs` has {spec} for {name!r} of shape {list(leaf.shape)}, whose "
                f"dimension of {size} does not divide by the {parts} devices along {names}."
            )
    return leaf._replace(
        buffer=buffer_name(jnp.result_type(x), [a for a in sizes if a in leaf.axes])
    )


def _kind_of(x: Any) -> str:
    return f"{jnp.result_type(x)}{list(jnp.shape(x))}"


def _as_array(x: Any) -> Any:
    """`x`, or the array that jax makes of a number of Python."""
    return np.asarray(x, jnp.result_type(x)) if isinstance(x, int | float | complex) else x


def _is_on(mesh: Mesh, x: Any) -> bool:
    """Whether an array lies on the devices of `mesh`, or is no whole array of this process."""
    if not isinstance(x, jax.Array):
        return False
    return not x.is_fully_addressable or x.sharding.device_set == set(mesh.devices.flat)
