"""Optimizers that remember parameters: what an exchange moves, their copies move too.

The loss is linear, so gradients do not depend on where the parameters are. Then a replica that
exchanges differs from one that trains apart by what the exchanges have added, and by nothing else,
at any time: its parameters and all its copies of them by the same.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from support.promotion import promoting

contrib = optax.contrib
RNG = np.random.default_rng(0)
PARAMS = {name: RNG.normal(size=(2, 3)).astype(np.float32) for name in "abcd"}
BATCHES = RNG.normal(size=(7, 12, 4, 2, 3)).astype(np.float32)
WEIGHTS = np.ones((7, 3), np.float32)
WEIGHTS[2:4, 1] = 0  # one replica has run out, in an update that averages and in one that does not
# SAM is in mid-air in some updates that exchange.
SAM = contrib.sam(optax.sgd(0.1), optax.chain(contrib.normalize(), optax.sgd(0.1)), sync_period=4)
OPTIMIZER = optax.apply_if_finite(
    optax.partition(
        {
            "a": contrib.cocob(),
            "b": optax.inject_hyperparams(contrib.madgrad)(0.1),
            "c": optax.chain(optax.clip(9.0), contrib.schedule_free_sgd(0.1)),
            "d": promoting(optax.MultiSteps(SAM, 1).gradient_transformation()),
        },
        {name: name for name in PARAMS},
    ),
    3,
)
COPIES = {"init_particles": "a", "x0": "b", "z": "c", "cache": "d"}
LOCAL = js.local_sgd("replica", sync_every=3)
BASE = js.local_sgd("replica", sync_every=2)
VIRTUAL, DEVICES = js.virtual_mesh({"replica": 3}), {"replica": 3}
# Transform, mesh, options of the step.
RUNS = {
    "slowmo": (
        js.slowmo("replica", base=BASE, sync_every=4, learning_rate=0.1),
        VIRTUAL, {"mode": "host"},
    ),
    "diloco": (js.diloco("replica", sync_every=3), DEVICES, {"accumulate": 2}),
    "sharded": (LOCAL, DEVICES | {"fsdp": 2}, {}),
}  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore:`optimizer` holds optax:UserWarning")


def linear(params, batch):
    return sum(jnp.sum(params[name] * jnp.mean(batch, 0)[i]) for i, name in enumerate(PARAMS))


def trained(sync, mesh, **options):
    params, mesh = PARAMS, js.make_mesh(mesh) if isinstance(mesh, dict) else mesh
    if "fsdp" in mesh.shape:
        params = jax.device_put(PARAMS, NamedSharding(mesh, P("fsdp")))
    step = js.make_train_step(linear, OPTIMIZER, sync=sync, mesh=mesh, **options)
    state = step.init(params)
    for batch, weight in zip(BATCHES, WEIGHTS, strict=True):
        state, _ = step(state, batch, weight)
    return state


def copies(state):
    """Return copies of parameters in the state, by name of the parameter."""
    found = {}
    for field, name in COPIES.items():
        ((_, tree),) = optax.tree.get_all_with_path(state.opt_state, field)
        found[name] = tree[name]
    return found


@pytest.fixture(scope="module")
def apart():
    return trained("none", VIRTUAL)


@pytest.mark.parametrize("name", RUNS)
def test_copies_move_with_the_parameters(apart, name):
    sync, mesh, options = RUNS[name]
    state = trained(sync, mesh, **options)
    before, after = copies(apart), copies(state)
    for leaf in PARAMS:
        moved = np.asarray(state.params[leaf]) - np.asarray(apart.params[leaf])
        assert np.abs(moved).max() > 1e-3
        followed = np.asarray(after[leaf]) - np.asarray(before[leaf])
        np.testing.assert_allclose(followed, moved, atol=2e-6, err_msg=leaf)
        if name == "sharded":
            assert after[leaf].sharding.spec[:2] == ("replica", "fsdp")
