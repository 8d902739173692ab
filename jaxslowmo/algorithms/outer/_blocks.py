"""Slow steps of large leaves, block by block where they lie.

A slow step needs the mean of the replicas beside anchor and moments. Of a leaf that takes most of
the memory, such as an embedding table, that would be memory of its size.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ..._support.types import PyTree, axis_names
from ...collectives import block_sizes, exchange_in_blocks, uses_blocks
from ...transform import ReplicaGroup, run_if, unseen_zero
from ...tree import form_matcher, leaf_names, note_buffers, noted_buffers, plan_buffers
from ._fragments import Fragment

DisplacementFn = Callable[[ReplicaGroup, PyTree, PyTree], PyTree]
"""D of parameters and anchor."""
AnchorStep = Callable[[PyTree, PyTree, Any], tuple[PyTree, Any]]
"""Anchor and outer state after the outer optimizer's step, of D and both before."""
_StepResult = tuple[PyTree, PyTree, Any]


def slow_step(
    displacement_fn: DisplacementFn,
    step: AnchorStep,
    replicas: ReplicaGroup,
    params: PyTree,
    anchor: PyTree,
    outer: Any,
) -> _StepResult:
    """Return the parameters after a slow step, the anchor, and the outer state."""
    displacement = displacement_fn(replicas, params, anchor)
    anchor, outer = step(displacement, anchor, outer)
    return replicas.all_gather(anchor, params), anchor, outer


def slow_step_in_blocks(
    displacement_fn: DisplacementFn,
    step: AnchorStep,
    replicas: ReplicaGroup,
    params: PyTree,
    anchor: PyTree,
    outer: Any,
    count: jax.Array,
) -> _StepResult:
    """Return `slow_step` of functions that act on elements, of large leaves block by block.

    Args:
      displacement_fn: function of some leaves; see `slow_step`.
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
        return slow_step(displacement_fn, step, replicas, params, anchor, outer)
    is_alike = form_matcher(anchor)
    states, form = jax.tree.flatten(outer, is_leaf=is_alike)
    places = [i for i, x in enumerate(states) if is_alike(x)]
    trees = [params, anchor, *(states[i] for i in places)]

    def step_part(
        part: Fragment, step: AnchorStep, trees: Sequence[PyTree]
    ) -> tuple[list[PyTree], list[Any]]:
        """Return these trees of some leaves after their step, and all states."""
        x, a, *moments = trees
        group = replicas.for_leaves(params, part.places, part.unflatten)
        before = form.unflatten(_replace_at(states, places, moments))
        x, a, after = slow_step(displacement_fn, step, group, x, a, before)
        after = form.flatten_up_to(after)
        return [x, a, *(after[i] for i in places)], after

    def step_in_branch(*operands: Any) -> tuple[PyTree, Any]:
        # XLA would compute in the write of the anchor what the moments have been, and in theirs
        # what the anchor has been, and copy both; but not beyond a conditional.
        is_due = unseen_zero(count) == 0
        return run_if(is_due, lambda x: step(*x), lambda x: x[1:], operands, axes=())

    rest = Fragment(places=tuple(i for i in range(len(jax.tree.leaves(params))) if i not in large))
    new, after = step_part(rest, step, [rest.select(tree) for tree in trees])
    trees = [rest.write(tree, part) for tree, part in zip(trees, new, strict=True)]
    for i, parts in large.items():
        one = Fragment(places=(i,))

        def block(*leaves: jax.Array, one: Fragment = one) -> list[jax.Array]:
            new, _ = step_part(one, step_in_branch, [one.unflatten(params, [x]) for x in leaves])
            return jax.tree.leaves(new)

        leaves = jax.tree.leaves([one.select(tree) for tree in trees])
        with noted_buffers():  # those of single blocks
            leaves = exchange_in_blocks(block, *leaves, parts=parts)
        note_buffers("slow", plan_buffers(leaves[:1]).buffers, [leaf_names(params)[i]])
        trees = [one.write(tree, [leaf]) for tree, leaf in zip(trees, leaves, strict=True)]
    x, a, *moments = trees
    return x, a, form.unflatten(_replace_at(after, places, moments))


def _replace_at(states: Sequence[Any], places: Sequence[int], new: Sequence[Any]) -> list[Any]:
    """Return the states with those at some places replaced."""
    at = dict(zip(places, new, strict=True))
    return [at.get(i, x) for i, x in enumerate(states)]


def _num_parts(replicas: ReplicaGroup, params: PyTree) -> dict[int, int]:
    """Return for each leaf to take in blocks in how many parts devices have its rows.

    They are those of a training step, whose blocks are cut over the replicas as the whole leaf is.
    """
    if replicas.stacked is None:
        return {}
    found, sizes = {}, replicas.stacked.mesh.shape
    cuts, whole = replicas.dimensions(params), replicas.shared_blocks(params)
    for i, x in enumerate(jax.tree.leaves(params)):
        if not uses_blocks(x):
            continue
        names = [*whole.spec(i, replicas.axes), None][0]
        parts = math.prod(sizes[name] for name in axis_names(names or ()))
        one = Fragment(places=(i,))
        group = replicas.for_leaves(params, one.places, one.unflatten)
        shapes = [(n * parts, *x.shape[1:]) for n in block_sizes(x.shape[0] // parts)]
        blocks = [one.unflatten(params, [jax.ShapeDtypeStruct(s, x.dtype)]) for s in shapes]
        if all(group.dimensions(block) == [cuts[i]] for block in blocks):
            found[i] = parts
    return found
