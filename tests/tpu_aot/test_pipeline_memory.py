"""What a chip holds of a pipeline in one program: its own stage, and states of the same size.

Whole training steps with AdamW and `js.slowmo` over `js.local_sgd` are compiled for TPU slices.
Nothing runs, and no array is made. `pytest -rP` prints the bytes, those of temporaries beside them.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.models import GPTConfig, gpt_preset
from support.described import compiled_rows
from support.tpu_staged import MICROBATCHES, Staged

STAGES, REPLICAS = 8, 2
AXES = (("replica", REPLICAS), ("stage", STAGES))
V5E, V5P = "v5e:4x4", "v5p:2x2x4"  # 16 GB per chip, and 95 GB
MAY_EXCEED = 1.05


def gpt(config: GPTConfig, hardware: str) -> Staged:
    return Staged(replace(config, dtype="bfloat16", remat=True), hardware, AXES)


# Llama 3 8B, of float32 parameters that compute in bfloat16.
VOCAB, WIDTH, HIDDEN, BLOCKS = 128256, 4096, 14336, 32
HEADS, KV_HEADS, HEAD_SIZE = 32, 8, 128


def norm(scale: jax.Array, x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)
    return (wide * scale).astype(x.dtype)


def embed(params: Mapping[str, Any], batch: jax.Array) -> jax.Array:
    return params["table"][batch[:, :-1].astype(jnp.int32)].astype(jnp.bfloat16)


@jax.checkpoint
def block(params: Mapping[str, Any], x: jax.Array) -> jax.Array:
    w = {name: leaf.astype(x.dtype) for name, leaf in params.items()}
    h = norm(params["norm_attention"], x)
    q, k, v = (
        (h @ w[name]).reshape(*x.shape[:2], heads, HEAD_SIZE)
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
    )
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + mixed.reshape(x.shape) @ w["o"]
    h = norm(params["norm_mlp"], x)
    return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]


def head(params: Mapping[str, Any], x: jax.Array) -> jax.Array:
    return (norm(params["norm"], x) @ params["head"].astype(x.dtype)).astype(jnp.float32)


def loss(logits: jax.Array, batch: jax.Array) -> jax.Array:
    of_next = jnp.take_along_axis(logits, batch[:, 1:, None].astype(jnp.int32), -1)
    return jnp.mean(jax.nn.logsumexp(logits, -1) - of_next[..., 0])


def types(**shapes: tuple[int, ...]) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


def llama_types() -> list[Any]:
    """One tree per layer."""
    kv = KV_HEADS * HEAD_SIZE
    of_block = types(
        q=(WIDTH, WIDTH),
        k=(WIDTH, kv),
        v=(WIDTH, kv),
        o=(WIDTH, WIDTH),
        gate=(WIDTH, HIDDEN),
        up=(WIDTH, HIDDEN),
        down=(HIDDEN, WIDTH),
        norm_attention=(WIDTH,),
        norm_mlp=(WIDTH,),
    )
    first = types(table=(VOCAB, WIDTH))
    return [first, *[of_block] * BLOCKS, types(norm=(WIDTH,), head=(WIDTH, VOCAB))]


@dataclass(frozen=True)
class Llama(Staged):
    """Llama 3 8B in stages; of its configuration the length of a window alone counts."""

    @functools.cached_property
    def pipe(self) -> Any:
        layers = llama_types()
        return js.pipelined(
            js.LayeredModel([embed, *[block] * BLOCKS, head], loss),
            layers,
            js.schedules.by_name(self.schedule_name, STAGES, MICROBATCHES * STAGES),
            parts=js.partition_by_cost(js.pipeline.count_layer_params(layers), STAGES),
            mesh=self.mesh,
        )

    def batch(self) -> jax.ShapeDtypeStruct:
        shape = super().batch().shape
        lies = NamedSharding(self.mesh, P("replica"))
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=lies)


CONFIG = GPTConfig(num_layers=10, num_heads=2, embed_dim=128, context_length=32)
SMALL = gpt(CONFIG, V5E)
LARGE = {
    "124m": gpt(gpt_preset("124m"), V5E),
    "7b": gpt(gpt_preset("7b"), V5P),
    "Llama 3 8B": Llama(replace(CONFIG, context_length=2048), V5P, AXES),
}


def layers_of(case: Staged) -> list[Any]:
    """Types of the model as it is without stages, one tree per layer."""
    return case.pipe.layout.unstack(case.params)


def largest_stage(case: Staged) -> int:
    """Bytes of the parameters of the fullest stage."""
    each = [
        sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(layer))
        for layer in layers_of(case)
    ]
    return max(sum(each[b.start : b.end]) for b in case.pipe.layout.blocks)


def in_parts(size: int) -> int:
    """A chip's part of what its replica shares with the others."""
    return -(-size // REPLICAS)


def of_batch(case: Staged) -> int:
    batch = case.batch()
    return math.prod(batch.sharding.shard_shape(batch.shape)) * batch.dtype.itemsize


def compiled(case: Staged) -> tuple[jax.stages.Lowered, jax.stages.Compiled]:
    """A local step."""
    step = case.step()
    lowered = step.traced_by_phase(case.state(step), case.batch())["local"].lower()
    return lowered, lowered.compile()


def check_memory(name: str, case: Staged, program: jax.stages.Compiled) -> None:
    found = program.memory_analysis()
    held = found.argument_size_in_bytes - of_batch(case)
    not_in_place = found.output_size_in_bytes - found.alias_size_in_bytes
    temporary = found.temp_size_in_bytes + not_in_place
    parameters = largest_stage(case)
    # AdamW has two moments; slowmo's anchor and velocity are shared between replicas.
    wanted = 3 * parameters + 2 * in_parts(parameters)
    print(
        f"{name}, {case.hardware}: parameters of the largest stage {parameters:,}, arguments "
        f"{held:,} ({held / wanted:.4f} of what is wanted), temporaries {temporary:,} "
        f"({temporary / parameters:.2f} of the parameters)"
    )
    assert wanted <= held <= MAY_EXCEED * wanted


@pytest.fixture(scope="module")
def small():
    return compiled(SMALL)


def test_a_chip_holds_its_stage_and_the_states_of_it(small):
    check_memory("small", SMALL, small[1])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LARGE)
def test_chips_hold_large_models_without_padding(name):
    check_memory(name, LARGE[name], compiled(LARGE[name])[1])


def test_a_local_step_sends_what_travels_between_stages_alone(small):
    counts: dict[tuple[str, str], int] = {}
    for row in compiled_rows("local", *small, SMALL.mesh):
        key = row.axis, row.collective
        counts[key] = counts.get(key, 0) + row.count
    assert set(counts) == {("stage", "collective-permute"), ("stage", "all-reduce")}
    assert counts["stage", "all-reduce"] == 1  # the loss


def test_the_llama_is_the_one_of_8_billion():
    sizes = [math.prod(x.shape) for x in jax.tree.leaves(llama_types())]
    assert sum(sizes) == 8_030_261_248
