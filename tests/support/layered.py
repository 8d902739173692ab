"""A small model of layers, and comparisons of its pipelines with the model on one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxslowmo as js

WIDTH, VOCABULARY = 4, 8


def embed(params, batch):
    return params["table"][batch["tokens"]]


def block(params, x):
    return x + jnp.tanh(x @ params["up"] + params["bias"][None]) @ params["down"]


def head(params, x):
    return x @ params["table"].T


def loss(logits, batch):
    log_likelihood = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["next"][:, None], 1)
    return -jnp.mean(log_likelihood), {"highest": jnp.mean(jnp.max(logits, -1))}


def language_model(num_blocks: int, *, tied: bool = True) -> tuple[js.LayeredModel, list[Any]]:
    """Return a model of an embedding, blocks and a head, and its parameters."""
    draw = np.random.default_rng(7).normal
    table = draw(size=(VOCABULARY, WIDTH))
    params = [{"table": table}]
    for _ in range(num_blocks):
        params.append(
            {
                "up": draw(size=(WIDTH, 6)) / 2,
                "bias": draw(size=6) / 4,
                "down": draw(size=(6, WIDTH)) / 2,
            }
        )
    params.append({"table": table if tied else draw(size=(VOCABULARY, WIDTH))})
    groups = [((0, "table"), (num_blocks + 1, "table"))] if tied else []
    model = js.LayeredModel([embed, *[block] * num_blocks, head], loss, tied=groups)
    return model, jax.tree.map(lambda x: x.astype(np.float32), params)


def tokens(examples: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Return a batch of `examples` examples for the language model."""
    drawn = np.random.default_rng(seed).integers(0, VOCABULARY, (2, examples))
    return {"tokens": drawn[0].astype(np.int32), "next": drawn[1].astype(np.int32)}


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Raise unless the trees are equal in structure and, up to rounding in float32, in values.

    A sum in another order is off by a share of its largest terms, so small values next to large
    ones in an array may differ by as much as those.
    """

    def check(x: Any, y: Any) -> None:
        largest = max(1.0, float(np.max(np.abs(y), initial=0.0)))
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * largest)

    jax.tree.map(check, actual, expected)
