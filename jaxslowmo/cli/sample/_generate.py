"""Text, byte by byte, from a model that sees a window of it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxslowmo.models import GPTConfig, gpt_logits_fn

from ._config import SampleConfig


def generate(model: GPTConfig, params: Any, config: SampleConfig) -> bytes:
    """The prompt, and what the model goes on with.

    One program writes all bytes: a scan over a window of `context_length` bytes, which slides when
    it is full.

    Args:
      model: shape of the model.
      params: one copy of its parameters.
      config: what to write.
    """
    prompt = config.prompt.encode("utf-8", "surrogateescape")  # bytes of the shell that are no text
    seen = np.frombuffer(prompt, np.uint8)[-model.context_length :]
    window = np.zeros(model.context_length, np.int32)
    window[: seen.size] = seen
    keys = jax.random.split(jax.random.key(config.seed), config.tokens)
    logits_fn = gpt_logits_fn(model)

    def write(carry: tuple[jax.Array, jax.Array], key: jax.Array) -> tuple[Any, jax.Array]:
        window, size = carry
        # What lies behind the text is not seen: attention is causal.
        logits = logits_fn(params, window[None])[0, size - 1]
        new = _drawn(logits, key, config)
        is_full = size == window.size
        window = jnp.where(is_full, jnp.roll(window, -1), window)
        size = jnp.where(is_full, size, size + 1)
        return (window.at[size - 1].set(new), size), new

    _, written = jax.jit(lambda *start: jax.lax.scan(write, start, keys))(
        jnp.asarray(window), jnp.asarray(seen.size)
    )
    return prompt + np.asarray(written, np.uint8).tobytes()


def _drawn(logits: jax.Array, key: jax.Array, config: SampleConfig) -> jax.Array:
    if config.temperature == 0:
        return jnp.argmax(logits).astype(jnp.int32)
    if config.top_k:
        least = jax.lax.top_k(logits, config.top_k)[0][-1]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    # Not logits / temperature, which a tiny one would make infinite.
    scaled = (logits - logits.max()) / config.temperature
    return jax.random.categorical(key, scaled).astype(jnp.int32)
