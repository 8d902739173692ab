"""Models as lists of leaf shapes, the same for both libraries, and their gradients.

Only NumPy: the torch worker runs in an environment without jax.
"""

import functools
import math

import numpy as np

Shape = tuple[int, ...]
MODELS = {
    "mixed": "300 leaves, half of them matrices: 295 of log-uniform sizes up to 2**18, 5 of 2**20",
    "equal": "20 matrices of 512 x 512",
    "large": "one matrix of 16,384 x 512 among 10 vectors of 512",
    "small": "200 vectors of 64 elements",
}


def mixed_shapes(seed: int = 4) -> list[Shape]:
    """Scalars, vectors and matrices in random order; a few leaves hold most of the bytes."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.uniform(0, math.log(2**18), 295)).astype(int).tolist()
    shapes: list[Shape] = [(1024, 1024)] * 5
    for size in sizes:
        if size < 4:
            shapes.append(())
        elif rng.random() < 0.5:
            shapes.append((size,))
        else:
            # Sides are powers of 2, so that shapes repeat, as they do in a model.
            bits = round(math.log2(size))
            shapes.append((2 ** (bits // 2), 2 ** (bits - bits // 2)))
    return [shapes[i] for i in rng.permutation(len(shapes))]


def shapes_of(model: str) -> list[Shape]:
    if model == "mixed":
        return mixed_shapes()
    if model == "equal":
        return [(512, 512)] * 20
    if model == "large":
        return [(512,)] * 5 + [(16384, 512)] + [(512,)] * 5
    if model == "small":
        return [(64,)] * 200
    raise ValueError(f"`model` must be one of {', '.join(MODELS)}, got {model!r}.")


def gradients(model: str, rank: int) -> list[np.ndarray]:
    """Gradients of one process: a part that all share and noise of its own, as of minibatches."""
    shared, own = np.random.default_rng(0), np.random.default_rng(1 + rank)
    return [
        np.asarray(shared.standard_normal(s, np.float32) + own.standard_normal(s, np.float32))
        for s in shapes_of(model)
    ]


@functools.cache
def exact_mean(model: str, world: int) -> list[np.ndarray]:
    leaves = zip(*(gradients(model, rank) for rank in range(world)), strict=True)
    return [np.mean(np.stack(leaf), 0) for leaf in leaves]


def relative_error(found: list[np.ndarray], model: str, world: int) -> float:
    """Norm of what differs from the exact mean over all processes, over the norm of that mean."""
    mean = exact_mean(model, world)
    pairs = [(f.reshape(-1), m.reshape(-1)) for f, m in zip(found, mean, strict=True)]
    wrong = sum(float(np.sum((f - m) ** 2)) for f, m in pairs)
    return math.sqrt(wrong / sum(float(np.sum(m**2)) for _, m in pairs))
