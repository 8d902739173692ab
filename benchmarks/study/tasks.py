"""The two tasks: a perceptron on digits, and a small language model on Python's source."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxslowmo.data import TextBatches, read_corpus, split_corpus
from jaxslowmo.models import GPTConfig, gpt_loss_fn, init_gpt

Tree = Any


@dataclass(frozen=True)
class Task:
    """A problem with data of its own for each seed.

    Attributes:
      loss_fn: the mean loss of a batch.
      params: `params(seed)`: initial parameters.
      batches: `batches(seed, steps, replicas)`: leaves of shape (steps, replicas, ...).
      held_out: `held_out(seed)`: the batches "validation", by which settings are chosen, "test",
        which is reported, and "train", of what the replicas see.
      final_seeds: number of seeds of the results.
      data: what identifies the data, where another machine may have other.
    """

    loss_fn: Callable[[Tree, Tree], jax.Array]
    params: Callable[[int], Tree]
    batches: Callable[[int, int, int], Tree]
    held_out: Callable[[int], dict[str, Tree]]
    final_seeds: int
    data: str


def stacked(make: Callable[[int], Tree], seeds: range) -> Tree:
    """Return the trees of all seeds in one, with a leading dimension."""
    return jax.tree.map(lambda *x: np.stack(x), *map(make, seeds))


WIDTH, BATCH, IMAGES, TRAIN, VALIDATION = 32, 8, 1797, 1197, 300


@functools.cache
def classifier() -> Task:
    """scikit-learn's digits, turned and moved, and a perceptron of 2,410 parameters.

    Without copies the perceptron learns its 1,197 images by heart within seconds, whatever is
    exchanged, and held-out losses say little about the training. Each image has 45 forms: turned by
    up to 20 degrees, moved by up to one pixel.
    """
    from scipy import ndimage
    from sklearn.datasets import load_digits

    digits = load_digits()
    forms = []
    for angle in (-20, -10, 0, 10, 20):
        turned = ndimage.rotate(digits.images, angle, axes=(2, 1), reshape=False, order=1)
        moves = [(0, y, x) for y in (-1, 0, 1) for x in (-1, 0, 1)]
        forms += [ndimage.shift(turned, move, order=1) for move in moves]
    images = jnp.asarray(np.stack(forms).reshape(-1, 64) / 16, jnp.float32)
    labels = jnp.asarray(np.tile(digits.target, len(forms)), jnp.int32)

    def loss_fn(params: Tree, examples: jax.Array) -> jax.Array:
        hidden = jax.nn.relu(images[examples] @ params["w1"] + params["b1"][None])
        logits = hidden @ params["w2"] + params["b2"][None]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels[examples])
        return losses.mean()

    def params(seed: int) -> Tree:
        draws = np.random.default_rng([seed, 0])
        weights = {
            "w1": draws.normal(size=(64, WIDTH)) * (2 / 64) ** 0.5,
            "w2": draws.normal(size=(WIDTH, 10)) * WIDTH**-0.5,
            "b1": np.zeros(WIDTH),
            "b2": np.zeros(10),
        }
        return {name: x.astype(np.float32) for name, x in weights.items()}

    def in_forms(images: np.ndarray, draws: np.random.Generator) -> np.ndarray:
        return (images + IMAGES * draws.integers(len(forms), size=images.shape)).astype(np.int32)

    def batches(seed: int, steps: int, replicas: int) -> np.ndarray:
        draws, count = np.random.default_rng([seed, 1]), steps * replicas * BATCH
        # The replicas share each epoch out, in a new order, as a distributed sampler does.
        epochs = [draws.permutation(_images(seed)[:TRAIN]) for _ in range(-(-count // TRAIN))]
        examples = np.concatenate(epochs)[:count].reshape(steps, replicas, BATCH)
        return in_forms(examples, draws)

    def held_out(seed: int) -> dict[str, Tree]:
        ends, draws = [TRAIN, TRAIN + VALIDATION], np.random.default_rng([seed, 2])
        train, validation, test = np.split(_images(seed), ends)
        # Each held-out image in several forms, so that the losses are less noisy.
        parts = {"validation": np.tile(validation, 4), "test": np.tile(test, 4), "train": train}
        return {name: in_forms(part, draws) for name, part in parts.items()}

    return Task(loss_fn, params, batches, held_out, final_seeds=20, data="digits")


def _images(seed: int) -> np.ndarray:
    """Return the order of the images for a seed: training, validation, test."""
    return np.random.default_rng([seed, 3]).permutation(IMAGES)


MODEL = GPTConfig(num_layers=2, num_heads=2, embed_dim=32, context_length=32)
WINDOWS, HELD_OUT = 4, 1024


@functools.cache
def language() -> Task:
    """The standard library's source and a GPT of 42,880 parameters; the text is that of all seeds.

    Each replica has files of its own.
    """
    corpus = read_corpus()
    loss_fn = gpt_loss_fn(MODEL)

    def batches(seed: int, steps: int, replicas: int) -> np.ndarray:
        window = MODEL.context_length + 1
        shares = split_corpus(corpus, replicas).shares
        text = TextBatches(shares, batch_size=WINDOWS, window=window, seed=seed)
        drawn = np.stack([text.batch(i) for i in range(steps)])
        return drawn.reshape(steps, replicas, WINDOWS, window)

    def held_out(seed: int) -> dict[str, Tree]:
        del seed  # equal for all, so that seeds differ by the training alone
        text = split_corpus(corpus, 8).validation
        half, window = text.size // 2, MODEL.context_length + 1
        halves = {"validation": text[:half], "test": text[half:]}
        return {
            name: TextBatches([part], batch_size=HELD_OUT, window=window, seed=0).batch(0)
            for name, part in halves.items()
        }

    data = f"Python's source, {corpus.num_bytes} bytes, {corpus.fingerprint[:16]}"
    return Task(
        loss_fn, lambda seed: init_gpt(MODEL, seed), batches, held_out, final_seeds=5, data=data
    )


def mixed_language() -> Task:
    """The task of `language`, with the windows of each update dealt out to the replicas anew.

    So no replica has files of its own. All replicas together see the same windows in an update, so
    an all-reduce has the same losses.
    """
    task = language()

    def batches(seed: int, steps: int, replicas: int) -> np.ndarray:
        windows = task.batches(seed, steps, replicas)
        dealt = windows.reshape(steps, replicas * WINDOWS, -1)
        order = np.tile(np.arange(dealt.shape[1]), (steps, 1))
        np.random.default_rng([seed, 4]).permuted(order, axis=1, out=order)
        return np.take_along_axis(dealt, order[:, :, None], axis=1).reshape(windows.shape)

    return replace(task, batches=batches)


TASKS = {"classifier": classifier, "language": language}
