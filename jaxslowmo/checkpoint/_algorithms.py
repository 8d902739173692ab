"""What a run remembers of its exchanges, in the form of another algorithm, by names of leaves."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..tree import matching_suffix
from ._record import SHARED, LeafRecord

FLIGHT = re.compile(r"exchange/local/(base/)*in_flight/")
_OUTER = re.compile(rf"{SHARED}(?:base/)*outer(?=/|$)")
_NUM_LISTED = 5

Shapes = Mapping[str, tuple[int, ...]]


def convert_exchange_state(
    wanted: Mapping[str, LeafRecord],
    saved: Mapping[str, Any],
    params: Shapes,
    init_arrays: Callable[[], Mapping[str, Any]],
    *,
    keeps_flight: bool,
) -> tuple[dict[str, Any], list[str]]:
    """Return the arrays of another algorithm, and sentences that say what was begun or dropped.

    Args:
      wanted: its leaves by name.
      saved: the arrays of a checkpoint by name, stacked for the replicas that it has.
      params: the shapes of the parameters by name.
      init_arrays: function that returns the first arrays of all leaves, for the saved parameters.
      keeps_flight: whether what is in flight can arrive: nothing but the replicas has changed.
    """
    remaining, notes = dict(saved), []
    drops_flight = not keeps_flight and any(map(FLIGHT.match, saved))
    if drops_flight:
        remaining = {name: x for name, x in saved.items() if not FLIGHT.match(name)}
        notes.append("What was in flight is dropped.")
    before, shapes = remaining.keys(), {name: leaf.own_shape for name, leaf in wanted.items()}
    remaining = _regroup_fragments(shapes, remaining, params)
    if remaining.keys() != before:
        notes.append(
            "The state of the outer optimizer goes on in other fragments; counts are the largest."
        )
    found, fresh_names = {}, []
    for name, leaf in wanted.items():
        x = remaining.get(name)
        if x is not None and (_own_shape(name, x), x.dtype) == (leaf.own_shape, leaf.dtype):
            found[name] = remaining.pop(name)
        else:
            fresh_names.append(name)
    initial = init_arrays() if fresh_names else {}
    for name in fresh_names:
        found[name] = x = initial[name]
        if (
            "/sent/reference" in name
            and (anchor := found.get(_anchor_name(name, wanted))) is not None
        ):
            # Replicas measure from the anchor, so that the way since the last slow step counts.
            found[name] = np.broadcast_to(anchor, x.shape).astype(x.dtype)
    lost = [name for name in remaining if "/sent/residual" in name]
    if lost and not any("/sent/residual" in name for name in wanted):
        notes.append("What the codec had not sent is dropped.")
    dropped = [name for name in remaining if name not in lost]
    fresh_names = [name for name in fresh_names if not (drops_flight and FLIGHT.match(name))]
    for names, text in ((dropped, "is dropped"), (fresh_names, "begins anew")):
        trees = [*dict.fromkeys(_tree_and_param(name, params)[0] for name in names)]
        if trees:
            more = f", and {len(trees) - _NUM_LISTED} more" if len(trees) > _NUM_LISTED else ""
            notes.append(
                f"This run has another algorithm than the checkpoint; of its state "
                f"{', '.join(trees[:_NUM_LISTED])}{more} {text}."
            )
    return found, notes


def _regroup_fragments(wanted: Shapes, saved: dict[str, Any], params: Shapes) -> dict[str, Any]:
    """Return saved arrays, states of outer optimizers by the names of other fragments.

    Trees like the parameters, such as momentum, have one order whatever the fragments are. Of other
    leaves, such as counts, each fragment has its own: all get the largest.
    """
    for prefix in dict.fromkeys(m[0] for name in wanted if (m := _OUTER.match(name))):
        old, new = (
            {name: x for name, x in shapes.items() if (m := _OUTER.match(name)) and m[0] == prefix}
            for shapes in ({name: x.shape for name, x in saved.items()}, wanted)
        )
        is_part = re.compile(rf"{prefix}/(moments/\d+|rest/\d+/\d+$)").match
        if old.keys() == new.keys() or not any(map(is_part, [*old, *new])):
            continue
        (trees, rest), (new_trees, new_rest) = (
            _group_by_tree(x, prefix, params) for x in (old, new)
        )
        if [*map(list, trees)] != [*map(list, new_trees)] or len(rest) != len(new_rest):
            continue  # another optimizer
        found = {name: x for name, x in saved.items() if name not in old}
        for tree, new_tree in zip(trees, new_trees, strict=True):
            found |= {new_tree[param]: saved[name] for param, name in tree.items()}
        for names, new_names in zip(rest, new_rest, strict=True):
            largest = np.max([saved[name] for name in names], axis=0)
            found |= dict.fromkeys(new_names, largest)
        saved = found
    return saved


def _group_by_tree(
    shapes: Shapes, prefix: str, params: Shapes
) -> tuple[Sequence[dict[str, str]], Sequence[list[str]]]:
    """Return the names in each tree like the parameters, and those of each other leaf.

    A tree maps names of parameters; another leaf has a name for each fragment.
    """
    trees: dict[str, dict[str, str]] = {}
    rest: dict[str, list[str]] = {}
    for name, shape in shapes.items():
        tree, param = _tree_and_param(name, params)
        if params.get(param) == shape:
            trees.setdefault(tree, {})[param] = name
        else:
            of_fragment = re.fullmatch(rf"{prefix}/rest/\d+/(\d+)", name)
            rest.setdefault(of_fragment[1] if of_fragment else name, []).append(name)
    return [*trees.values()], [*rest.values()]


def _tree_and_param(name: str, params: Shapes) -> tuple[str, str]:
    """Return the name of the tree in which a leaf mirrors a parameter, and of that; "" if none."""
    if [*params] == ["(root)"]:  # the parameters are one array, without a name
        return name, "(root)"
    param = matching_suffix(name, params)
    return (name.removesuffix(f"/{param}"), param) if param else (name, "")


def _own_shape(name: str, x: Any) -> tuple[int, ...]:
    return x.shape if name.startswith(SHARED) else x.shape[1:]


def _anchor_name(reference: str, names: Mapping[str, Any]) -> str:
    """Return the name of the anchor whose algorithm has this reference."""
    before, _, leaf = reference.partition("sent/reference")
    levels = before.count("base/")
    # A guard counts what it has refused, and has no shared state of its own.
    guards = sum(f"exchange/local/{'base/' * i}refused" in names for i in range(levels))
    return f"{SHARED}{'base/' * (levels - guards)}anchor{leaf}"
