"""Places of parameters in buffers of stages: recorded in checkpoints, and read back from buffers.

In a `Staged` tree only its place in a buffer identifies a parameter, so a record has the places. By
them a state is converted to the model's tree, in which every parameter has its name.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from .._support.types import PyTree
from ..mesh import axis_names
from ..tree import Leaf, LeafPlace, Staged, leaf_names


class StoredLeaf(NamedTuple):
    """A leaf of a state that has the model's trees in place of those of stages.

    Attributes:
      name: name of the leaf.
      index: index of the stored array that holds it.
      place: place of the leaf in that array; None if it is the whole array.
    """

    name: str
    index: int
    place: LeafPlace | None


def stage_layout(tree: PyTree) -> dict[str, Any] | None:
    """Return the places of leaves in a state's `Staged` trees, as plain JSON; None without any.

    Args:
      tree: the state, of arrays or types.

    Returns:
      `nodes`, a list of [name of a `Staged` tree in the state, index of its packing], and
      `packings`, a list of dicts: `stages`, their number; `sizes`, a list of [axis, size] of the
      axes inside a stage that split leaves; `leaves`, a list of [name, buffer, stage, start, shape,
      spec] of each leaf of the model's tree; `copies`, names of tied parameters whose value is
      taken from another place.
    """
    nodes: list[list[Any]] = []
    packings: dict[Any, int] = {}
    for path, x in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_stage_tree)[0]:
        if is_stage_tree(x) and x.buffers:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            nodes.append([name, packings.setdefault(x.packing, len(packings))])
    return {"nodes": nodes, "packings": [_packing_to_json(p) for p in packings]} if nodes else None


def _stage_nodes(layout: Mapping[str, Any] | None) -> list[tuple[str, dict[str, Any]]]:
    """Return name and packing of each tree of stages."""
    if layout is None:
        return []
    return [(name, layout["packings"][number]) for name, number in layout["nodes"]]


def param_packings(layout: Mapping[str, Any] | None) -> list[tuple[str, dict[str, Any]]]:
    """Return name and packing of each tree of stages that belongs to the parameters."""
    return [node for node in _stage_nodes(layout) if node[0].split("/")[0] == "params"]


def names_in_buffers(layout: Mapping[str, Any] | None) -> dict[str, bool]:
    """Return the names of leaves that are in buffers, and whether each belongs to one parameter.

    A leaf that an optimizer keeps once per stage, such as a vector of all the stage's elements,
    belongs to none.
    """
    params = {leaf[0] for _, packing in param_packings(layout) for leaf in packing["leaves"]}
    return {
        # A parameter may have several arrays, whose names begin with that of the parameter.
        f"{node}/{name}": not params.isdisjoint(
            itertools.accumulate(name.split("/"), "{}/{}".format)
        )
        for node, packing in _stage_nodes(layout)
        for name, *_ in packing["leaves"]
    }


def stored_leaves(layout: Mapping[str, Any] | None, names: Sequence[str]) -> list[StoredLeaf]:
    """Return the leaves of the state with the model's trees.

    Args:
      layout: the layout of the stored state; None: it has no stages.
      names: names of the stored arrays, in order.
    """
    indices = {name: index for index, name in enumerate(names)}
    by_position = {index: [StoredLeaf(name, index, None)] for index, name in enumerate(names)}
    for node, packing in _stage_nodes(layout):
        parts = [
            StoredLeaf(f"{node}/{name}", index, _leaf_place(stored, packing["sizes"]))
            for name, *stored in packing["leaves"]
            # A buffer may be missing: the names may be those of a part of the state.
            if (index := indices.get(f"{node}/{stored[0]}")) is not None
        ]
        for part in parts:
            by_position.pop(part.index, None)
        if parts:  # all leaves of a tree take the position of the tree's first buffer
            by_position[min(part.index for part in parts)] = parts
    return [part for _, parts in sorted(by_position.items()) for part in parts]


def read_stored_leaf(part: StoredLeaf, arrays: Sequence[Any]) -> Any:
    """Return a leaf (..., *shape) from the stored NumPy arrays."""
    place, array = part.place, arrays[part.index]
    if place is None:
        return array
    of_stage = ..., place.stage, *[slice(None)] * (len(place.leaf.sizes) + 1)
    return place.read(array[of_stage])


def to_stage_buffers(types: PyTree, tree: PyTree) -> PyTree:
    """Return a state with the trees of stages in place of the model's trees.

    Args:
      types: the types of a state that has these stages; only its structure matters.
      tree: the state as `in_model_form(types)` has it, of NumPy arrays.
    """
    nodes, structure = jax.tree.flatten(types, is_leaf=is_stage_tree)
    parts = zip(nodes, structure.flatten_up_to(tree), strict=True)
    return structure.unflatten([_pack(n.packing, x) if is_stage_tree(n) else x for n, x in parts])


def moved_note(then: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> str:
    """Return the sentence that says from which stages to which parameters were moved."""
    before, after = (_stages_text(layout) for layout in (then, now))
    way = f"from {before} to {after}" if before != after else f"to other places on the {after}"
    return f"Parameters, and what goes with them, were moved {way}."


def is_stage_tree(x: Any) -> bool:
    """Return whether `x` is a tree in buffers of stages, of parameters or of arrays like them."""
    return isinstance(x, Staged)


def _packing_to_json(packing: Any) -> dict[str, Any]:
    """Return the packing as plain JSON; see `stage_layout`."""
    names = leaf_names(packing.map(lambda place: 0))
    positions = [i for i, places in enumerate(packing.places) for _ in places]
    places = list(itertools.chain.from_iterable(packing.places))
    split = {axis for place in places for axis, _ in place.leaf.sizes}
    return {
        "stages": packing.num_stages,
        # The places do not depend on other axes, such as that of the replicas.
        "sizes": [[axis, size] for axis, size in packing.axis_sizes if axis in split],
        "leaves": [
            [name, x.leaf.buffer, x.stage, x.start, list(x.leaf.shape), spec_to_json(x.leaf.spec)]
            for name, x in zip(names, places, strict=True)
        ],
        "copies": [n for n, i in zip(names, positions, strict=True) if i in packing.copies],
    }


def spec_to_json(spec: P) -> list[list[str]]:
    """Return the axes that split each dimension."""
    return [list(axis_names(entry or ())) for entry in spec]


def _leaf_place(stored: Sequence[Any], sizes: Sequence[Any]) -> LeafPlace:
    buffer, stage, start, shape, spec = stored
    split = {axis for entry in spec for axis in entry}
    of_leaf = tuple((axis, size) for axis, size in sizes if axis in split)
    entries = [tuple(entry) for entry in spec]
    return LeafPlace(stage, start, Leaf(tuple(shape), entries, of_leaf, buffer))


def _pack(packing: Any, tree: PyTree) -> Staged:
    """Pack a tree of the model into buffers; leaves may have additional leading dimensions."""
    place = next(itertools.chain.from_iterable(packing.places))
    return packing.stack(tree, np.ndim(jax.tree.leaves(tree)[0]) - len(place.leaf.shape))


def _stages_text(layout: Mapping[str, Any] | None) -> str:
    count = next((packing["stages"] for _, packing in param_packings(layout)), 0)
    return f"{count or 'no'} stage{'' if count == 1 else 's'}"
