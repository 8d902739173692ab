"""The parameters of all stages as one tree, of which each stage holds its part."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..._typing import PyTree
from ._blocks import Block
from ._layered import LayeredModel
from ._slots import Leaf, Place, Slot, SlotPlan, leaves_of, plan_slots

Stacked = dict[str, Any]
"""An array (stages, rows, *shape) by the name of its slot."""


class StageLayout:
    """How the parameters of all stages lie in one tree; made by `js.pipelined`.

    One program on all devices needs one tree for all stages. Leaves of different stages that are
    alike in shape, dtype and spec lie in one *slot*, an array (stages, rows, *shape) of which each
    stage holds its own rows: blocks that are alike share slots exactly, an embedding and a head of
    one shape share one. A stage that has no such leaf holds zeros there, whose gradients are zero.
    A slot is named by the layer and the path of its first leaf, such as `"3/dense/kernel"`, so
    masks of optimizers by name work.

    Optimizers that work element by element (SGD, Adam, their weight decay) see what they would see
    of the leaves themselves. Those that take a norm or a factorisation per leaf (LAMB, LARS,
    Adafactor, Muon) see a slot, the leaves of a stage's rows and padding, as one array.

    Attributes:
      specs: a `PartitionSpec` by slot, for states, `param_specs` of transforms and checkpoints.
      blocks: the layers of each stage of the model.
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
    ) -> None:
        model.check_params(params)
        self._model, self._mesh = model, mesh
        self._num_stages: int = mesh.shape[axis_name]
        self._treedefs = tuple(jax.tree.structure(layer) for layer in params)
        self._leaves = leaves_of(params, param_specs)
        self._paths = [[leaf.path for leaf in own] for own in self._leaves]
        self.blocks = tuple(blocks)
        self.plan: SlotPlan = plan_slots(self._leaves, blocks, placement)
        self.specs: dict[str, P] = {
            slot.name: P(axis_name, None, *slot.leaf.spec) for slot in self.plan.slots
        }
        self.num_padding = self.plan.padding
        self._homes: dict[str, dict[tuple[int, int], tuple[int, int]]] = {
            slot.name: {} for slot in self.plan.slots
        }
        for layer, places in enumerate(self.plan.places):
            for i, place in enumerate(places):
                name = self.plan.slots[place.slot].name
                self._homes[name][place.stage, place.row] = layer, i

    @property
    def types(self) -> Stacked:
        """The types of `stack(params)`."""
        return {
            slot.name: jax.ShapeDtypeStruct(
                (self._num_stages, slot.rows, *slot.leaf.shape),
                slot.leaf.dtype,
                sharding=NamedSharding(self._mesh, self.specs[slot.name]),
            )
            for slot in self.plan.slots
        }

    def stage_places(self, model_stage: int) -> tuple[Place, ...]:
        """Where the leaves of a stage of the model lie, in flattening order."""
        block = self.blocks[model_stage]
        return tuple(p for i in range(block.start, block.end) for p in self.plan.places[i])

    def stage_treedef(self, model_stage: int) -> Any:
        """Of a stage's weights: a tuple of its layers' parameters."""
        block = self.blocks[model_stage]
        return jax.tree.structure(
            tuple(d.unflatten([0] * d.num_leaves) for d in self._treedefs[block.start : block.end])
        )

    def tied_places(self) -> list[list[Place]]:
        """Where the copies of each tied parameter lie."""
        found = []
        for group in self._model.tied:
            spots = [(layer, self._paths[layer].index(path)) for layer, path in group]
            specs = [self._leaves[layer][i].spec for layer, i in spots]
            if len(set(specs)) > 1:
                raise ValueError(
                    f"`param_specs` must be equal for tied leaves, got {specs} for {group}."
                )
            found.append([self.plan.places[layer][i] for layer, i in spots])
        return found

    @property
    def counted(self) -> dict[str, np.ndarray | None]:
        """Which rows are in a norm of all parameters, as `js.clip_by_global_norm` takes it.

        By slot a mask (stages, rows, 1, ...), of tied parameters with the first copy alone; None
        where there are no others.
        """
        found: dict[str, np.ndarray | None] = {slot.name: None for slot in self.plan.slots}
        for place in (copy for group in self.tied_places() for copy in group[1:]):
            slot = self.plan.slots[place.slot]
            mask = found[slot.name]
            if mask is None:
                lead = self._num_stages, slot.rows
                mask = found[slot.name] = np.ones((*lead, *[1] * len(slot.leaf.shape)), bool)
            mask[place.stage, place.row] = False
        return found

    def stack(self, params: Sequence[PyTree]) -> Stacked:
        """One tree of all stages, from one tree per layer.

        Args:
          params: arrays of jax or NumPy, or `ShapeDtypeStruct`s; where leaves are tied, the first
            of a group counts.

        Returns:
          A dict of arrays on the mesh by slot, each device with its own stage's alone; types stay
          types.

        Raises:
          ValueError: parameters of other layers, shapes or dtypes.

        Communication: none between stages if the arrays are on other devices or on the host;
          else what moving them takes.
        """
        self._model.check_params(params)
        if jax.tree.structure(list(params)) != jax.tree.structure(
            [d.unflatten([0] * d.num_leaves) for d in self._treedefs]
        ):
            raise ValueError("`params` must have the layers that the layout was made of.")
        leaves = jax.tree.map(_as_array, self._flat(self._model.as_one(params)))
        return self._stacked(leaves, on_mesh=True)

    def unstack(self, stacked: Stacked) -> list[PyTree]:
        """One tree per layer, from one tree of all stages; padding is left out.

        Arrays on a mesh then lie on it as `param_specs` said, on every stage: of a model that no
        device can hold, give NumPy arrays.
        """
        if not self._is_stacked(stacked):
            raise ValueError(
                f"`stacked` must be a dict of the slots {list(self.specs)}, got "
                f"{list(stacked) if isinstance(stacked, dict) else type(stacked).__name__}."
            )
        return self._unstacked(stacked)

    def stack_like(self, tree: PyTree) -> PyTree:
        """`tree` with every part that mirrors the parameters stacked, such as Adam's moments.

        Leaves may have further dimensions before their own, such as replicas. Those of NumPy stay
        on the host.
        """
        return jax.tree.map(
            lambda x: self._stacked(self._flat(x), on_mesh=False) if self._is_layers(x) else x,
            tree,
            is_leaf=self._is_layers,
        )

    def unstack_like(self, tree: PyTree) -> PyTree:
        """The way back from `stack_like`."""
        return jax.tree.map(
            lambda x: self._unstacked(x) if self._is_stacked(x) else x,
            tree,
            is_leaf=self._is_stacked,
        )

    def _is_stacked(self, x: Any) -> bool:
        return isinstance(x, dict) and x.keys() == self.specs.keys()

    def _is_layers(self, x: Any) -> bool:
        if type(x) not in (list, tuple) or len(x) != len(self._treedefs):
            return False
        try:
            flat = self._flat(x)
        except ValueError:
            return False
        pairs = zip(flat, self._leaves, strict=True)
        return all(
            not hasattr(leaf, "shape") or _ends_in(leaf.shape, known.shape)
            for own, of_layer in pairs
            for leaf, known in zip(own, of_layer, strict=True)
        )

    def _flat(self, params: Sequence[PyTree]) -> list[list[Any]]:
        return [d.flatten_up_to(layer) for d, layer in zip(self._treedefs, params, strict=True)]

    def _stacked(self, leaves: list[list[Any]], *, on_mesh: bool) -> Stacked:
        return {
            slot.name: self._stack_slot(slot, leaves, on_mesh=on_mesh) for slot in self.plan.slots
        }

    def _stack_slot(self, slot: Slot, leaves: list[list[Any]], *, on_mesh: bool) -> Any:
        name, leaf, rows = slot.name, slot.leaf, slot.rows
        own = {at: leaves[layer][i] for at, (layer, i) in self._homes[name].items()}
        some = next(iter(own.values()))
        if not hasattr(some, "shape"):  # such as what `optax.masked` leaves in place of a leaf
            if any(hasattr(x, "shape") for x in own.values()):
                raise ValueError(f"slot {name!r} holds leaves of which only some are arrays.")
            return some
        lead = some.shape[: len(some.shape) - len(leaf.shape)]
        for (stage, _), x in own.items():
            if x.shape != (*lead, *leaf.shape):
                raise ValueError(
                    f"`params` must have {[*lead, *leaf.shape]} where slot {name!r} takes it on "
                    f"stage {stage}, got {list(x.shape)}."
                )
        shape = (*lead, self._num_stages, rows, *leaf.shape)
        sharding = NamedSharding(self._mesh, P(*[None] * len(lead), *self.specs[name]))
        if isinstance(some, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(shape, some.dtype, sharding=sharding)
        build = _joiner(self._num_stages, rows, len(lead))
        if not on_mesh and all(isinstance(x, np.ndarray | np.generic) for x in own.values()):
            return build(own, np)
        if any(isinstance(x, Tracer) for x in own.values()):
            return build(own, jnp)
        if all(_is_on(self._mesh, x) for x in own.values()):
            return _placing(lambda own: build(own, jnp), sharding)(own)
        host = {at: np.asarray(x) for at, x in own.items()}
        whole = _Block(host, shape, len(lead), host[next(iter(host))].dtype)
        return jax.make_array_from_callback(shape, sharding, whole)

    def _unstacked(self, stacked: Stacked) -> list[PyTree]:
        found: list[list[Any]] = [[None] * len(own) for own in self._leaves]
        for slot in self.plan.slots:
            x = stacked[slot.name]
            homes = self._homes[slot.name]
            for (layer, i), leaf in zip(
                homes.values(), self._parts(x, slot.leaf, list(homes)), strict=True
            ):
                found[layer][i] = leaf
        return [d.unflatten(own) for d, own in zip(self._treedefs, found, strict=True)]

    def _parts(self, x: Any, leaf: Leaf, homes: list[tuple[int, int]]) -> list[Any]:
        if not hasattr(x, "shape"):
            return [x] * len(homes)
        num_lead = len(x.shape) - len(leaf.shape) - 2
        lead = x.shape[: max(num_lead, 0)]
        if num_lead < 0 or not _ends_in(x.shape, leaf.shape):
            raise ValueError(
                f"`stacked` must end in {list(leaf.shape)} here, got an array of {list(x.shape)}."
            )
        every = (slice(None),) * num_lead
        if isinstance(x, jax.ShapeDtypeStruct):
            return [jax.ShapeDtypeStruct((*lead, *leaf.shape), x.dtype)] * len(homes)

        def split(x: Any) -> list[Any]:
            return [x[(*every, *at)] for at in homes]

        sharding = getattr(x, "sharding", None)
        if isinstance(x, Tracer) or not isinstance(sharding, NamedSharding):
            return split(x)
        spec = [*sharding.spec, *[None] * len(x.shape)][:num_lead]
        whole = NamedSharding(sharding.mesh, P(*spec, *leaf.spec))
        return _placing(split, whole)(x)


def _placing(fn: Callable[[Any], Any], sharding: NamedSharding) -> Callable[[Any], Any]:
    """`fn` of arrays on a mesh, whose results lie as said."""
    if AxisType.Explicit in sharding.mesh.axis_types:
        fn = jax.sharding.auto_axes(fn, out_sharding=sharding)
    return jax.jit(fn, out_shardings=sharding)


def _joiner(num_stages: int, rows: int, num_lead: int) -> Callable[[Any, Any], Any]:
    """A function of the leaves by (stage, row), and NumPy or its like, to a slot."""

    def build(own: dict[tuple[int, int], Any], numpy: Any) -> Any:
        zeros = numpy.zeros_like(next(iter(own.values())))
        stages = [
            numpy.stack([own.get((s, r), zeros) for r in range(rows)], num_lead)
            for s in range(num_stages)
        ]
        return numpy.stack(stages, num_lead)

    return build


class _Block:
    """Any part of a slot, of leaves on the host."""

    def __init__(
        self, own: dict[tuple[int, int], Any], shape: tuple[int, ...], num_lead: int, dtype: Any
    ) -> None:
        self._own, self._shape, self._lead, self._dtype = own, shape, num_lead, dtype

    def __call__(self, index: Any) -> np.ndarray:
        ranges = [range(*part.indices(n)) for part, n in zip(index, self._shape, strict=True)]
        out = np.zeros([len(r) for r in ranges], self._dtype)
        n = self._lead
        every, inside = (slice(None),) * n, (*index[:n], *index[n + 2 :])
        for s, stage in enumerate(ranges[n]):
            for r, row in enumerate(ranges[n + 1]):
                if (stage, row) in self._own:
                    out[(*every, s, r)] = self._own[stage, row][inside]
        return out


def _as_array(x: Any) -> Any:
    """`x`, or the array that jax makes of a number of Python."""
    return np.asarray(x, jnp.result_type(x)) if isinstance(x, int | float | complex) else x


def _is_on(mesh: Mesh, x: Any) -> bool:
    """Whether an array lies on the devices of `mesh`, or is no whole array of this process."""
    if not isinstance(x, jax.Array):
        return False
    return not x.is_fully_addressable or x.sharding.device_set == set(mesh.devices.flat)


def _ends_in(shape: tuple[int, ...], end: tuple[int, ...]) -> bool:
    return tuple(shape[len(shape) - len(end) :]) == tuple(end)
