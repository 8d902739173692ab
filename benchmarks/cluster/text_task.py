"""Training a small GPT on real text: what both libraries do alike. Only NumPy."""

import numpy as np

PRESET = "demo"  # of `jaxslowmo.models`
HOSTS, MAX_STEPS, EVERY = 4, 1440, 24
PERIOD = 48  # a multiple of every period below
LEARNING_RATE, WARMUP, WEIGHT_DECAY, CLIP = 1e-3, 16, 0.1, 1.0
BETAS = (0.9, 0.95)
JAX = (
    "all_reduce",
    "local_sgd(12)",
    "local_sgd(24)",
    "local_sgd(48)",
    "slowmo(12, 48)",
    "diloco(48)",
    "diloco(48), int8",
    "diloco(48), int4",
    # Half of the local progress is kept. Nothing is in flight when a model is evaluated, so that no
    # exchange goes on while the clock stands.
    "local_sgd(24, delay=6)",
    "local_sgd(48, fragments=4, delay=10)",
    "diloco(48, fragments=4, delay=3)",
    "diloco(48, fragments=4, delay=10)",
)
TORCH = ("DDP",)


def learning_rate(t: int) -> float:
    """Of the 0-based update count: a linear warm-up, then constant, so that no end is built in."""
    return LEARNING_RATE * min(1.0, t / WARMUP)


def own_batch(batches: np.ndarray, t: int, rank: int, world: int) -> np.ndarray:
    """(batch, window), what a host reads in its step t."""
    return batches[t].reshape(world, -1, batches.shape[-1])[rank]


def save(path: str, seed: int, batch: int) -> dict[str, float]:
    """Write batches of `batch` windows per host, validation windows and initial parameters.

    The driver calls it.
    """
    import jax

    from jaxslowmo.data import TextBatches, read_corpus, split_corpus, validation_batches
    from jaxslowmo.models import gpt_preset, init_gpt
    from jaxslowmo.tree import leaf_names

    config = gpt_preset(PRESET)
    window = config.context_length + 1
    corpus = read_corpus()
    split = split_corpus(corpus, HOSTS)
    batches = TextBatches(split.shares, batch_size=batch, window=window, seed=seed)
    parameters = init_gpt(config, seed)
    named = zip(leaf_names(parameters), jax.tree.leaves(parameters), strict=True)
    np.savez(
        path,
        batches=np.stack([batches.batch(i) for i in range(MAX_STEPS)]),
        validation=validation_batches(
            split.validation, num_batches=4, batch_size=64, window=window
        ),
        **{f"p:{name}": np.asarray(leaf) for name, leaf in named},
    )
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(parameters))
    return {"corpus_mb": round(corpus.num_bytes / 1e6, 1), "model_bytes": size}
