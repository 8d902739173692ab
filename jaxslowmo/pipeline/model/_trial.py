"""Whether a transform gives each leaf what it gives it without stages, tried on few numbers.

The transform of a stage sees the leaves of this stage alone. That is no loss to one whose result
for a leaf depends on this leaf, and another thing for one that takes a norm of all gradients.
Nothing tells the two apart, so each is asked: it makes some updates of small arrays with the
model's own names, once of all stages together and once of each alone.
"""

import functools
import math
import warnings
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from ..._support.checks import warn_user
from ..._support.types import PyTree
from ...tree import leaf_names
from ._buffer_packing import BufferPacking

_SIDE = 3  # elements along an axis, at most
# How large gradients are, one update after the other: some rates follow distances, which take a
# while to grow, and limits of clipping lie anywhere. In the last one a gradient is not finite.
_SCALES = (*[1.0] * 8, 1e-3, 1e6, 1.0, 1.0)
_DOUBLED = len(_SCALES) - 2  # the update before which leaves of the state may be doubled
_TOLERANCE = 1e-4


class _Results(NamedTuple):
    """What a transform makes of several updates of some leaves.

    Attributes:
      updates: one tree for each update.
      state: after the last one.
      keeps_structure: whether it has the structure of the first state.
    """

    updates: list[PyTree]
    state: PyTree
    keeps_structure: bool


class Trial(NamedTuple):
    """What a trial has shown of a transform.

    Attributes:
      shared: for each leaf of its state that mirrors no parameters, whether it is equal on all
        stages; () where the transform could not be tried (it wants arguments or shapes that a trial
        does not have).
      is_elementwise: whether its result for an element depends on this element alone; it is only
        asked where leaves are sharded inside a stage.
      keeps_structure: whether updates leave the structure of its state as it is.
      failure: the error that the transform ended with; "" where it could be tried.
    """

    shared: tuple[bool, ...] = ()
    is_elementwise: bool = False
    keeps_structure: bool = True
    failure: str = ""

    def is_shared(self, number: int) -> bool:
        """Whether leaf `number` of those that mirror no parameters is equal on all stages."""
        # A state may have another structure for other shapes.
        return self.shared[number] if number < len(self.shared) else True


@functools.lru_cache(maxsize=64)
def trial_of(packing: BufferPacking, tx: optax.GradientTransformation) -> Trial:
    """Try a transform.

    Args:
      packing: of the parameters.
      tx: the transform.

    Raises:
      ValueError: results for a leaf depend on leaves of other stages.
      UserWarning: `tx` could not be tried.

    Communication: none; it runs on one device of this process, now.
    """
    # In a thread of its own no axis is mapped and nothing is traced.
    with ThreadPoolExecutor(1) as thread:
        trial = thread.submit(_tried, packing, tx).result()
    if trial.failure:
        warn_user(
            "`optimizer` could not be tried on few numbers, so nothing tells whether its result "
            "for a leaf depends on leaves of other stages; if it does, a pipeline trains otherwise "
            f"than without stages. The trial ended with {trial.failure}"
        )
    return trial


def _tried(packing: BufferPacking, tx: optax.GradientTransformation) -> Trial:
    small = _small(packing)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of axes of size 1, over which there is nothing to do
        names = (packing.axis_name, *packing.mesh.axis_names)
        whole, run = _first_that_runs(tx, small, names)
        if isinstance(whole, str):
            return Trial(failure=whole)
        is_sharded = any(math.prod(packing.sizes(name)) > 1 for name in packing.axes)
        is_elementwise = is_sharded and _is_elementwise(whole, run(None, factor=2.0))
        if small.num_stages == 1:
            return Trial((), is_elementwise, whole.keeps_structure)
        every = [run(stage) for stage in range(small.num_stages)]
        differing = ""
        if statistics := _statistics(small, whole, every):
            # Of all leaves together; whether updates depend on them shows where they change.
            doubled, now = run(None, doubled=statistics), slice(_DOUBLED, _DOUBLED + 1)
            differing = _differing(small, whole, doubled, None, updates=now)
    for stage, own in enumerate(every):
        if differing := differing or _differing(small, whole, own, stage):
            raise ValueError(
                "`optimizer` holds a transform whose result for a leaf depends on leaves of other "
                f"stages, as in a trial {differing}: each stage of a pipeline updates the leaves "
                "that it holds. For a norm or a check of all gradients use "
                "js.clip_by_global_norm(...) and js.dynamic_loss_scale(...), joined with the "
                "optimizer by js.chain, which know of stages."
            )
    shared = tuple(all(_alike(x, own[0]) for x in own) for own in _others(small, every))
    return Trial(shared, is_elementwise, whole.keeps_structure)


