"""A check that an optimizer is element-wise, so that it can run on shards of flat buffers."""

import functools
import math
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import optax

from ..._support.types import PyTree

# Large enough for optimizers that treat large matrices differently (adafactor: from 128).
_SHAPES = {"matrix": (130, 130), "vector": (4,)}
_SHARD = (4, 2113)  # shape of a shard; two shards hold all elements
# Scales of gradients, below and above any sensible threshold. The last gradient holds one NaN.
_SCALES = (1e-3, 1.0, 1e4, 1e8)


def element_wise(
    owner: str, argument: str, optimizer: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Return `optimizer` after checking that it treats every element by itself.

    The check runs a few steps on a small tree, whole and split. It runs now, or when a state is
    made if jax has no device yet (using one would prevent a later `jax.distributed.initialize`).

    Raises:
      ValueError: the results differ, or the optimizer cannot be applied to flat shards.

    Communication: none.
    """
    refusal = (
        f"{owner}: `{argument}` must treat every element by itself where `shard_state` is True, "
        "since it is given flat shards and no whole leaves (no global norm, no scaling by leaf, no "
        "masks or labels by leaf, no check that all is finite, no noise): pass shard_state=False "
        "for this one."
    )

    @functools.cache
    def check() -> None:
        try:
            # Another thread is free of this thread's traces and settings.
            with ThreadPoolExecutor(1) as pool:
                whole, split = pool.submit(_whole_and_split, optimizer).result()
        except jax.errors.UnexpectedTracerError:
            return  # the optimizer holds traced values, which another thread cannot use
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise ValueError(f"{refusal} It can't be applied to them: {what}") from error
        largest = np.max(np.abs(whole), axis=1, keepdims=True, where=np.isfinite(whole), initial=0)
        near = np.abs(whole - split) <= 1e-4 * np.abs(whole) + 1e-6 * largest
        if not np.all(near | (whole == split) | (np.isnan(whole) & np.isnan(split))):
            raise ValueError(f"{refusal} On a small tree the two give different results.")

    def init_fn(params: PyTree) -> PyTree:
        check()
        return optimizer.init(params)

    if _has_devices():
        check()
    return optax.GradientTransformationExtraArgs(
        init_fn, optax.with_extra_args_support(optimizer).update
    )


def _whole_and_split(optimizer: optax.GradientTransformation) -> tuple[np.ndarray, np.ndarray]:
    """Return the updates `(steps, elements)` of a few steps, on the whole tree and on shards."""
    random = np.random.default_rng(0)
    size = sum(math.prod(shape) for shape in _SHAPES.values())
    drawn = random.normal(size=(2 + len(_SCALES), size))
    drawn[1:-1] *= np.expand_dims(_SCALES, 1)
    drawn[-1, 0] = np.nan
    start, *gradients = drawn.astype(np.float32)

    def as_tree(flat: np.ndarray) -> PyTree:
        parts = np.split(flat, [math.prod(_SHAPES["matrix"])])
        shaped = zip(_SHAPES.items(), parts, strict=True)
        return {name: part.reshape(shape) for (name, shape), part in shaped}

    whole = _updates(optimizer, as_tree(start), [as_tree(g) for g in gradients])
    halves = []
    for half in np.split(np.arange(size), 2):
        first, *rest = [(x[half].reshape(_SHARD),) for x in (start, *gradients)]
        halves.append(_updates(optimizer, first, rest))
    return whole, np.concatenate(halves, axis=1)


def _updates(
    optimizer: optax.GradientTransformation, params: PyTree, gradients: list[PyTree]
) -> np.ndarray:
    """Return the updates of all steps, flat, `(steps, elements)`."""

    def run(params: PyTree, gradients: list[PyTree]) -> list[PyTree]:
        state, steps = optimizer.init(params), []
        for gradient in gradients:
            updates, state = optimizer.update(gradient, state, params)
            params = optax.apply_updates(params, updates)
            steps.append(updates)
        return steps

    # The check uses a NaN, transfers arrays and runs code of users, whatever the settings forbid.
    with (
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.transfer_guard("allow"),
        jax.numpy_dtype_promotion("standard"),
        jax.enable_x64(False),
    ):
        steps = jax.device_get(jax.jit(run)(params, gradients))
    return np.stack([np.concatenate([x.ravel() for x in jax.tree.leaves(u)]) for u in steps])


def _has_devices() -> bool:
    try:  # jax has no public function that tells without starting the backends.
        from jax._src.xla_bridge import backends_are_initialized
    except ImportError:
        return False
    return backends_are_initialized()
