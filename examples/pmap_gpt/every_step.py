"""A small GPT on bytes of text, data-parallel by pmap: gradients are averaged in every step.

    python examples/pmap_gpt/every_step.py --steps 300

`rarely.py` beside it is this program with seven lines changed.
"""

import argparse
import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax


class Config(NamedTuple):
    """Sizes of model and batch."""

    vocabulary: int = 256
    block: int = 64  # bytes that the model sees
    layers: int = 2
    heads: int = 4
    width: int = 64
    batch: int = 8  # sequences per device


def init_params(key: jax.Array, config: Config) -> dict[str, Any]:
    """Normal weights of standard deviation 0.02."""
    width, keys = config.width, iter(jax.random.split(key, 3 + 4 * config.layers))

    def normal(*shape: int) -> jax.Array:
        return 0.02 * jax.random.normal(next(keys), shape)

    def block() -> dict[str, jax.Array]:
        return {
            "qkv": normal(width, 3, config.heads, width // config.heads),
            "project": normal(width, width),
            "expand": normal(width, 4 * width),
            "contract": normal(4 * width, width),
        }

    return {
        "bytes": normal(config.vocabulary, width),
        "positions": normal(config.block, width),
        "blocks": [block() for _ in range(config.layers)],
        "head": normal(width, config.vocabulary),
    }


def normalised(x: jax.Array) -> jax.Array:
    """Mean 0 and variance 1 along the last axis."""
    return jax.nn.standardize(x, axis=-1)


def logits(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    """(batch, length, vocabulary) of tokens (batch, length)."""
    x = params["bytes"][tokens] + params["positions"][None, : tokens.shape[1]]
    for block in params["blocks"]:
        q, k, v = jnp.einsum("blw,wchd->cblhd", normalised(x), block["qkv"])
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + attended.reshape(x.shape) @ block["project"]
        x = x + jax.nn.gelu(normalised(x) @ block["expand"]) @ block["contract"]
    return normalised(x) @ params["head"]


def loss_fn(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    """Cross entropy of the next byte, for tokens (batch, length + 1)."""
    predicted = logits(params, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(predicted, tokens[:, 1:]).mean()


def train(steps: int, config: Config, text: np.ndarray) -> tuple[dict[str, Any], list[float]]:
    """The trained parameters, and the loss of every tenth step."""
    devices, rng = jax.local_device_count(), np.random.default_rng(0)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps // 10, steps)
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, weight_decay=0.1),
    )

    @functools.partial(jax.pmap, axis_name="replica", donate_argnums=(0, 1))
    def train_step(params, opt_state, tokens):
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        grads = lax.pmean(grads, "replica")
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = init_params(jax.random.key(0), config)
    params = jax.tree.map(lambda p: jnp.stack([p] * devices), params)
    opt_state = jax.pmap(tx.init)(params)
    losses = []
    for step in range(steps):
        starts = rng.integers(len(text) - config.block, size=(devices, config.batch, 1))
        tokens = text[starts + np.arange(config.block + 1)]
        params, opt_state, loss = train_step(params, opt_state, tokens)
        if step % 10 == 0:
            losses.append(float(loss.mean()))
    params = jax.tree.map(lambda p: p[0], params)
    return params, losses


def main() -> None:
    """Train on the text of this file and print the loss."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    text = np.frombuffer(Path(__file__).read_bytes(), np.uint8).astype(np.int32)
    _, losses = train(args.steps, Config(), text)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} on {jax.local_device_count()} devices")


if __name__ == "__main__":
    main()