def _small(packing: BufferPacking) -> BufferPacking:
    """The same parameters with few elements each; of equal layers of a stage the first alone."""
    leaves = tuple(
        tuple(x._replace(shape=tuple(min(n, _SIDE) for n in x.shape), spec=P()) for x in own)
        for own in packing.leaves
    )
    names = leaf_names(packing.outer.unflatten([0] * len(leaves)))
    stages = []
    for positions in packing.stages:
        kinds = {(names[i].partition("/")[2], packing.leaves[i]): i for i in reversed(positions)}
        stages.append(tuple(sorted(kinds.values())))
    return replace(packing, leaves=leaves, stages=tuple(stages), axis_sizes=())


def _first_that_runs(
    tx: optax.GradientTransformation, small: BufferPacking, names: Sequence[str]
) -> tuple[_Results | str, Callable[..., _Results]]:
    """The results of all stages, and a function of a stage; mapped over axes if it must be.

    In the place of results an error that it ended with both ways.
    """

    def run(stage: int | None, **options: Any) -> _Results:
        return _run(tx, small, stage, **options)

    def mapped(stage: int | None, **options: Any) -> _Results:
        fn: Callable[[], _Results] = partial(run, stage, **options)
        for name in dict.fromkeys(names):
            fn = jax.vmap(fn, axis_name=name, axis_size=1, out_axes=None)
        return fn()

    failure = ""
    for each in (run, mapped):
        try:
            return each(None), each
        except Exception as error:  # it may want anything that training has and a trial has not
            failure = failure or f"{type(error).__name__}: {error}"
    return failure, run


def _run(
    tx: optax.GradientTransformation,
    small: BufferPacking,
    stage: int | None,
    factor: float = 1.0,
    doubled: Collection[int] = (),
) -> _Results:
    """Some updates of the leaves of one stage; of all with None.

    Args:
      tx: the transform.
      small: the parameters.
      stage: the device stage.
      factor: by which the first element of each gradient is multiplied.
      doubled: numbers of leaves of the state, of those that mirror no parameters, that are doubled
        before one of the updates.
    """

    def tree(seed: int, scale: float = 1.0) -> PyTree:
        drawn = np.random.default_rng(seed).normal
        held = _positions(small, stage)
        values = [
            [jnp.asarray(scale * drawn(size=x.shape), jnp.float32) for x in own]
            for own in small.leaves
        ]
        if seed == len(_SCALES):
            first = min(_positions(small, None))
            values[first] = [x * jnp.nan for x in values[first]]
        return small.outer.unflatten(
            [
                small.subtrees[i].unflatten(own) if i in held else optax.MaskedNode()
                for i, own in enumerate(values)
            ]
        )

    params = tree(0)
    state, made = tx.init(params), []
    structure = jax.tree.structure(state)
    for number, scale in enumerate(_SCALES, start=1):
        if number == _DOUBLED + 1 and doubled:
            state = _with_doubled(small, state, doubled)
        grads = jax.tree.map(partial(_first_times, factor), tree(number, scale))
        told = {"value": jnp.float32(1 / number), "grad": grads, "value_fn": _value}
        try:
            updates, state = tx.update(grads, state, params, **told)  # type: ignore[call-arg]
        except TypeError:  # it takes no more than it knows
            updates, state = tx.update(grads, state, params)
        made.append(updates)
    return _Results(made, state, jax.tree.structure(state) == structure)


