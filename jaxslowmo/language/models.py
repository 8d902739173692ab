"""A byte-level GPT in flax nnx: pure functions of it, its layers for a pipeline, and its sharding.

Dimensions have logical names, as in flax (`out_sharding` of its variables). Rules, which are pairs
of a name and mesh axes, turn these names into a `PartitionSpec`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from .._support.checks import ArgumentError, check_choice
from .._support.extras import needed_by

with needed_by("jaxslowmo.models"):
    from flax import nnx
    from flax.core.spmd import get_logical_axis_rules
    from flax.linen.spmd import logical_to_mesh_axes, with_logical_constraint
    from flax.nnx.nn.dtypes import promote_dtype

Names = Sequence[str | None]
AxisSizes = Mapping[str, int]
MeshAxes = str | tuple[str, ...] | None
Rules = Sequence[tuple[str, MeshAxes]]
"""Rules as in flax: the first rule of a name whose axes are free in an array applies."""

GPT_RULES: Rules = (
    ("batch", "fsdp"),  # rows of activations
    ("embed", "fsdp"),  # the width of the residual stream, in matrices and in the positions
    ("qkv", "tensor"),  # columns of the product before attention,
    ("heads", "tensor"),  # its heads, and the rows of the product after attention
    ("mlp", "tensor"),  # the width inside an MLP
    ("vocab", "tensor"),
    ("position", None),
    ("norm", None),  # vectors as wide as the residual stream
)
"""Sharding rules: a block over "tensor" as in Megatron, the rest of each matrix over "fsdp"."""

Layer = Callable[[Any, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """The shape of a `GPT`.

    Attributes:
      num_layers: number of transformer blocks, >= 1.
      num_heads: number of attention heads; divides `embed_dim`.
      embed_dim: width of the residual stream.
      context_length: number of bytes that the model sees; a training window has one more.
      vocab_size: number of symbols; the default 256 is one symbol per byte value.
      dtype: dtype of activations and matrix products: "float32", "bfloat16" or "float16", which
        needs `js.dynamic_loss_scale` to train. Parameters, softmax, layer-norm statistics and the
        loss are always float32. A `js.gradients.Policy` of the step does not change it.
      qkv_by_head: whether the columns of `qkv` are ordered by head, each with its query, key and
        value, so that devices which split them hold whole heads, as in Megatron. Otherwise all
        queries come first, then all keys, then all values.
      tied: whether the embedding's table is the output layer too, as in GPT-2, without a `head`.
      remat: whether to keep only the input of each block for the backward pass, which computes the
        rest again. It needs memory for one block's activations only, and a third more products.
      attention: "xla" computes whole matrices of scores, on any device; "cudnn" is the fused kernel
        of NVIDIA's library, for GPUs, in "bfloat16" or "float16".

    Raises:
      ValueError: a size below 1, heads that do not divide the width, an unknown dtype or attention,
        cuDNN's attention in float32.
    """

    num_layers: int
    num_heads: int
    embed_dim: int
    context_length: int
    vocab_size: int = 256
    dtype: str = "float32"
    qkv_by_head: bool = False
    tied: bool = False
    remat: bool = False
    attention: str = "xla"

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_heads", "embed_dim", "context_length", "vocab_size"):
            value = getattr(self, name)
            if value < 1:
                raise ArgumentError(name, f"`{name}` must be >= 1, got {value}.")
        if self.embed_dim % self.num_heads:
            raise ArgumentError(
                "num_heads",
                f"`num_heads` must divide `embed_dim`, got {self.num_heads} and {self.embed_dim}.",
            )
        check_choice("dtype", self.dtype, Literal["float32", "bfloat16", "float16"])
        check_choice("attention", self.attention, Literal["xla", "cudnn"])
        if self.attention == "cudnn" and self.dtype == "float32":
            raise ArgumentError(
                "attention", "`attention` 'cudnn' needs a `dtype` of 16 bits, got 'float32'."
            )


GPT_PRESETS: dict[str, GPTConfig] = {
    # 0.01M: trains in seconds, to try out a cluster; it learns almost nothing.
    "tiny": GPTConfig(num_layers=1, num_heads=2, embed_dim=16, context_length=16),
    # 0.45M: trains in minutes on a laptop's CPU, even with four replicas.
    "demo": GPTConfig(num_layers=2, num_heads=4, embed_dim=128, context_length=64),
    "1m": GPTConfig(num_layers=5, num_heads=4, embed_dim=128, context_length=128),
    "10m": GPTConfig(num_layers=6, num_heads=6, embed_dim=384, context_length=256),
    "40m": GPTConfig(num_layers=8, num_heads=10, embed_dim=640, context_length=512),
    # Width, heads and context of GPT-2 small. A third of its 124M parameters embed 50,257 word
    # pieces, which bytes do not need. With 17 blocks instead of 12 the count is similar (121.5M).
    "124m": GPTConfig(num_layers=17, num_heads=12, embed_dim=768, context_length=1024),
    # Layers, heads and width of the usual 7B models (6.45B): for many devices per replica, or for
    # shapes without arrays.
    "7b": GPTConfig(num_layers=32, num_heads=32, embed_dim=4096, context_length=2048, remat=True),
}
"""Shapes by name: `tiny`, `demo`, `1m`, `10m`, `40m`, `124m`, `7b`; sizes by `num_parameters`."""


def gpt_preset(name: str, *, dtype: str = "float32", attention: str = "xla") -> GPTConfig:
    """Return the preset `name` with computations in `dtype`.

    Args:
      name: one of `GPT_PRESETS`.
      dtype: dtype of computations, as in `GPTConfig`; parameters are float32.
      attention: "xla" or "cudnn", as in `GPTConfig`.

    Returns:
      The shape of the model.

    Raises:
      ValueError: an unknown name, dtype or attention, cuDNN's attention in float32.
    """
    if name not in GPT_PRESETS:
        raise ArgumentError(
            "preset", f"`preset` must be one of {', '.join(GPT_PRESETS)}, got {name!r}."
        )
    return dataclasses.replace(GPT_PRESETS[name], dtype=dtype, attention=attention)


class GPTBlock(nnx.Module):
    """A pre-norm transformer block: causal attention, then a GELU MLP four times as wide."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        width, dtype = config.embed_dim, jnp.dtype(config.dtype)
        self.num_heads, self.qkv_by_head = config.num_heads, config.qkv_by_head
        self.attention: Any = config.attention
        self.norm_attention = _norm(width, dtype, rngs)
        self.qkv = _linear(width, 3 * width, ("embed", "qkv"), dtype, rngs)
        self.project = _linear(width, width, ("heads", "embed"), dtype, rngs)
        self.norm_mlp = _norm(width, dtype, rngs)
        self.expand = _linear(width, 4 * width, ("embed", "mlp"), dtype, rngs)
        self.contract = _linear(4 * width, width, ("mlp", "embed"), dtype, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the block's output for `x`, (batch, time, width), in the same shape."""
        batch, time, width = x.shape
        qkv = self.qkv(self.norm_attention(x))
        head = self.num_heads, width // self.num_heads
        if self.qkv_by_head:
            qkv = jnp.moveaxis(qkv.reshape(batch, time, head[0], 3, head[1]), 3, 2)
        else:
            qkv = qkv.reshape(batch, time, 3, *head)
        qkv = constrain(qkv, "batch", None, None, "heads", None)
        if qkv.dtype == jnp.float16 and self.attention == "xla":
            # XLA has no product of float16 that sums in float32 on CPUs.
            qkv = qkv.astype(jnp.float32)
        queries, keys, values = (qkv[:, :, i] for i in range(3))
        mixed = jax.nn.dot_product_attention(
            queries, keys, values, is_causal=True, implementation=self.attention
        )
        mixed = constrain(mixed, "batch", None, "heads", None)
        mixed = self.project(mixed.reshape(batch, time, width).astype(x.dtype))
        x = x + constrain(mixed, "batch", None, None)
        hidden = constrain(self.expand(self.norm_mlp(x)), "batch", None, "mlp")
        # Use the tanh form, since erf has no fast vector version on the CPU backend.
        hidden = self.contract(jax.nn.gelu(hidden, approximate=True))
        return x + constrain(hidden, "batch", None, None)


class GPT(nnx.Module):
    """A decoder-only transformer over bytes, with learned positions and an optional tied output.

    Blocks are unrolled and not scanned. At these depths they compile in seconds, and on CPU a loop
    over layers would copy every stacked parameter and activation once per layer. The constructor
    uses flax's initial parameters, and `init_gpt` those of GPT-2. The `out_sharding` of its
    variables names their dimensions, and activations follow `nnx.logical_axis_rules`.
    """

    # Variables are made unsharded: the names of their dimensions have no mesh axes yet.
    @nnx.use_eager_sharding(False)
    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        width, vocab, dtype = config.embed_dim, config.vocab_size, jnp.dtype(config.dtype)
        self.vocab_size, self.remat = vocab, config.remat
        self.embed = _linear(vocab, width, ("vocab", "embed"), dtype, rngs, use_bias=False)
        positions = nnx.initializers.normal(0.02)(rngs.params(), (config.context_length, width))
        self.positions = nnx.Param(positions, out_sharding=("position", "embed"))
        self.blocks = nnx.List([GPTBlock(config, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = _norm(width, dtype, rngs)
        self.is_tied = config.tied
        if not config.tied:
            self.head = _linear(width, vocab, ("embed", "vocab"), dtype, rngs, use_bias=False)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return float32 logits (batch, time, vocab_size) for bytes (batch, time) of any int dtype.

        `time` is at most `context_length`.
        """
        # A one-hot product replaces the lookup: with 256 symbols it costs less than a product of a
        # block, and its gradient is a product too, not a scatter-add (slow on CPU and TPU).
        x = jax.nn.one_hot(tokens, self.vocab_size, dtype=self.embed.dtype)
        x = self.embed(constrain(x, "batch", None, "vocab"))
        x = x + self.positions[None, : tokens.shape[1]].astype(x.dtype)
        x = constrain(x, "batch", None, None)

        # A new function per call: jax caches traces by function, and the cache ignores the rules.
        def run(block: GPTBlock, x: jax.Array) -> jax.Array:
            return block(x)

        each = nnx.remat(run) if self.remat else run
        for block in self.blocks:
            x = each(block, x)
        x = self.norm(x)
        if self.is_tied:
            x = x @ gather_kernel(self.embed.kernel[...].astype(x.dtype), "vocab", "embed").T
        else:
            x = self.head(x)
        return constrain(x.astype(jnp.float32), "batch", None, "vocab")


def _linear(
    in_dim: int,
    out_dim: int,
    names: tuple[str, str],
    dtype: Any,
    rngs: nnx.Rngs,
    *,
    use_bias: bool = True,
) -> nnx.Linear:
    """Return a linear layer with names for its dimensions."""
    # Vectors as wide as the residual stream are too small to be split.
    bias = "norm" if names[1] == "embed" else names[1]
    return nnx.Linear(
        in_dim,
        out_dim,
        use_bias=use_bias,
        dtype=dtype,
        promote_dtype=PromoteAndGather(names),
        kernel_metadata={"out_sharding": names},
        bias_metadata={"out_sharding": (bias,)},
        rngs=rngs,
    )


def _norm(width: int, dtype: Any, rngs: nnx.Rngs) -> nnx.LayerNorm:
    named = {"out_sharding": ("norm",)}
    return nnx.LayerNorm(width, dtype=dtype, scale_metadata=named, bias_metadata=named, rngs=rngs)


# Pure functions of the model.


def init_gpt(config: GPTConfig, seed: int = 0) -> dict[str, Any]:
    """Return initial float32 parameters as in GPT-2, as a nested dict of arrays.

    Weights are normal with deviation 0.02. The last layer of each branch has that over
    sqrt(2 * num_layers), since that many branches add to the residual stream. Biases are 0 and
    norms 1. NumPy draws the numbers, so a seed gives the same ones on every backend and with every
    version of jax, and nothing is compiled.

    Args:
      config: shape of the model.
      seed: seed of the random numbers, >= 0.

    Returns:
      The parameters, on the host.

    Raises:
      ValueError: `seed` is negative.
    """
    if seed < 0:
        raise ArgumentError("seed", f"`seed` must be >= 0, got {seed}.")
    random = np.random.default_rng(seed)
    shrunk = 0.02 / (2 * config.num_layers) ** 0.5

    def make(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        names = [str(getattr(key, "key", key)) for key in path]
        if names[-1] in ("bias", "scale"):
            return jnp.full(leaf.shape, float(names[-1] == "scale"), jnp.float32)
        deviation = shrunk if {"project", "contract"} & set(names) else 0.02
        return jnp.asarray(deviation * random.standard_normal(leaf.shape, np.float32))

    return jax.tree_util.tree_map_with_path(make, gpt_types(config))


def gpt_types(config: GPTConfig) -> dict[str, Any]:
    """Return the shapes and dtypes of the parameters from `init_gpt`.

    Args:
      config: shape of the model.

    Returns:
      A tree of `jax.ShapeDtypeStruct`; nothing is allocated.
    """
    return nnx.to_pure_dict(_abstract(lambda rngs: GPT(config, rngs=rngs))[1])


def num_parameters(config: GPTConfig) -> int:
    """Return the number of parameters of the model; a tied table counts once.

    Args:
      config: shape of the model.

    Returns:
      The number of all parameters, with embeddings and positions; nothing is allocated.
    """

    def size_with(count: int) -> int:
        types = gpt_types(dataclasses.replace(config, num_layers=count))
        return sum(leaf.size for leaf in jax.tree.leaves(types))

    # All blocks have the same size, and making the types of many blocks takes a second.
    one = size_with(1)
    return one + (config.num_layers - 1) * (size_with(2) - one)


def gpt_logits_fn(
    config: GPTConfig, rules: Rules | None = None
) -> Callable[[Mapping[str, Any], jax.Array], jax.Array]:
    """Return the model as a pure function `logits_fn(params, tokens) -> logits` for the next bytes.

    Args:
      config: shape of the model.
      rules: layout of activations over automatic axes inside a replica: the rules of
        `gpt_param_specs`, such as `gpt_rules(mesh)`. None: the rules that are active when the
        function is traced (`flax.nnx.logical_axis_rules`), usually none.

    Returns:
      A pure function of parameters from `init_gpt` and of bytes (batch, time) of any integer dtype,
      with time <= `context_length`. It returns float32 logits (batch, time, vocab_size).
    """
    return _with_axis_rules(rules, _pure(lambda rngs: GPT(config, rngs=rngs)))


def gpt_loss_fn(
    config: GPTConfig, rules: Rules | None = None
) -> Callable[[Mapping[str, Any], jax.Array], jax.Array]:
    """Return the loss as a pure function: mean cross-entropy in nats per byte.

    Args:
      config: shape of the model.
      rules: layout of activations, as in `gpt_logits_fn`. Without rules the compiler may split
        activations along their width and sum products, though gathering weights costs less.

    Returns:
      `loss_fn(params, batch) -> loss`. `params` are parameters from `init_gpt`. `batch` holds
      windows of `context_length + 1` bytes, (local_batch, context_length + 1), uint8 or int32: all
      but the last byte are the input, all but the first the target. The loss is a float32 scalar.
      It works under `jit`, `grad`, `vmap` and `shard_map` (`check_vma` on and off).

    Raises:
      ValueError: at trace time, windows without `context_length + 1` bytes.
    """
    logits_fn = gpt_logits_fn(config, rules)

    def loss_fn(params: Mapping[str, Any], batch: jax.Array) -> jax.Array:
        check_windows(config, batch)
        return byte_loss(logits_fn(params, batch[:, :-1]), batch)

    return loss_fn


def check_windows(config: GPTConfig, batch: jax.Array) -> None:
    """Raise `ValueError` unless a batch holds windows of `context_length + 1` bytes."""
    if batch.ndim != 2 or batch.shape[1] != config.context_length + 1:
        raise ValueError(
            "`batch` must have the shape (local_batch, context_length + 1) = "
            f"(local_batch, {config.context_length + 1}), got {batch.shape}."
        )


def byte_loss(logits: jax.Array, batch: jax.Array) -> jax.Array:
    """Return the mean cross-entropy in nats of logits for all but the first byte of windows."""
    target = jax.nn.one_hot(batch[:, 1:], logits.shape[-1], dtype=jnp.float32)
    # A masked sum replaces take_along_axis, whose gradient is a scatter.
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - jnp.sum(logits * target, axis=-1))


def _abstract(make: Callable[[nnx.Rngs], nnx.Module]) -> tuple[Any, Any]:
    """Return the graph of a module, and its variables as shapes."""
    # These rules replace the active ones, since `gpt_param_specs` alone decides the sharding.
    rules = nnx.logical_axis_rules([(name, None) for name, _ in GPT_RULES])
    with nnx.use_eager_sharding(False), rules:
        return nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))


def _pure(make: Callable[[nnx.Rngs], nnx.Module]) -> Layer:
    """Return a module as a function of its parameters, without making parameter values."""
    graph, template = _abstract(make)

    def apply(params: Mapping[str, Any], x: jax.Array) -> jax.Array:
        state = jax.tree.map(lambda leaf: leaf, template)
        nnx.replace_by_pure_dict(state, dict(params))
        return nnx.merge(graph, state)(x)

    return apply


def _with_axis_rules(rules: Rules | None, layer: Layer) -> Layer:
    """Return the layer with activations that follow the rules."""
    if rules is None:
        return layer

    def apply(params: Any, x: jax.Array) -> jax.Array:
        with nnx.logical_axis_rules(rules):
            return layer(params, x)

    return apply


# The model as a list of layers, which can be cut into stages between any two of them.


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


# Sharding inside a replica.


def gpt_rules(mesh: Any) -> Rules:
    """Return `GPT_RULES` for a mesh: dimensions whose axis the mesh lacks are not split.

    Args:
      mesh: mesh with axes "fsdp" and "tensor", or one of them.

    Returns:
      Rules for `gpt_param_specs` and `gpt_loss_fn`.

    Raises:
      ValueError: a mesh with neither axis.
    """
    rules = tuple((name, axis if axis in mesh.shape else None) for name, axis in GPT_RULES)
    if not any(axis for _, axis in rules):
        raise ValueError(
            'gpt_rules: `mesh` must have an axis "fsdp" or "tensor" to split a model over, got '
            f"{dict(mesh.shape)}; name your own in `rules`."
        )
    return rules


def gpt_param_specs(config: GPTConfig, mesh: Any, rules: Rules | None = None) -> dict[str, Any]:
    """Return `param_specs` for the parameters: how they are sharded inside a replica.

    Args:
      config: shape of the model.
      mesh: mesh with the axes that parameters are split over; its replica axis is not used.
      rules: pairs of a logical name and mesh axes, in flax's form; see `GPT_RULES`. None:
        `gpt_rules(mesh)`. Dimensions without a rule are not split.

    Returns:
      A tree like that of `init_gpt`, with a `PartitionSpec` per leaf.

    Raises:
      ValueError: a name that no dimension has, an axis that the mesh does not have, a dimension or
        a number of heads that its axes do not divide.

    Source: Shoeybi et al., "Megatron-LM", 2019, section 3: the default rules over "tensor".
    """
    sizes = dict(mesh.shape)
    rules = checked_rules(gpt_rules(mesh) if rules is None else rules, sizes)
    partition_spec("`num_heads`", ["heads"], [config.num_heads], rules, sizes)

    def spec(path: Any, variable: nnx.Variable) -> P:
        name = "/".join(map(str, path))
        return partition_spec(name, variable.out_sharding, variable.shape, rules, sizes)

    variables = _abstract(lambda rngs: GPT(config, rngs=rngs))[1]
    return nnx.to_pure_dict(nnx.map_state(spec, variables))


def checked_rules(rules: Rules, axis_sizes: AxisSizes) -> Rules:
    """Return `rules` after checking that a GPT has their names and the mesh has their axes.

    Raises:
      ValueError: other names or axes.
    """
    names = {name for name, _ in GPT_RULES}
    for name, axes in rules:
        if name not in names:
            raise ArgumentError(
                "rules", f"`rules` must name one of {', '.join(sorted(names))}, got {name!r}."
            )
        if unknown := [axis for axis in _axes(axes) if axis not in axis_sizes]:
            raise ArgumentError(
                "rules",
                f"`rules` splits {name!r} over {unknown[0]!r}, and the mesh has the axes "
                f"{', '.join(map(repr, axis_sizes))}.",
            )
    return tuple(rules)


def partition_spec(
    what: str, names: Names, shape: Sequence[int], rules: Rules, axis_sizes: AxisSizes
) -> P:
    """Return the spec of an array whose dimensions have these names.

    Raises:
      ValueError: a dimension that its axes do not divide.
    """
    spec = logical_to_mesh_axes(tuple(names), tuple(rules))
    assert spec is not None, "the array has names"
    for name, size, axes in zip(names, shape, spec, strict=True):
        parts = math.prod(axis_sizes[axis] for axis in _axes(axes))
        if size % parts:
            raise ArgumentError(
                "rules",
                f"`rules` splits {name!r} over {axes!r}, {parts} devices, which must divide it: "
                f"{what} has {size}.",
            )
    whole = len(spec) - next((i for i, axes in enumerate(spec[::-1]) if axes), len(spec))
    return P(*spec[:whole])


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Return `x` with the layout of the active rules (`flax.nnx.logical_axis_rules`), if any.

    Axes that are not automatic are ignored: along them `x` is this device's part already.

    Raises:
      ValueError: rules that do not fit the mesh, or `x`.
    """
    rules, mesh = get_logical_axis_rules(), jax.sharding.get_abstract_mesh()
    if not rules or mesh.empty:
        return x
    automatic_rules = [
        (name, tuple(axis for axis in _axes(axes) if axis in mesh.auto_axes) or None)
        for name, axes in checked_rules(rules, mesh.shape)
    ]
    partition_spec(f"an array of the shape {x.shape}", names, x.shape, automatic_rules, mesh.shape)
    return with_logical_constraint(x, names, rules=automatic_rules)


def gather_kernel(kernel: jax.Array, *names: str) -> jax.Array:
    """Return a matrix, whole along the width of the residual stream, for all products that use it.

    Otherwise XLA plans a gather for every product. Compilers for GPUs run all of them, even where
    several gather the same matrix: in a GPT over "fsdp" and "tensor" a quarter of the gathered
    bytes, and nearly half without rematerialisation (jax 0.10.2 and 0.12).

    Communication: none; under active rules the compiler gathers `kernel` along the axes of "embed".
    """
    return constrain(kernel, *(None if name == "embed" else name for name in names))


@dataclasses.dataclass(frozen=True)
class PromoteAndGather:
    """The function `promote_dtype` of a linear layer that gathers its kernel in the compute dtype.

    Attributes:
      names: names of the kernel's dimensions.
    """

    names: tuple[str, str]

    def __call__(self, arrays: Any, /, *, dtype: Any = None, inexact: bool = True) -> Any:
        """Return inputs, kernel and bias in one dtype; the kernel is gathered in it."""
        inputs, kernel, bias = promote_dtype(arrays, dtype=dtype, inexact=inexact)
        return inputs, gather_kernel(kernel, *self.names), bias


def _axes(axes: MeshAxes) -> tuple[str, ...]:
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)
