"""Count what this host's interface sends for synchronisations, and for local steps."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js

R = "replica"
ELEMENTS = 2**20  # float32 parameters: 4 MiB
UPDATES = 12  # counted; a multiple of every period below
EVERY = 3
COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")

# What makes a step, and its synchronisations in UPDATES updates.
CASES = {
    "all_reduce": (lambda: {"gradients": js.all_reduce_gradients(R)}, UPDATES),
    "sgp": (lambda: {"sync": js.sgp(R)}, UPDATES),
    "slowmo": (
        lambda: {"sync": js.slowmo(R, base=js.local_sgd(R, sync_every=999), sync_every=EVERY)},
        UPDATES // EVERY,
    ),
    "diloco": (lambda: {"sync": js.diloco(R, sync_every=EVERY)}, UPDATES // EVERY),
    "int8": (lambda: {"gradients": js.all_reduce_gradients(R, hook=js.hooks.int8())}, UPDATES),
    "local steps": (lambda: {"sync": js.local_sgd(R, sync_every=999)}, 1),
    # With 2 MiB of a NumPy batch on every host.
    "batches, local_sgd": (lambda: {"sync": js.local_sgd(R, sync_every=999)}, 1),
    "batches, global": (
        lambda: {"sync": js.local_sgd(R, sync_every=999), "host_batch": "global"},
        1,
    ),
}


def bytes_sent(mesh: jax.sharding.Mesh) -> dict[str, float]:
    """Count what each algorithm sends per exchange, and in all local steps together."""
    count, split = mesh.size, NamedSharding(mesh, P(R))
    own = np.random.default_rng(jax.process_index()).normal(size=2**19).astype(np.float32)
    whole = np.linspace(0, 1, count * 2**19, dtype=np.float32)
    batches = {"batches, local_sgd": own, "batches, global": whole}
    ones = jax.make_array_from_callback((count,), split, lambda i: np.ones(count, np.float32)[i])
    total = jax.jit(
        jax.shard_map(lambda x: lax.psum(x, R), mesh=mesh, in_specs=P(R), out_specs=P())
    )

    def meet() -> None:
        """All have done what they were to do."""
        assert float(total(ones).addressable_data(0)[0]) == count

    params = {"w": np.linspace(0, 1, ELEMENTS, dtype=np.float32)}
    meet()
    found = {}
    for name, (options, times) in CASES.items():
        step = js.make_train_step(
            lambda p, batch: jnp.mean(p["w"] ** 2) * jnp.mean(batch),
            optax.sgd(0.1),
            mesh=mesh,
            **({"mode": "host"} | options()),
        )
        state = step.init(params)
        batch = batches.get(name, ones)
        for _ in range(EVERY):  # compiles every program
            state, _ = step(state, batch)
        jax.block_until_ready(state)
        meet()
        before = int(COUNTER.read_text())
        for _ in range(UPDATES):
            state, _ = step(state, batch)
        jax.block_until_ready(state)
        meet()
        found[name] = (int(COUNTER.read_text()) - before) / times
        meet()  # nobody goes on while another has not read its counter
    return found
