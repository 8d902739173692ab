"""The places that js.sparta draws, by the formula of its docstring."""

import jax
import numpy as np


def drawn(t: int, size: int, *, block: int, seed: int = 0) -> np.ndarray:
    """One place in each `block` consecutive ones, of those below `size`."""
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), t)
    within = jax.random.randint(key, (-(-size // block),), 0, block, "int32")
    places = np.asarray(within) + block * np.arange(len(within))
    return places[places < size]
