"""Slow steps of large leaves, block by block where they lie.

A slow step needs the mean of the replicas beside anchor and moments. Of a leaf that takes most of
the memory, such as an embedding table, that would be memory of its size.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ..._support.types import PyTree, axis_names
from ...collectives import block_sizes, in_blocks, is_in_blocks
from ...transform import ReplicaGroup, run_if, unseen_zero
from ...tree import has_form_of, leaf_names, note_buffers, noted_buffers, plan_buffers
from ._fragments import Fragment

Displaced = Callable[[ReplicaGroup, PyTree, PyTree], PyTree]
"""D of parameters and anchor."""
AnchorStep = Callable[[PyTree, PyTree, Any], tuple[PyTree, Any]]
"""Anchor and outer state after the outer optimizer's step, of D and both before."""
_Stepped = tuple[PyTree, PyTree, Any]


def slow_step(
    displaced: Displaced,
    step: AnchorStep,
    replicas: ReplicaGroup,
    params: PyTree,
    anchor: PyTree,
    outer: Any,
) -> _Stepped:
    """Return the parameters after a slow step, the anchor, and the outer state."""
    displacement = displaced(replicas, params, anchor)
    anchor, outer = step(displacement, anchor, outer)
    return replicas.all_gather(anchor, params), anchor, outer


def slow_step_in_blocks(
    displaced: Displaced,
    step: AnchorStep,
    replicas: ReplicaGroup,
    params: PyTree,
    anchor: PyTree,
    outer: Any,
    count: jax.Array,
) -> _Stepped:
    """Return `slow_step` of functions that act on elements, of large leaves block by block.

    Args:
      displaced: function of some leaves; see `slow_step`.
      step: function of some leaves.
      replicas: the replicas, for leaves like these.
      params: the parameters.
      anchor: the anchor.
      outer: the state of the outer optimizer.
      count: () int32, equal on all replicas, such as the number of the update.

    Communication: that of `slow_step`, for up to 64 blocks of a large leaf one after the other.
    """
    large = _num_parts(replicas, params)
    if not large:
        return slow_step(displaced, step, replicas, params, anchor, outer)
    is_alike = has_form_of(anchor)
    states, form = jax.tree.flatten(outer, is_leaf=is_alike)
    places = [i for i, x in enumerate(states) if is_alike(x)]
    trees = [params, anchor, *(states[i] for i in places)]

    def of_part(
        part: Fragment, step: AnchorStep, trees: Sequence[PyTree]
    ) -> tuple[list[PyTree], list[Any]]:
        """Return these trees of some leaves after their step, and all states."""
        x, a, *moments = trees
        group = replicas.of_leaves(params, part.places, part.like)
        before = form.unflatten(_with(states, places, moments))
        x, a, after = slow_step(displaced, step, group, x, a, before)
        after = form.flatten_up_to(after)
        return [x, a, *(after[i] for i in places)], after

    def alone(*operands: Any) -> tuple[PyTree, Any]:
        # XLA would compute in the write of the anchor what the moments have been, and in theirs
        # what the anchor has been, and copy both; but not beyond a conditional.
        is_due = unseen_zero(count) == 0
        return run_if(is_due, lambda x: step(*x), lambda x: x[1:], operands, axes=())

    rest = Fragment(places=tuple(i for i in range(len(jax.tree.leaves(params))) if i not in large))
    new, after = of_part(rest, step, [rest.of(tree) for tree in trees])
    trees = [rest.put(tree, part) for tree, part in zip(trees, new, strict=True)]
    for i, parts in large.items():
        one = Fragment(places=(i,))

        def block(*leaves: jax.Array, one: Fragment = one) -> list[jax.Array]:
            new, _ = of_part(one, alone, [one.like(params, [x]) for x in leaves])
            return jax.tree.leaves(new)

        leaves = jax.tree.leaves([one.of(tree) for tree in trees])
        with noted_buffers():  # those of single blocks
            leaves = in_blocks(block, *leaves, parts=parts)
        note_buffers("slow", plan_buffers(leaves[:1]), [leaf_names(params)[i]])
        trees = [one.put(tree, [leaf]) for tree, leaf in zip(trees, leaves, strict=True)]
    x, a, *moments = trees
    return x, a, form.unflatten(_with(after, places, moments))


def _with(states: Sequence[Any], places: Sequence[int], new: Sequence[Any]) -> list[Any]:
    """Return the states with those at some places replaced."""
    replaced = dict(zip(places, new, strict=True))
    return [replaced.get(i, x) for i, x in enumerate(states)]


def _num_parts(replicas: ReplicaGroup, params: PyTree) -> dict[int, int]:
    """Return for each leaf to take in blocks in how many parts devices have its rows.

    They are those of a training step, whose blocks are cut over the replicas as the whole leaf is.
    """
    if replicas.stacked is None:
        return {}
    found, sizes = {}, replicas.stacked.mesh.shape
    cuts, whole = replicas.dimensions(params), replicas.shared(params)
    for i, x in enumerate(jax.tree.leaves(params)):
        if not is_in_blocks(x):
            continue
        names = [*whole.spec(i, replicas.axes), None][0]
        parts = math.prod(sizes[name] for name in axis_names(names or ()))
        one = Fragment(places=(i,))
        group = replicas.of_leaves(params, one.places, one.like)
        shapes = [(n * parts, *x.shape[1:]) for n in block_sizes(x.shape[0] // parts)]
        blocks = [one.like(params, [jax.ShapeDtypeStruct(s, x.dtype)]) for s in shapes]
        if all(group.dimensions(block) == [cuts[i]] for block in blocks):
            found[i] = parts
    return found
