"""Try on small arrays whether a transform gives the same results stage by stage.

In a pipeline a transform sees the leaves of one stage at a time. That changes nothing if its result
for a leaf depends on this leaf alone, but it is wrong for one that takes a norm of all gradients.
Nothing in optax distinguishes the two, so each transform is tried: it runs some updates of small
arrays with the model's paths, once for all stages together and once for each stage alone.
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
# The scale of the gradients of each update. Some learning rates depend on the distance from the
# start, which takes a few updates to grow, and clipping may have any limit, so scales vary widely.
# In the last update a gradient is not finite.
_SCALES = (*[1.0] * 8, 1e-3, 1e6, 1.0, 1.0)
_DOUBLED = len(_SCALES) - 2  # the update before which leaves of the state may be doubled
_TOLERANCE = 1e-4


class _Results(NamedTuple):
    """The results of several updates by a transform.

    Attributes:
      updates: one tree for each update.
      state: the state after the last update.
      keeps_structure: whether that state has the structure of the initial one.
    """

    updates: list[PyTree]
    state: PyTree
    keeps_structure: bool


class Trial(NamedTuple):
    """The properties of a transform that a trial has shown.

    Attributes:
      shared: whether each leaf of the state that does not mirror the parameters is equal on all
        stages; () if the transform could not be tried (it needs arguments or shapes that a trial
        does not have).
      is_elementwise: whether the result for an element depends on this element alone; only
        determined if leaves are sharded inside a stage.
      keeps_structure: whether updates keep the structure of the state.
      failure: the error that the trial ended with; "" if there was none.
    """

    shared: tuple[bool, ...] = ()
    is_elementwise: bool = False
    keeps_structure: bool = True
    failure: str = ""

    def is_shared(self, number: int) -> bool:
        """Return whether leaf `number`, of those that mirror no parameters, is shared."""
        # A state may have another structure for other shapes.
        return self.shared[number] if number < len(self.shared) else True


@functools.lru_cache(maxsize=64)
def trial_of(packing: BufferPacking, tx: optax.GradientTransformation) -> Trial:
    """Try a transform on small arrays.

    Args:
      packing: the packing of the parameters.
      tx: the transform.

    Raises:
      ValueError: results for a leaf depend on leaves of other stages.
      UserWarning: `tx` could not be tried.

    Communication: none; it runs at once, on one device of this process.
    """
    # A new thread has no mapped axes and no trace, whatever the caller is doing.
    with ThreadPoolExecutor(1) as thread:
        trial = thread.submit(_tried, packing, tx).result()
    if trial.failure:
        warn_user(
            "`optimizer` could not be tried on small arrays. If its result for a leaf depends on "
            "leaves of other stages, a pipeline trains differently from the model without stages. "
            f"The trial ended with {trial.failure}"
        )
    return trial


def _tried(packing: BufferPacking, tx: optax.GradientTransformation) -> Trial:
    small = _small(packing)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transforms warn of axes of size 1
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
            # These leaves of the state may be statistics of all parameters. Double them: if the
            # next update changes, it depends on them.
            doubled, now = run(None, doubled=statistics), slice(_DOUBLED, _DOUBLED + 1)
            differing = _differing(small, whole, doubled, None, updates=now)
    for stage, results in enumerate(every):
        if differing := differing or _differing(small, whole, results, stage):
            raise ValueError(
                "`optimizer` holds a transform whose result for a leaf depends on leaves of other "
                f"stages, as in a trial {differing}: each stage of a pipeline updates the leaves "
                "that it holds. For a norm or a check of all gradients use "
                "js.clip_by_global_norm(...) and js.dynamic_loss_scale(...), joined with the "
                "optimizer by js.chain, which know of stages."
            )
    shared = tuple(all(_alike(x, xs[0]) for x in xs) for xs in _others(small, every))
    return Trial(shared, is_elementwise, whole.keeps_structure)


def _small(packing: BufferPacking) -> BufferPacking:
    """Return the packing with few elements per leaf, and one of each stage's equal layers."""
    leaves = tuple(
        tuple(x._replace(shape=tuple(min(n, _SIDE) for n in x.shape), spec=P()) for x in group)
        for group in packing.leaves
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
    """Return the results for all stages, and a function that runs one stage.

    If a plain run fails, both are mapped over the axes `names`, as some transforms need. If that
    fails, too, the text of the first error is returned in place of the results.
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
        except Exception as error:  # a transform may need anything that a trial does not have
            failure = failure or f"{type(error).__name__}: {error}"
    return failure, run


def _run(
    tx: optax.GradientTransformation,
    small: BufferPacking,
    stage: int | None,
    factor: float = 1.0,
    doubled: Collection[int] = (),
) -> _Results:
    """Run some updates of the leaves of one stage, or of all stages.

    Args:
      tx: the transform.
      small: the packing of the small parameters.
      stage: index of the device stage; None: all stages.
      factor: factor of the first element of each gradient.
      doubled: numbers of leaves, among those of the state that mirror no parameters, that are
        doubled before update `_DOUBLED`.
    """

    def tree(seed: int, scale: float = 1.0) -> PyTree:
        drawn = np.random.default_rng(seed).normal
        held = _positions(small, stage)
        values = [
            [jnp.asarray(scale * drawn(size=x.shape), jnp.float32) for x in group]
            for group in small.leaves
        ]
        if seed == len(_SCALES):
            first = min(_positions(small, None))
            values[first] = [x * jnp.nan for x in values[first]]
        return small.outer.unflatten(
            [
                small.subtrees[i].unflatten(arrays) if i in held else optax.MaskedNode()
                for i, arrays in enumerate(values)
            ]
        )

    params = tree(0)
    state, all_updates = tx.init(params), []
    structure = jax.tree.structure(state)
    for number, scale in enumerate(_SCALES, start=1):
        if number == _DOUBLED + 1 and doubled:
            state = _with_doubled(small, state, doubled)
        grads = jax.tree.map(partial(_first_times, factor), tree(number, scale))
        extra = {"value": jnp.float32(1 / number), "grad": grads, "value_fn": _value}
        try:
            updates, state = tx.update(grads, state, params, **extra)  # type: ignore[call-arg]
        except TypeError:  # the transform takes no extra arguments
            updates, state = tx.update(grads, state, params)
        all_updates.append(updates)
    return _Results(all_updates, state, jax.tree.structure(state) == structure)


def _with_doubled(small: BufferPacking, state: PyTree, numbers: Collection[int]) -> PyTree:
    nodes, structure = jax.tree.flatten(state, is_leaf=small.mirrors)
    others = [i for i, x in enumerate(nodes) if not small.mirrors(x)]
    for number in numbers:
        nodes[others[number]] = nodes[others[number]] * 2
    return structure.unflatten(nodes)


def _statistics(small: BufferPacking, whole: _Results, every: Sequence[_Results]) -> list[int]:
    """Return numbers of floating leaves whose value for a stage differs from that for all."""
    numbers = []
    for number, (expected, *values) in enumerate(_others(small, [whole, *every])):
        is_float = jnp.issubdtype(jnp.result_type(expected), jnp.floating)
        same_shape = all(np.shape(x) == np.shape(expected) for x in values)
        if is_float and same_shape and not all(_alike(x, expected) for x in values):
            numbers.append(number)
    return numbers


def _positions(small: BufferPacking, stage: int | None) -> Sequence[int]:
    """Return the positions of the parameters of one stage, or of all stages."""
    return small.stages[stage] if stage is not None else [i for held in small.stages for i in held]


def _first_times(factor: float, x: jax.Array) -> jax.Array:
    return x if factor == 1 else x.at[(0,) * x.ndim].multiply(factor)


def _is_elementwise(one: _Results, other: _Results) -> bool:
    """Return whether only first elements differ, not counting the last, non-finite update."""
    pairs = zip(*map(jax.tree.leaves, (one.updates[:-1], other.updates[:-1])), strict=True)
    return all(_alike(x.ravel()[1:], y.ravel()[1:]) for x, y in pairs)


def _value(params: PyTree, *_: Any, **__: Any) -> jax.Array:
    return sum((jnp.sum(x**2) for x in jax.tree.leaves(params)), start=jnp.float32(0))


def _differing(
    small: BufferPacking,
    whole: _Results,
    results: _Results,
    stage: int | None,
    updates: slice | None = None,
) -> str:
    """Return the name of an update or a part of the state that differs from `whole`; "" if none.

    If `updates` is not None, only these updates are compared, and no state.
    """
    names = leaf_names(small.outer.unflatten([0] * len(small.leaves)))
    pairs = zip(whole.updates, results.updates, strict=True)
    trees = [("the update", *pair) for pair in pairs][updates or slice(None)]
    if updates is None:
        nodes = [
            jax.tree.flatten(state, is_leaf=small.mirrors)[0]
            for state in (whole.state, results.state)
        ]
        every = zip(*nodes, strict=True)
        trees += [("the state", *pair) for pair in every if small.mirrors(pair[0])]
    for what, expected, actual in trees:
        parts = small.outer.flatten_up_to(expected), small.outer.flatten_up_to(actual)
        for position in _positions(small, stage):
            pair = [jax.tree.leaves(each[position]) for each in parts]
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
    """Return each leaf of the state that mirrors no parameters, as a tuple over all results."""
    flat = [jax.tree.leaves(results.state, is_leaf=small.mirrors) for results in every]
    return list(zip(*([x for x in nodes if not small.mirrors(x)] for nodes in flat), strict=True))
