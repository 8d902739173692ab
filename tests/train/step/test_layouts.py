"""Leaves that are sharded inside a replica, without `param_specs`: still exchanged as blocks."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.tree import leaf_names
from support.exhaustive import sweep

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
        "replica",
        base=local(param_specs=options.get("param_specs")),
        sync_every=2,
        **{"shard_state": False, **options},
    ),
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


AUTO, MIXED, EXPLICIT = ("auto", "auto"), ("auto", "explicit"), ("explicit", "explicit")
USUAL = {(AUTO, "diloco"), (MIXED, "local_sgd"), (EXPLICIT, "slowmo"), (EXPLICIT, "sgp")}


@pytest.mark.parametrize(
    ("kinds", "name"),
    sweep(
        itertools.product([AUTO, MIXED, EXPLICIT], TRANSFORMS),
        lambda *case: case in USUAL,
    ),
)
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


def test_shards_stay_as_they_were_made_and_it_is_said():
    """Their layout is part of states and checkpoints: only specs that were given decide it."""
    mesh = mesh_of_kinds("auto", "auto")
    step = step_of(js.diloco("replica", sync_every=1), mesh)
    state = step.init(placed(mesh))
    with pytest.warns(UserWarning, match=r"slow steps gather them first. Pass `param_specs`"):
        state, _ = step(state, BATCH)
    assert len(state.opt_state[-1].anchor) == 1
    base = js.local_sgd("replica", sync_every=1)
    sync = js.slowmo("replica", base=base, sync_every=2, param_specs=SPECS)
    state = step_of(sync, mesh).init(placed(mesh))
    assert len(state.opt_state[-1].anchor) == 2


def test_specs_that_were_given_win():
    whole = {"b": P(), "w": P()}
    for make in (local, TRANSFORMS["sgp"], TRANSFORMS["hierarchical"]):
        given = make(param_specs=whole)
        assert given.with_specs(SPECS) is given
        assert make().with_specs(SPECS) is not make()


def test_one_step_object_on_states_of_several_layouts():
    """What one state needs does not change what another one is given."""
    mesh = mesh_of_kinds("auto", "auto")
    layouts = [SPECS, {"b": P(), "w": P(None, "fsdp")}, {"b": P(), "w": P()}]

    def start(step, specs):
        return step.init(
            {k: jax.device_put(x, NamedSharding(mesh, specs[k])) for k, x in PARAMS.items()}
        )

    sync = TRANSFORMS["slowmo"]()
    step = step_of(sync, mesh)
    states = [start(step, specs) for specs in layouts]
    for _ in range(4):
        for i in range(3):
            states[i], _ = step(states[i], BATCH)
    one = [np.asarray(state.params["w"]) for state in states]
    for found in one[1:]:
        np.testing.assert_allclose(found, one[0], rtol=1e-5, atol=1e-6)
    # A state of one step object goes on in another one.
    first, second = step_of(sync, mesh), step_of(sync, mesh)
    state, _ = first(start(first, SPECS), BATCH)
    for step in (second, first, second):
        state, _ = step(state, BATCH)
    np.testing.assert_allclose(state.params["w"], one[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_one_transform_on_several_meshes(kind):
    """How many shards there are, and of which size, depends on the mesh and the layout."""
    sync = js.diloco("replica", sync_every=1, **({"param_specs": SPECS} if kind == "auto" else {}))

    def update(params, state):
        params, state = jax.tree.map(lambda x: x[0], (params, state))
        updates, _ = sync.update(jax.tree.map(jnp.zeros_like, params), state, params)
        return jax.tree.map(lambda u: u[None], updates)

    for fsdp, specs in [(2, SPECS), (4, SPECS)] + [(4, {"b": P(), "w": P()})] * (kind != "auto"):
        types = (AxisType.Auto, AxisType.Explicit if kind == "explicit" else AxisType.Auto)
        devices = np.array(jax.devices()[: 2 * fsdp]).reshape(2, fsdp)
        mesh = Mesh(devices, ("replica", "fsdp"), axis_types=types)
        params = {k: jax.device_put(x, NamedSharding(mesh, specs[k])) for k, x in PARAMS.items()}
        stacked = js.replicate(params, mesh=mesh)
        state = js.init(sync, stacked, mesh=mesh)
        mapped = jax.shard_map(
            update, mesh=mesh, in_specs=P("replica"), out_specs=P("replica"), axis_names={"replica"}
        )
        jax.jit(mapped).trace(stacked, state)


@pytest.mark.parametrize("part", ["opt_state", "model_state"])
def test_state_that_is_sharded_where_no_parameter_is_is_refused(mesh_of, part):
    """A program holds such state whole, so ZeRO-1 by sharding would be undone after one step."""
    mesh = mesh_of({"replica": 4, "fsdp": 2})
    step = js.make_train_step(
        lambda params, batch, *, model_state: (loss(params, batch), ({}, model_state)),
        optax.adam(0.1),
        sync=local(),
        mesh=mesh,
        donate=False,
    )
    state = step.init(PARAMS, model_state={"mean": np.zeros(4, np.float32)})
    step(state, BATCH)

    leaf = {"opt_state": "1/0/mu/w", "model_state": "mean"}[part]
    names = iter(leaf_names(getattr(state, part)))
    over_fsdp = NamedSharding(mesh, P("replica", "fsdp"))
    changed = jax.tree.map(
        lambda x: jax.device_put(x, over_fsdp) if next(names) == leaf else x, getattr(state, part)
    )
    message = rf"`{part}` must not be sharded over axes .* got '{leaf}' .* over \['fsdp'\]"
    with pytest.raises(ValueError, match=message):
        step(state._replace(**{part: changed}), BATCH)
