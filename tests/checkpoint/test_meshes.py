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
from support.exhaustive import sweep

pytestmark = pytest.mark.xdist_group("saved meshes")  # they share runs

RANDOM = np.random.default_rng(0)
PARAMS = {
    "bias": RANDOM.normal(size=8).astype(np.float32),
    "in": RANDOM.normal(size=(8, 16)).astype(np.float32),
    "out": RANDOM.normal(size=(16, 8)).astype(np.float32),
}
WHOLE = {name: P() for name in PARAMS}
FSDP = {"bias": P(), "in": P("fsdp"), "out": P(None, "fsdp")}
TURNED = {"bias": P(), "in": P(None, "fsdp"), "out": P("fsdp")}
BOTH = {"bias": P("tensor"), "in": P("fsdp", "tensor"), "out": P(("tensor", "fsdp"))}
PLACES = {
    "fsdp": ({"replica": 2, "fsdp": 4}, FSDP),
    "turned": ({"replica": 2, "fsdp": 4}, TURNED),
    "smaller": ({"replica": 2, "fsdp": 2}, FSDP),
    "both": ({"replica": 2, "fsdp": 2, "tensor": 2}, BOTH),
    "one device": ({"replica": 2}, WHOLE),
    "virtual": ({"replica": 2}, WHOLE),
    "four replicas": ({"replica": 4, "fsdp": 2}, TURNED),
}


def slowmo():
    base = js.local_sgd("replica", sync_every=2)
    return js.slowmo("replica", base=base, sync_every=4, momentum=0.6)


SYNCS = {
    "slowmo": slowmo,
    "only_finite": lambda: js.only_finite(slowmo()),
    "diloco": lambda: js.diloco(
        "replica", sync_every=4, outer_optimizer=optax.adam(0.1), shard_state=True
    ),
    "sgp": lambda: js.slowmo("replica", base=js.sgp("replica", overlap=2), sync_every=4),
}


def loss(params, batch):
    hidden = jax.numpy.tanh(batch @ params["in"] + params["bias"].sum())
    return ((hidden @ params["out"] + params["bias"][None] - batch) ** 2).mean()


class Placed(Run):
    """A step on one of `PLACES`."""

    def __init__(self, place, sync, mesh_of):
        axes, specs = PLACES[place]
        self.mesh = js.virtual_mesh(axes) if place == "virtual" else mesh_of(axes)
        self.params = PARAMS
        if place != "virtual":
            lie = {name: NamedSharding(self.mesh, specs[name]) for name in PARAMS}
            self.params = jax.device_put(PARAMS, lie)
        self.step = js.make_train_step(
            loss, optax.adam(1e-2), sync=SYNCS[sync](), mesh=self.mesh, mode="traced"
        )

    def values(self, state):
        """What has one value however it lies: parameters, moments, anchor and its moments."""
        shared = state.exchange.shared
        return on_host((state.params, state.opt_state, shared["anchor"], shared["outer"]))


@pytest.fixture(scope="module")
def saved(mesh_of, tmp_path_factory):
    return once_saved(lambda place, sync: Placed(place, sync, mesh_of), tmp_path_factory)


MOVES = [
    (old, new, sync)
    for old in PLACES
    for new in PLACES
    for sync in SYNCS
    if old != new and old != "four replicas"
]
USUAL = [
    ("fsdp", "turned", "slowmo"),  # the same mesh and shapes, and another layout
    ("one device", "fsdp", "diloco"),
    ("fsdp", "four replicas", "slowmo"),
]


@pytest.mark.parametrize(
    ("old", "new", "sync"), sweep(MOVES, lambda old, new, sync: (old, new, sync) in USUAL)
)
def test_a_run_goes_on_on_another_mesh(old, new, sync, saved, mesh_of):
    _, folder, then, end = saved(old, sync)
    run = Placed(new, sync, mesh_of)
    found = Checkpoints(folder).restore(run.step, run.params)
    now = run.values(found.state)
    if new == "four replicas":
        assert not found.is_exact
        jax.tree.map(np.testing.assert_array_equal, now[2:], then[2:])
        assert np.isfinite(on_host(run.trained(found.state, SAVED, LAST).params)["in"]).all()
        return
    assert found.is_exact
    assert found.notes == ()
    jax.tree.map(np.testing.assert_array_equal, now, then)
    assert all(np.ptp(x) > 0 for x in jax.tree.leaves(then[3]) if x.ndim == 2)  # momentum
    last = run.trained(found.state, SAVED, LAST)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
        *(on_host(state.params) for state in (last, end)),
    )


def test_a_state_that_no_step_has_returned_goes_anywhere(mesh_of, tmp_path):
    """Nothing but its arrays tells how it lies."""
    run = Placed("fsdp", "slowmo", mesh_of)
    state = run.step.init(run.params)
    state = state._replace(step=state.step)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, state, wait=True)
        assert checkpoints.restore(run.step, run.params).is_exact
        for place in ("turned", "both", "one device"):
            other = Placed(place, "slowmo", mesh_of)
            found = checkpoints.restore(other.step, other.params)
            jax.tree.map(
                np.testing.assert_array_equal, other.values(found.state), run.values(state)
            )


def test_virtual_replicas_become_replicas_that_are_sharded_inside(mesh_of, tmp_path):
    params = {"in": PARAMS["in"]}

    def make(mesh):
        def loss(params, batch):
            return ((batch @ params["in"]) ** 2).mean()

        return js.make_train_step(loss, optax.sgd(1e-2), sync=slowmo(), mesh=mesh)

    mesh = mesh_of({"replica": 2, "fsdp": 4})
    step, split = make(js.virtual_mesh({"replica": 2})), make(mesh)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, step.init(params), wait=True)
        placed = jax.device_put(params, NamedSharding(mesh, FSDP["in"]))
        found = checkpoints.restore(split, placed).state
    anchor = found.exchange.shared["anchor"]["in"]
    np.testing.assert_array_equal(anchor, params["in"])
    assert anchor.addressable_shards[0].data.size == params["in"].size // 8


@pytest.mark.parametrize("keeps_shards", [False, True])
def test_leaves_lie_as_their_types_or_arrays_tell(keeps_shards, tmp_path):
    """Without shards nothing needs to be known; Explicit axes tell how a transform cuts its own."""
    kind = jax.sharding.AxisType.Explicit if keeps_shards else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((2, 4), ("replica", "fsdp"), axis_types=(kind,) * 2)
    sync = slowmo() if keeps_shards else js.local_sgd("replica", sync_every=2)

    def make(specs):
        step = js.make_train_step(loss, optax.adam(1e-2), sync=sync, mesh=mesh)
        return step, {
            k: jax.device_put(x, NamedSharding(mesh, specs[k])) for k, x in PARAMS.items()
        }

    (step, params), (turned, other) = make(FSDP), make(TURNED)
    state = step.init(params)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, state if keeps_shards else state._replace(step=state.step), wait=True)
        found = checkpoints.restore(turned, other).state
    assert found.params["in"].sharding.spec == P("replica", None, "fsdp")
    for x, y in zip(*(jax.tree.leaves(on_host(s.params)) for s in (state, found)), strict=True):
        np.testing.assert_array_equal(x, y)
    for its in (state, found) if keeps_shards else ():
        for name, x in PARAMS.items():
            np.testing.assert_array_equal(its.exchange.shared["anchor"][name], x)
