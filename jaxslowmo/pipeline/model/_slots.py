"""Which leaf of a model lies in which row of which array, where one program holds all stages."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ..._typing import PyTree
from ...tree import leaf_names
from ._blocks import Block


class Place(NamedTuple):
    """Where a leaf lies: in row `row` of its slot on device stage `stage`."""

    slot: int
    stage: int
    row: int


class Leaf(NamedTuple):
    """What tells where a leaf can lie.

    Attributes:
      path: in the parameters of its layer.
      shape: of it.
      dtype: of it.
      spec: over axes inside a stage.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    spec: P

    @property
    def kind(self) -> tuple[Any, ...]:
        """Leaves of one kind may share a slot."""
        return self.shape, self.dtype, self.spec


@dataclass(frozen=True)
class Slot:
    """An array (stages, rows, *shape) with leaves of several stages.

    Attributes:
      name: layer and path of its first leaf.
      leaf: of the first; all have its shape, dtype and spec.
      rows: most leaves that one device stage has in it.
    """

    name: str
    leaf: Leaf
    rows: int


@dataclass(frozen=True)
class SlotPlan:
    """A place for every leaf.

    Attributes:
      slots: in the order of their first leaves.
      places: of each layer, those of its leaves in flattening order.
    """

    slots: tuple[Slot, ...]
    places: tuple[tuple[Place, ...], ...]

    @property
    def padding(self) -> int:
        """Elements of all slots together in which no leaf lies."""
        used = [math.prod(self.slots[p.slot].leaf.shape) for own in self.places for p in own]
        stages = 1 + max((place.stage for own in self.places for place in own), default=0)
        whole = sum(stages * slot.rows * math.prod(slot.leaf.shape) for slot in self.slots)
        return whole - sum(used)


def specs_of(params: Sequence[PyTree], param_specs: PyTree | None) -> list[PyTree]:
    """A spec per leaf of each layer, of a prefix of that; None: whole everywhere.

    Raises:
      ValueError: specs that don't fit the parameters.
    """
    given = P() if param_specs is None else param_specs
    try:
        return jax.tree.broadcast(given, list(params), is_leaf=_is_spec)
    except ValueError as error:
        raise ValueError(
            "`param_specs` must be a list of one tree of PartitionSpec per layer, or a prefix of "
            f"it: {error}"
        ) from None


def _is_spec(x: Any) -> bool:
    return isinstance(x, P)


def leaves_of(params: Sequence[PyTree], param_specs: PyTree | None) -> list[list[Leaf]]:
    """What is known of the leaves of each layer.

    Raises:
      ValueError: specs that don't fit the parameters, leaves that are no numbers.
    """
    found = []
    for layer, specs in zip(params, specs_of(params, param_specs), strict=True):
        named = zip(
            leaf_names(layer),
            jax.tree.leaves(layer),
            jax.tree.leaves(specs, is_leaf=_is_spec),
            strict=True,
        )
        found.append([_leaf(name, x, spec) for name, x, spec in named])
    return found


def _leaf(name: str, x: Any, spec: P) -> Leaf:
    dtype = jnp.result_type(x)
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        raise ValueError(f"`params` must hold numbers, got {name!r} of type {dtype}.")
    if len(spec) > jnp.ndim(x):
        raise ValueError(
            f"`param_specs` has {spec} for {name!r}, which has {jnp.ndim(x)} dimensions."
        )
    entries = list(spec)
    while entries and entries[-1] is None:
        entries.pop()
    return Leaf(name, jnp.shape(x), dtype, P(*entries))


def plan_slots(
    leaves: Sequence[Sequence[Leaf]], blocks: Sequence[Block], placement: Sequence[int]
) -> SlotPlan:
    """A place for every leaf: alike leaves of different stages in one slot.

    Stages whose leaves are alike, in order, have them in the same slots. Of other stages, a leaf
    goes where one of the same path lies if there is such a slot, so that a slot rarely mixes, say,
    scales with biases; then wherever one of its kind lies.

    Args:
      leaves: of each layer.
      blocks: layers of each stage of the model.
      placement: of each stage of the model, the device stage that holds it.
    """
    names: list[str] = []
    firsts: list[Leaf] = []
    known: dict[tuple[Leaf, ...], list[int]] = {}
    rows: dict[tuple[int, int], int] = {}  # used so far, of a slot on a device stage
    places: list[tuple[Place, ...]] = [()] * len(leaves)
    for block, stage in zip(blocks, placement, strict=True):
        own = [(i, leaf) for i in range(block.start, block.end) for leaf in leaves[i]]
        key = tuple(leaf for _, leaf in own)
        if key not in known:
            known[key] = _slots_for(own, names, firsts)
        at = iter(known[key])
        for i in range(block.start, block.end):
            found = []
            for slot in [next(at) for _ in leaves[i]]:
                row = rows.get((slot, stage), 0)
                rows[slot, stage] = row + 1
                found.append(Place(slot, stage, row))
            places[i] = tuple(found)
    most = [max(n for (slot, _), n in rows.items() if slot == i) for i in range(len(firsts))]
    return SlotPlan(tuple(map(Slot, names, firsts, most)), tuple(places))


def _slots_for(own: Sequence[tuple[int, Leaf]], names: list[str], firsts: list[Leaf]) -> list[int]:
    """The slots of one stage's leaves, each once; new ones are appended."""
    free = set(range(len(firsts)))
    found: list[int | None] = []
    for _, leaf in own:
        same = (s for s in sorted(free) if firsts[s] == leaf)
        found.append(next(same, None))
        free.discard(-1 if found[-1] is None else found[-1])
    for at, (layer, leaf) in enumerate(own):
        if found[at] is None:
            alike = (s for s in sorted(free) if firsts[s].kind == leaf.kind)
            slot = next(alike, None)
            if slot is None:
                slot = len(firsts)
                firsts.append(leaf)
                names.append(f"{layer}/{leaf.path}" if leaf.path != "(root)" else str(layer))
            free.discard(slot)
            found[at] = slot
    return [slot for slot in found if slot is not None]
