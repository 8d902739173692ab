"""A byte-level GPT in flax nnx, and the pure functions that the training layer sees of it."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._extras import needed_by

with needed_by("jaxslowmo.models"):
    from flax import nnx

COMPUTE_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """Shape of a `GPT`.

    Attributes:
      num_layers: transformer blocks, >= 1.
      num_heads: attention heads; divides `embed_dim`.
      embed_dim: width of the residual stream.
      context_length: bytes that the model sees; a training window has one more.
      vocab_size: 256, one symbol per byte value.
      dtype: dtype of activations and matrix products: "float32", "bfloat16" or "float16", which
        trains with `js.dynamic_loss_scale`.
        Parameters, softmax, layer-norm statistics and the loss are always float32.
      tied: the embedding's table is the output layer too, as in GPT-2: there is no `head`.
      remat: keep only the input of each block for the backward pass, which computes the rest
        again: memory of one block's activations instead of all of them, for a third more products.

    Raises:
      ValueError: for a size below 1, heads that do not divide the width, an unknown dtype.
    """

    num_layers: int
    num_heads: int
    embed_dim: int
    context_length: int
    vocab_size: int = 256
    dtype: str = "float32"
    tied: bool = False
    remat: bool = False

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_heads", "embed_dim", "context_length", "vocab_size"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"`{name}` must be >= 1, got {value}.")
        if self.embed_dim % self.num_heads:
            raise ValueError(
                f"`num_heads` must divide `embed_dim`, got {self.num_heads} and {self.embed_dim}."
            )
        if self.dtype not in COMPUTE_DTYPES:
            raise ValueError(f"`dtype` must be one of {COMPUTE_DTYPES}, got {self.dtype!r}.")


class Block(nnx.Module):
    """Pre-norm transformer block: causal attention, then a GELU MLP four times as wide."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        width, dtype = config.embed_dim, jnp.dtype(config.dtype)
        self.num_heads = config.num_heads
        self.norm_attention = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.qkv = nnx.Linear(width, 3 * width, dtype=dtype, rngs=rngs)
        self.project = nnx.Linear(width, width, dtype=dtype, rngs=rngs)
        self.norm_mlp = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.expand = nnx.Linear(width, 4 * width, dtype=dtype, rngs=rngs)
        self.contract = nnx.Linear(4 * width, width, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, time, width) -> the same shape."""
        batch, time, width = x.shape
        qkv = self.qkv(self.norm_attention(x))
        qkv = qkv.reshape(batch, time, 3, self.num_heads, width // self.num_heads)
        if qkv.dtype == jnp.float16:
            # The product that jax asks for, of float16 and summed in float32, no CPU has.
            qkv = qkv.astype(jnp.float32)
        mixed = jax.nn.dot_product_attention(
            qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True
        )
        x = x + self.project(mixed.reshape(batch, time, width).astype(x.dtype))
        # The tanh form: erf has no fast vector version on the CPU backend.
        return x + self.contract(jax.nn.gelu(self.expand(self.norm_mlp(x)), approximate=True))


class GPT(nnx.Module):
    """Decoder-only transformer over bytes: learned positions, an output layer or a tied one.

    Blocks are unrolled, not scanned: at these depths it compiles in seconds, and on CPU a loop
    over layers would cost a copy of every stacked parameter and activation per layer. Made
    directly, it has flax's initial parameters; `init_gpt` makes GPT-2's.
    """

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        width, dtype = config.embed_dim, jnp.dtype(config.dtype)
        self.vocab_size, self.remat = config.vocab_size, config.remat
        self.embed = nnx.Linear(config.vocab_size, width, use_bias=False, dtype=dtype, rngs=rngs)
        positions = nnx.initializers.normal(0.02)(rngs.params(), (config.context_length, width))
        self.positions = nnx.Param(positions)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.is_tied = config.tied
        if not config.tied:
            self.head = nnx.Linear(width, config.vocab_size, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Bytes (batch, time), any integer dtype -> logits (batch, time, vocab_size), float32.

        `time` is at most `context_length`.
        """
        # A one-hot product instead of a lookup: with 256 symbols it costs less than one of the
        # block's products, and its gradient is a product too, not a scatter-add (slow on CPU/TPU).
        x = self.embed(jax.nn.one_hot(tokens, self.vocab_size, dtype=self.embed.dtype))
        x = x + self.positions[: tokens.shape[1]].astype(x.dtype)
        run = nnx.remat(Block.__call__) if self.remat else Block.__call__
        for block in self.blocks:
            x = run(block, x)
        x = self.norm(x)
        if self.is_tied:
            return (x @ self.embed.kernel[...].astype(x.dtype).T).astype(jnp.float32)
        return self.head(x).astype(jnp.float32)


