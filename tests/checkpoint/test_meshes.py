"""A run that was saved on one mesh goes on on another as if it had not been moved."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from checkpoint.moves import LAST, SAVED, Run, once_saved
from checkpoint.runs import on_host
from jaxslowmo.checkpoint import Checkpoints

pytestmark = pytest.mark.xdist_group("saved meshes")  # they share runs

RANDOM = np.random.default_rng(0)
PARAMS = {
    "bias": RANDOM.normal(size=8).astype(np.float32),
    "in": RANDOM.normal(size=(8, 16)).astype(np.float32),
    "out": RANDOM.normal(size=(16, 8)).astype(np.float32),
}
FSDP = {"bias": P(), "in": P("fsdp"), "out": P(None, "fsdp")}
TURNED = {"bias": P(), "in": P(None, "fsdp"), "out": P("fsdp")}
BOTH = {"bias": P("tensor"), "in": P("fsdp", "tensor"), "out": P(("tensor", "fsdp"))}
PLACES = {
    "fsdp": ({"replica": 2, "fsdp": 4}, FSDP),
    "turned": ({"replica": 2, "fsdp": 4}, TURNED),
    "both": ({"replica": 2, "fsdp": 2, "tensor": 2}, BOTH),
    "virtual": ({"replica": 2}, {}),
}


def slowmo():
    base = js.local_sgd("replica", sync_every=2)
    return js.slowmo("replica", base=base, sync_every=4, momentum=0.6)


SYNCS = {
    "slowmo": slowmo,
    "diloco": lambda: js.diloco(
        "replica", sync_every=4, outer_optimizer=optax.adam(0.1), shard_state=True
    ),
}


def loss(params, batch):
    hidden = jax.numpy.tanh(batch @ params["in"] + params["bias"].sum())
    return ((hidden @ params["out"] + params["bias"][None] - batch) ** 2).mean()


class Placed(Run):
    """A step on one of `PLACES`."""

    def __init__(self, place, sync, mesh_of):
        axes, specs = PLACES[place]
        mesh = mesh_of(axes) if specs else js.virtual_mesh(axes)
        lie = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
        self.params = jax.device_put(PARAMS, lie) if specs else PARAMS
        self.step = js.make_train_step(loss, optax.adam(1e-2), sync=SYNCS[sync](), mesh=mesh)

    def batch(self, t):
        return np.random.default_rng(t).normal(size=(8, 8)).astype(np.float32)

    def values(self, state):
        """What has one value however it lies: parameters, moments, anchor and its moments."""
        shared = state.exchange.shared
        return on_host((state.params, state.opt_state, shared["anchor"], shared["outer"]))


@pytest.fixture(scope="module")
def saved(mesh_of, tmp_path_factory):
    return once_saved(lambda place, sync: Placed(place, sync, mesh_of), tmp_path_factory)


@pytest.mark.parametrize(
    ("old", "new", "sync"),
    [
        ("fsdp", "turned", "slowmo"),  # the same mesh and shapes, and another layout
        ("virtual", "both", "diloco"),
    ],
)
def test_a_run_goes_on_on_another_mesh(old, new, sync, saved, mesh_of):
    _, folder, then, end = saved(old, sync)
    run = Placed(new, sync, mesh_of)
    found = Checkpoints(folder).restore(run.step, run.params)
    now = run.values(found.state)
    assert found.is_exact
    assert found.notes == ()
    jax.tree.map(np.testing.assert_array_equal, now, then)
    assert all(np.ptp(x) > 0 for x in jax.tree.leaves(then[3]) if x.ndim == 2)  # momentum
    last = run.trained(found.state, SAVED, LAST)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
        *(on_host(state.params) for state in (last, end)),
    )
