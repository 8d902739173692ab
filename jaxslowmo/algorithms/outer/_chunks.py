"""Slow steps that take large leaves in chunks of rows, one after the other and in place.

A slow step needs memory for the replicas' mean, besides the anchor and its moments. For a leaf that
takes most of the memory, such as an embedding table, the mean would take that much again. Chunks
bound it. (A block is what a device holds of a leaf; each chunk is cut into blocks as the leaf is.)
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ..._support.types import PyTree, axis_names
from ...collectives import chunk_sizes, exchange_in_chunks, uses_chunks
from ...transform import ReplicaGroup, run_if, unseen_zero
from ...tree import form_matcher, leaf_names, note_buffers, noted_buffers, plan_buffers
from ._fragments import Fragment

DisplacementFn = Callable[[ReplicaGroup, PyTree, PyTree], PyTree]
"""Function that exchanges: D, the pseudo-gradient, from weighted parameters and the anchor."""
AnchorStep = Callable[[PyTree, PyTree, Any], tuple[PyTree, Any]]
"""Function from D, anchor and outer state to both after the outer optimizer's step."""
_StepResult = tuple[PyTree, PyTree, Any]


def slow_step(
    displacement_fn: DisplacementFn,
    step: AnchorStep,
    replicas: ReplicaGroup,
    params: PyTree,
    anchor: PyTree,
    outer: Any,
) -> _StepResult:
    """Return the whole new anchor, this replica's blocks of it, and the outer state.

    Args:
      displacement_fn: function that exchanges, and returns D.
      step: function that takes the outer optimizer's step.
      replicas: the replicas, for leaves like these.
      params: this replica's weighted parameters.
      anchor: this replica's blocks of the anchor.
      outer: the state of the outer optimizer, for these blocks.
    """
    displacement = displacement_fn(replicas, params, anchor)
    anchor, outer = step(displacement, anchor, outer)
    return replicas.all_gather(anchor, params), anchor, outer


def slow_step_in_chunks(
    displacement_fn: DisplacementFn,
    step: AnchorStep,
    replicas: ReplicaGroup,
    params: PyTree,
    anchor: PyTree,
    outer: Any,
    count: jax.Array,
) -> _StepResult:
    """Return the results of `slow_step`, which takes large leaves in chunks.

    Args:
      displacement_fn: function that exchanges; it acts on elements, and gets some leaves a call.
      step: function that takes the outer optimizer's step; it acts on elements, too.
      replicas: the replicas, for leaves like these.
      params: this replica's weighted parameters.
      anchor: this replica's blocks of the anchor.
      outer: the state of the outer optimizer, for these blocks.
      count: () int32, equal on all replicas, such as the number of the update.

    Communication: that of `slow_step`, for up to 64 chunks of a large leaf one after the other.
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
        """Return these trees, of some leaves, after their step, and all states."""
        x, a, *moments = trees
        group = replicas.for_leaves(params, part.places, part.unflatten)
        before = form.unflatten(_replace_at(states, places, moments))
        x, a, after = slow_step(displacement_fn, step, group, x, a, before)
        after = form.flatten_up_to(after)
        return [x, a, *(after[i] for i in places)], after

    def step_in_branch(displacement: PyTree, anchor: PyTree, outer: Any) -> tuple[PyTree, Any]:
        # XLA would compute in the write of the anchor what the moments have been, and in theirs
        # what the anchor has been, and copy both; but not beyond a conditional.
        is_due = unseen_zero(count) == 0
        operands = displacement, anchor, outer
        return run_if(is_due, lambda x: step(*x), lambda x: x[1:], operands, axes=())

    rest = Fragment(places=tuple(i for i in range(len(jax.tree.leaves(params))) if i not in large))
    new, after = step_part(rest, step, [rest.select(tree) for tree in trees])
    trees = [rest.write(tree, part) for tree, part in zip(trees, new, strict=True)]
    for i, parts in large.items():
        one = Fragment(places=(i,))

        def step_chunk(*leaves: jax.Array, one: Fragment = one) -> list[jax.Array]:
            new, _ = step_part(one, step_in_branch, [one.unflatten(params, [x]) for x in leaves])
            return jax.tree.leaves(new)

        leaves = jax.tree.leaves([one.select(tree) for tree in trees])
        with noted_buffers():  # those of single chunks
            leaves = exchange_in_chunks(step_chunk, *leaves, parts=parts)
        note_buffers("slow", plan_buffers(leaves[:1]).buffers, [leaf_names(params)[i]])
        trees = [one.write(tree, [leaf]) for tree, leaf in zip(trees, leaves, strict=True)]
    x, a, *moments = trees
    return x, a, form.unflatten(_replace_at(after, places, moments))


def _replace_at(states: Sequence[Any], places: Sequence[int], new: Sequence[Any]) -> list[Any]:
    """Return the states with those at some places replaced."""
    at = dict(zip(places, new, strict=True))
    return [at.get(i, x) for i, x in enumerate(states)]


def _num_parts(replicas: ReplicaGroup, params: PyTree) -> dict[int, int]:
    """Return in how many parts devices hold the rows of each leaf that is taken in chunks.

    Those are large leaves in a training step, each of whose chunks is cut into blocks along the
    same dimension as the leaf.
    """
    if replicas.stacked is None:
        return {}
    num_parts, sizes = {}, replicas.stacked.mesh.shape
    cuts, whole = replicas.dimensions(params), replicas.shared_blocks(params)
    for i, x in enumerate(jax.tree.leaves(params)):
        if not uses_chunks(x):
            continue
        names = [*whole.spec(i, replicas.axes), None][0]
        parts = math.prod(sizes[name] for name in axis_names(names or ()))
        one = Fragment(places=(i,))
        group = replicas.for_leaves(params, one.places, one.unflatten)
        shapes = [(n * parts, *x.shape[1:]) for n in chunk_sizes(x.shape[0] // parts)]
        chunks = [one.unflatten(params, [jax.ShapeDtypeStruct(s, x.dtype)]) for s in shapes]
        if all(group.dimensions(chunk) == [cuts[i]] for chunk in chunks):
            num_parts[i] = parts
    return num_parts