def init_gpt(config: GPTConfig, seed: int = 0) -> dict[str, Any]:
    """Fresh float32 parameters as a nested dict of arrays, as GPT-2 has them at the start.

    Normal with deviation 0.02; the last layer of each branch has that over sqrt(2 * num_layers),
    since as many branches add to the residual stream. Biases 0, norms 1. Drawn by numpy: the same
    for a seed on every backend and with every version of jax, and nothing has to be compiled.

    Args:
      config: shape of the model.
      seed: of the random numbers, >= 0.

    Returns:
      The parameters, on the host.

    Raises:
      ValueError: if `seed` is negative.
    """
    if seed < 0:
        raise ValueError(f"`seed` must be >= 0, got {seed}.")
    random = np.random.default_rng(seed)
    shrunk = 0.02 / (2 * config.num_layers) ** 0.5

    def make(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        names = [str(getattr(key, "key", key)) for key in path]
        if names[-1] in ("bias", "scale"):
            return jnp.full(leaf.shape, float(names[-1] == "scale"), jnp.float32)
        deviation = shrunk if {"project", "contract"} & set(names) else 0.02
        return jnp.asarray(deviation * random.standard_normal(leaf.shape, np.float32))

    return jax.tree_util.tree_map_with_path(make, _abstract_parameters(config))


def gpt_logits_fn(config: GPTConfig) -> Callable[[Mapping[str, Any], jax.Array], jax.Array]:
    """`logits_fn(params, tokens) -> logits`, of every next byte.

    Args:
      config: shape of the model.

    Returns:
      A pure function: of what `init_gpt` returns and bytes (batch, time) of any integer dtype, with
      time <= `context_length`, it gives float32 logits (batch, time, vocab_size).
    """
    graph, template = nnx.split(_abstract(config))

    def logits_fn(params: Mapping[str, Any], tokens: jax.Array) -> jax.Array:
        state = jax.tree.map(lambda x: x, template)
        nnx.replace_by_pure_dict(state, dict(params))
        return nnx.merge(graph, state)(tokens)

    return logits_fn


def gpt_loss_fn(config: GPTConfig) -> Callable[[Mapping[str, Any], jax.Array], jax.Array]:
    """The loss of the model as a pure function: mean cross-entropy in nats per byte.

    Args:
      config: shape of the model.

    Returns:
      `loss_fn(params, batch) -> loss`. `params` is what `init_gpt` returns; `batch` holds windows
      of `context_length + 1` bytes, (local_batch, context_length + 1), uint8 or int32: all but the
      last byte are the input, all but the first the target. The loss is a float32 scalar. It works
      under `jit`, `grad`, `vmap` and `shard_map` (`check_vma` on and off).

    Raises:
      ValueError: at trace time, if the windows do not have `context_length + 1` bytes.
    """
    logits_fn = gpt_logits_fn(config)

    def loss_fn(params: Mapping[str, Any], batch: jax.Array) -> jax.Array:
        if batch.ndim != 2 or batch.shape[1] != config.context_length + 1:
            raise ValueError(
                "`batch` must have the shape (local_batch, context_length + 1) = "
                f"(local_batch, {config.context_length + 1}), got {batch.shape}."
            )
        logits = logits_fn(params, batch[:, :-1])
        target = jax.nn.one_hot(batch[:, 1:], config.vocab_size, dtype=jnp.float32)
        # A masked sum instead of take_along_axis, whose gradient is a scatter.
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - jnp.sum(logits * target, axis=-1))

    return loss_fn


def num_parameters(config: GPTConfig) -> int:
    """Parameters of the model, each counted once: embeddings, positions, an untied output layer.

    Args:
      config: shape of the model.

    Returns:
      Their number; nothing is allocated.
    """
    return sum(leaf.size for leaf in jax.tree.leaves(_abstract_parameters(config)))


def _abstract_parameters(config: GPTConfig) -> dict[str, Any]:
    return nnx.to_pure_dict(nnx.split(_abstract(config))[1])


def _abstract(config: GPTConfig) -> GPT:
    """The model with shapes instead of arrays."""
    return nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0)))