def _with_doubled(small: BufferPacking, state: PyTree, numbers: Collection[int]) -> PyTree:
    nodes, structure = jax.tree.flatten(state, is_leaf=small.mirrors)
    others = [i for i, x in enumerate(nodes) if not small.mirrors(x)]
    for number in numbers:
        nodes[others[number]] = nodes[others[number]] * 2
    return structure.unflatten(nodes)


def _statistics(small: BufferPacking, whole: _Results, every: Sequence[_Results]) -> list[int]:
    """Numbers of floating leaves that have other values for one stage than for all together."""
    found = []
    for number, (expected, *own) in enumerate(_others(small, [whole, *every])):
        is_float = jnp.issubdtype(jnp.result_type(expected), jnp.floating)
        same_shape = all(np.shape(x) == np.shape(expected) for x in own)
        if is_float and same_shape and not all(_alike(x, expected) for x in own):
            found.append(number)
    return found


def _positions(small: BufferPacking, stage: int | None) -> Sequence[int]:
    """The parameters that take part in a trial, of one stage or of all."""
    return small.stages[stage] if stage is not None else [i for own in small.stages for i in own]


def _first_times(factor: float, x: jax.Array) -> jax.Array:
    return x if factor == 1 else x.at[(0,) * x.ndim].multiply(factor)


def _is_elementwise(one: _Results, other: _Results) -> bool:
    """Whether only first elements differ, up to where a gradient is not finite."""
    pairs = zip(*map(jax.tree.leaves, (one.updates[:-1], other.updates[:-1])), strict=True)
    return all(_alike(x.ravel()[1:], y.ravel()[1:]) for x, y in pairs)


def _value(params: PyTree, *_: Any, **__: Any) -> jax.Array:
    return sum((jnp.sum(x**2) for x in jax.tree.leaves(params)), start=jnp.float32(0))


def _differing(
    small: BufferPacking,
    whole: _Results,
    own: _Results,
    stage: int | None,
    updates: slice | None = None,
) -> str:
    """The update or part of the state of a stage that differs; "" where all are alike.

    Of `updates`, if given, these alone are looked at, and no state.
    """
    names = leaf_names(small.outer.unflatten([0] * len(small.leaves)))
    pairs = zip(whole.updates, own.updates, strict=True)
    known = [("the update", *pair) for pair in pairs][updates or slice(None)]
    if updates is None:
        nodes = [
            jax.tree.flatten(state, is_leaf=small.mirrors)[0] for state in (whole.state, own.state)
        ]
        every = zip(*nodes, strict=True)
        known += [("the state", *pair) for pair in every if small.mirrors(pair[0])]
    for what, expected, found in known:
        parts = small.outer.flatten_up_to(expected), small.outer.flatten_up_to(found)
        for position in _positions(small, stage):
            pair = [jax.tree.leaves(own[position]) for own in parts]
            if not all(map(_alike, *pair)):
                return f"{what} of {names[position]!r}"
    return ""


def _alike(x: Any, y: Any) -> bool:
    if jnp.issubdtype(jnp.result_type(x), jax.dtypes.extended):
        x, y = jax.random.key_data(x), jax.random.key_data(y)
    x, y = (np.asarray(v, np.float64) for v in (x, y))
    finite = np.abs(y[np.isfinite(y)])
    atol = _TOLERANCE * finite.max(initial=0.0)
    return x.shape == y.shape and np.allclose(x, y, _TOLERANCE, atol, equal_nan=True)


def _others(small: BufferPacking, every: Sequence[_Results]) -> list[tuple[Any, ...]]:
    """The leaves of states that mirror no parameters, those of all results together."""
    flat = [jax.tree.leaves(own.state, is_leaf=small.mirrors) for own in every]
    return list(zip(*([x for x in own if not small.mirrors(x)] for own in flat), strict=True))
