"""Does an optimizer treat every element by itself? Then it may be given shards of flat buffers."""

import functools
import math
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import optax

from ..._support.types import PyTree

# Large enough for optimizers that treat large matrices in another way (adafactor: from 128).
_SHAPES = {"matrix": (130, 130), "vector": (4,)}
_SHARD = (4, 2113)  # shape of the shards, of which two hold all elements
# Of gradients: below and above any sensible threshold. The last ones have a NaN in one element.
_SCALES = (1e-3, 1.0, 1e4, 1e8)


def element_wise(
    owner: str, argument: str, optimizer: optax.GradientTransformation
) -> optax.GradientTransformation:
    """`optimizer`, which was seen to treat every element by itself.

    A few steps are tried on a small tree, whole and split: now, or when a state is made where jax
    has no device yet (taking one would end the chance to call `jax.distributed.initialize`).

    Raises:
      ValueError: the results differ, or it can't be applied to flat shards.

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
            # Another thread is outside of what is being traced in this one, and of its settings.
            with ThreadPoolExecutor(1) as pool:
                whole, split = pool.submit(_whole_and_split, optimizer).result()
        except jax.errors.UnexpectedTracerError:
            return  # made of values that are being traced, which cannot be tried apart from that
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
    """`(steps, elements)` of updates of a few steps, of the tree as it is and in shards."""
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
        own = [(x[half].reshape(_SHARD),) for x in (start, *gradients)]
        halves.append(_updates(optimizer, own[0], own[1:]))
    return whole, np.concatenate(halves, axis=1)


def _updates(
    optimizer: optax.GradientTransformation, params: PyTree, gradients: list[PyTree]
) -> np.ndarray:
    """`(steps, elements)`: all updates, flat."""

    def run(params: PyTree, gradients: list[PyTree]) -> list[PyTree]:
        state, found = optimizer.init(params), []
        for gradient in gradients:
            updates, state = optimizer.update(gradient, state, params)
            params = optax.apply_updates(params, updates)
            found.append(updates)
        return found

    # The probe holds a NaN, moves arrays and runs code of others, whatever is allowed elsewhere.
    with (
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.transfer_guard("allow"),
        jax.numpy_dtype_promotion("standard"),
        jax.enable_x64(False),
    ):
        found = jax.device_get(jax.jit(run)(params, gradients))
    return np.stack([np.concatenate([x.ravel() for x in jax.tree.leaves(u)]) for u in found])


def _has_devices() -> bool:
    try:  # No public way asks without starting the backends.
        from jax._src.xla_bridge import backends_are_initialized
    except ImportError:
        return False
    return backends_are_initialized()
