"""Leaves that are sharded inside a replica, without `param_specs`: still exchanged as blocks."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js

SPECS = {"b": P(), "w": P("fsdp")}
PARAMS = {
    "b": np.arange(3, dtype=np.float32),
    "w": np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32),
}
BATCH = np.random.default_rng(1).normal(size=(8, 8)).astype(np.float32)


def local(**options):
    return js.local_sgd("replica", sync_every=1, **options)


TRANSFORMS = {
    "local_sgd": local,
    "sgp": lambda **options: js.sgp("replica", graph=js.topology.ring(4), **options),
    "slowmo": lambda **options: js.slowmo(
        "replica", base=local(**options), sync_every=2, **options
    ),
    "diloco": lambda **options: js.diloco("replica", sync_every=2, **options),
    "only_finite": lambda **options: js.only_finite(local(**options)),
    "hierarchical": lambda **options: js.hierarchical_local_sgd({"replica": 1}, **options),
}


def mesh_of_kinds(replica, fsdp):
    kinds = tuple(AxisType.Explicit if k == "explicit" else AxisType.Auto for k in (replica, fsdp))
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("replica", "fsdp"), axis_types=kinds)


def placed(mesh):
    return {k: jax.device_put(x, NamedSharding(mesh, SPECS[k])) for k, x in PARAMS.items()}


def loss(params, batch):
    return ((batch @ params["w"]) ** 2).mean() + params["b"].sum()


def step_of(sync, mesh):
    return js.make_train_step(loss, optax.sgd(0.1), sync=sync, mesh=mesh, donate=False)


def sent(step, state):
    """Compiled collectives with their bytes; the loss has some of its own."""
    report = js.comm_report(step, state, BATCH)
    return {(r.kind, r.axis, r.collective): r.bytes for r in report.select(level="compiled")}


@pytest.mark.parametrize(
    "kinds", [("auto", "auto"), ("auto", "explicit"), ("explicit", "explicit")]
)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_layouts_are_read_off_the_arrays(name, kinds):
    """The same traffic, state and values as with specs that are given."""
    mesh = mesh_of_kinds(*kinds)
    found = {}
    for key, options in {"given": {"param_specs": SPECS}, "derived": {}}.items():
        step = step_of(TRANSFORMS[name](**options), mesh)
        state = step.init(placed(mesh))
        report = sent(step, state)
        for _ in range(2):
            state, _ = step(state, BATCH)
        found[key] = report, jax.tree.map(np.asarray, state._replace(rng=0)), state
    assert found["derived"][0] == found["given"][0]
    for a, b in zip(*(jax.tree.leaves(found[key][1]) for key in found), strict=True):
        np.testing.assert_array_equal(a, b)
    assert found["derived"][2].params["w"].sharding.spec[:2] == ("replica", "fsdp")


def test_specs_that_were_given_win():
    sync = js.diloco("replica", param_specs={"b": P(), "w": P()})
    assert sync.with_specs(SPECS) is not sync  # rebuilt, but with its own specs
    mesh = mesh_of_kinds("auto", "auto")
    stacked = js.replicate(placed(mesh), mesh=mesh)
    whole, blocks = (
        js.init(tx, stacked, mesh=mesh)
        for tx in (sync.with_specs(SPECS), js.diloco("replica", param_specs=SPECS))
    )
    assert len(whole.anchor) == 1
    assert len(blocks.anchor) == 2


def test_a_state_that_was_made_without_the_step():
    """By the transform as it was given, and by one that knows the layout; both go on."""
    mesh = mesh_of_kinds("auto", "auto")
    seen = []
    for known in (False, True):
        sync = TRANSFORMS["slowmo"]()
        step = step_of(sync, mesh)
        tx = optax.chain(
            optax.identity(), optax.sgd(0.1), sync.with_specs(SPECS) if known else sync
        )
        state = js.TrainState.create(placed(mesh), tx, mesh=mesh)
        for _ in range(4):
            state, _ = step(state, BATCH)
        anchor = js.read_anchor(sync, state.opt_state[-1], state.params, mesh=mesh)
        np.testing.assert_allclose(anchor["w"], state.params["w"], atol=1e-6)
        seen.append(np.asarray(state.params["w"]))
    np.testing.assert_allclose(*seen, rtol=1e-6)


def test_init_of_a_transform_alone_takes_the_layout():
    mesh = mesh_of_kinds("auto", "auto")
    stacked = js.replicate(placed(mesh), mesh=mesh)
    sync = js.diloco("replica")
    state = js.init(sync, stacked, mesh=mesh)
    given = js.init(js.diloco("replica", param_specs=SPECS), stacked, mesh=mesh)
    assert jax.tree.map(np.shape, state) == jax.tree.map(np.shape, given)
    for tx in (sync, sync.with_specs(SPECS)):
        anchor = js.read_anchor(tx, state, stacked, mesh=mesh)
        np.testing.assert_array_equal(anchor["w"], stacked["w"])
    with pytest.raises(ValueError, match=r"`state` must be made by `sync` for these parameters"):
        js.read_anchor(js.diloco("replica", shard_state=False), state, stacked, mesh=mesh)
