"""A GPT as a list of layers, which can be cut into stages between any two of them."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..._support.extras import needed_by
from ._gpt import GPTBlock, GPTConfig, byte_loss, check_windows
from ._sharding import Rules, constrain, gather_kernel

with needed_by("jaxslowmo.models"):
    from flax import nnx

Layer = Callable[[Any, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class GPTLayers:
    """The layers of a `GPT`: the embedding, the blocks, and the norm with the output layer.

        parts = gpt_layers(config)
        model = js.LayeredModel(parts.layers, parts.loss, tied=parts.tied)
        loss = model(parts.split(init_gpt(config)), batch)

    Attributes:
      layers: `num_layers + 2` functions `layer(params, x) -> x`. The first one takes windows of
        bytes like `gpt_loss_fn`, the last one returns float32 logits. All blocks are one function.
      loss: function `loss(logits, batch)` that computes the loss of `gpt_loss_fn`.
      tied: groups of leaves that are one parameter, each as (layer, path); () if there are none.
      is_tied: whether the table of the embedding is the output layer.
    """

    layers: tuple[Layer, ...]
    loss: Callable[[jax.Array, jax.Array], jax.Array]
    tied: tuple[tuple[tuple[int, str], ...], ...]
    is_tied: bool

    def split(self, params: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return one tree per layer from a tree of `init_gpt`; a tied table is in two of them."""
        first = {"embed": params["embed"], "positions": params["positions"]}
        last = "embed" if self.is_tied else "head"
        blocks = params["blocks"]
        return [
            first,
            *(blocks[i] for i in range(len(self.layers) - 2)),
            {"norm": params["norm"], last: params[last]},
        ]

    def join(self, layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the tree from the trees of `split`; a tied table is the embedding's copy."""
        first, *blocks, last = layers
        head = {} if self.is_tied else {"head": last["head"]}
        return {**first, "blocks": dict(enumerate(blocks)), "norm": last["norm"], **head}


def gpt_layers(config: GPTConfig, rules: Rules | None = None) -> GPTLayers:
    """Return the model of a configuration as a list of layers.

    Args:
      config: shape of the model; with `remat` each block keeps only its input.
      rules: layout of activations over automatic axes, as in `gpt_logits_fn`.

    Returns:
      The layers, the loss, and conversions between `init_gpt`'s tree and one tree per layer. The
      loss is that of `gpt_loss_fn`.

    Raises:
      ValueError: at trace time, windows without `context_length + 1` bytes.
    """
    dtype = jnp.dtype(config.dtype)

    def embed(params: Mapping[str, Any], batch: jax.Array) -> jax.Array:
        check_windows(config, batch)
        symbols = jax.nn.one_hot(batch[:, :-1], config.vocab_size, dtype=dtype)
        kernel = gather_kernel(params["embed"]["kernel"].astype(dtype), "vocab", "embed")
        x = constrain(symbols, "batch", None, "vocab") @ kernel
        return constrain(x + params["positions"][None].astype(dtype), "batch", None, None)

    block = _pure(lambda rngs: GPTBlock(config, rngs=rngs))
    norm = _pure(lambda rngs: nnx.LayerNorm(config.embed_dim, dtype=dtype, rngs=rngs))

    def head(params: Mapping[str, Any], x: jax.Array) -> jax.Array:
        x = norm(params["norm"], x)
        if config.tied:
            kernel = gather_kernel(params["embed"]["kernel"].astype(dtype), "vocab", "embed").T
        else:
            kernel = gather_kernel(params["head"]["kernel"].astype(dtype), "embed", "vocab")
        logits = (x @ kernel).astype(jnp.float32)
        return constrain(logits, "batch", None, "vocab")

    with_rules = functools.partial(_with_axis_rules, rules)
    # One function for all blocks, so that stages with equally many blocks share one program.
    run = with_rules(jax.checkpoint(block) if config.remat else block)
    last = config.num_layers + 1
    return GPTLayers(
        layers=(with_rules(embed), *[run] * config.num_layers, with_rules(head)),
        loss=byte_loss,
        tied=(((0, "embed/kernel"), (last, "embed/kernel")),) if config.tied else (),
        is_tied=config.tied,
    )


def _with_axis_rules(rules: Rules | None, layer: Layer) -> Layer:
    """Return the layer with activations that follow the rules."""
    if rules is None:
        return layer

    def apply(params: Any, x: jax.Array) -> jax.Array:
        with nnx.logical_axis_rules(rules):
            return layer(params, x)

    return apply


def _pure(make: Callable[[nnx.Rngs], nnx.Module]) -> Layer:
    """Return a module as a function of its parameters, without making parameter values."""
    with nnx.use_eager_sharding(False):
        graph, template = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))

    def apply(params: Mapping[str, Any], x: jax.Array) -> jax.Array:
        state = jax.tree.map(lambda leaf: leaf, template)
        nnx.replace_by_pure_dict(state, dict(params))
        merged: Any = nnx.merge(graph, state)
        return merged(x)

    return apply
