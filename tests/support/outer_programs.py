"""Steps with outer steps in fragments and with a delay, for devices that are only described."""

from math import prod

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import jaxslowmo as js
from support.described import lowered_step

LAYERS, WIDTH = 4, 512
# Forward, and backward to the weights and (but for the first layer) to the input.
PRODUCTS = 3 * LAYERS - 1
DELAY = 3
PARAMS = {f"w{i}": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32) for i in range(LAYERS)}
BYTES = sum(4 * prod(x.shape) for x in PARAMS.values())


def loss(params, batch):
    x = batch
    for name in sorted(params):
        x = jnp.tanh(x @ params[name])
    return jnp.mean(jnp.square(x))


def lowered(mesh: Mesh) -> dict[str, jax.stages.Lowered]:
    """Return the programs of `js.diloco` in two fragments, each sent beside three updates."""
    sync = js.diloco("replica", sync_every=12, fragments=2, delay=DELAY, shard_state=False)
    return lowered_step(loss, sync, PARAMS, _batch(mesh), mesh)


def lowered_traced(mesh: Mesh) -> jax.stages.Lowered:
    """Return the one program of `js.diloco` with `mode="traced"`, of which any update may send."""
    sync = js.diloco("replica", sync_every=1 + DELAY, delay=DELAY, shard_state=False)
    return lowered_step(loss, sync, PARAMS, _batch(mesh), mesh, mode="traced")["all"]


def _batch(mesh: Mesh) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((512 * mesh.size, WIDTH), jnp.float32)
