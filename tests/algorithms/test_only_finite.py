"""`js.only_finite`: equal to the transform inside, until a replica is no longer finite."""

import jax
import numpy as np
import optax
import pytest

import jaxslowmo as js

INNER = {
    "local_sgd": lambda: js.local_sgd("replica", sync_every=2),
    "slowmo over sgp": lambda: js.slowmo("replica", base=js.sgp("replica"), sync_every=4),
    "diloco": lambda: js.diloco("replica", sync_every=2),
}
# Due in the next two updates after eight.
DUE = {"local_sgd": (0, 1), "slowmo over sgp": (1, 2), "diloco": (0, 1)}


def trained(sync, mesh, mode, steps=8):
    step = js.make_train_step(
        lambda params, batch: (params["w"] * batch).sum(), optax.sgd(0.1), sync=sync, mesh=mesh,
        mode=mode, donate=False,
    )  # fmt: skip
    state = step.init({"w": np.ones(3, np.float32)})
    random = np.random.default_rng(0)
    for _ in range(steps):
        state, _ = step(state, random.normal(size=(4, 3)).astype(np.float32))
    return step, state


@pytest.mark.parametrize("name", INNER)
@pytest.mark.parametrize(
    ("mesh", "mode"),
    [(js.virtual_mesh({"replica": 4}), "traced"), (js.make_mesh({"replica": 4}), "host")],
    ids=["virtual", "devices"],
)
def test_only_finite(name, mesh, mode):
    step, state = trained(js.only_finite(INNER[name]()), mesh, mode)
    _, plain = trained(INNER[name](), mesh, mode)
    # Another program may round differently.
    np.testing.assert_allclose(state.params["w"], plain.params["w"], rtol=1e-6)
    assert not np.any(state.opt_state[-1].refused)

    batch = np.zeros((4, 3), np.float32)
    batch[2] = np.nan  # its gradient, too
    for refused in DUE[name]:
        state, _ = step(state, batch)
        assert np.asarray(state.opt_state[-1].refused).tolist() == [refused] * 4
        assert np.isnan(state.params["w"]).any(1).tolist() == [False, False, True, False]


def test_what_it_sends():
    def report(sync):
        step, state = trained(sync, js.make_mesh({"replica": 4}), "host", steps=0)
        batch = jax.ShapeDtypeStruct((4, 3), np.float32)
        programs = {k: t.lower() for k, t in step.traced_by_phase(state, batch).items()}
        return js.comm_report_of(programs, mesh=step.mesh, compile=False)

    plain, checked = (
        report(sync) for sync in (INNER["diloco"](), js.only_finite(INNER["diloco"]()))
    )
    for kind, more in {"local": 0, "slow": 1}.items():
        assert checked.count(kind=kind) == plain.count(kind=kind) + more
        assert checked.bytes(kind=kind) == plain.bytes(kind=kind) + 4 * more


def test_bad_input():
    with pytest.raises(ValueError, match=r"takes one argument, `inner`.*got 'replica' besides"):
        js.only_finite(js.local_sgd("replica"), "replica")
    with pytest.raises(ValueError, match=r"takes one argument.*got axis_name='replica' besides"):
        js.only_finite(js.local_sgd("replica"), axis_name="replica")
    with pytest.raises(ValueError, match=r"`inner` must be a js.ParameterTransform"):
        js.only_finite(optax.sgd(0.1))


# Which replicas are asked, and about what


def poisoned_batch(replica, size=4):
    batch = np.zeros((size, 3), np.float32)
    batch[replica] = np.nan
    return batch


@pytest.mark.parametrize("kind", ["mesh", "virtual"])
def test_all_axes_of_the_inner_transform_are_asked(kind):
    """A NaN on one device: with a narrower question some would exchange and others not."""
    axes = {"node": 2, "device": 2}
    mesh = js.make_mesh(axes) if kind == "mesh" else js.virtual_mesh(axes)
    everyone = ("node", "device")
    sync = js.only_finite(js.hierarchical_local_sgd({"device": 2, everyone: 4}))
    assert sync.axes == everyone
    step = js.make_train_step(
        lambda p, b: (p["w"] * b).sum(), optax.sgd(0.1), sync=sync, mesh=mesh, axis_name=everyone
    )
    state = step.init({"w": np.ones(3, np.float32)})
    for t in range(1, 5):
        state, _ = step(state, poisoned_batch(1))
        assert np.asarray(state.opt_state[-1].refused).tolist() == [t // 2] * 4
        assert np.isnan(state.params["w"]).any(1).tolist() == [False, True, False, False]


def test_an_unbound_axis_is_named():
    tx = js.only_finite(js.local_sgd("replicas"))
    with pytest.raises(ValueError, match=r"only_finite: `axis_name` 'replicas' is not a mapped"):
        jax.eval_shape(
            jax.vmap(lambda p: tx.update(p, tx.init(p), p)[0], axis_name="replica"), np.ones((4, 3))
        )


@pytest.mark.parametrize("exact", [True, False])
def test_as_a_base_it_guards_the_slow_step_too(exact):
    base = js.only_finite(js.local_sgd("replica", sync_every=2))
    sync = js.slowmo("replica", base=base, sync_every=4, momentum=0.5, exact_average=exact)
    step, state = trained(sync, js.virtual_mesh({"replica": 4}), "traced", steps=0)
    for _ in range(4):  # an average, then a slow step
        state, _ = step(state, poisoned_batch(2))
    assert np.isnan(state.params["w"]).any(1).tolist() == [False, False, True, False]
    assert np.asarray(state.opt_state[-1].base.refused).tolist() == [2] * 4
    anchor = js.read_anchor(
        sync, state.opt_state[-1], state.params, mesh=step.mesh, axis_name="replica"
    )
    assert np.isfinite(anchor["w"][:2]).all()


def test_a_base_over_fewer_axes_asks_all_of_the_slow_step():
    """Devices average among themselves, and the slow step is over nodes too."""
    axes, everyone = {"node": 2, "device": 2}, ("node", "device")
    base = js.only_finite(js.local_sgd("device", sync_every=2))
    sync = js.slowmo(everyone, base=base, sync_every=2, momentum=0.5)
    step = js.make_train_step(
        lambda p, b: (p["w"] * b).sum(), optax.sgd(0.1), sync=sync, mesh=js.make_mesh(axes),
        axis_name=everyone,
    )  # fmt: skip
    state = step.init({"w": np.ones(3, np.float32)})
    for _ in range(3):
        state, _ = step(state, poisoned_batch(3))
    assert np.isnan(state.params["w"]).any(1).tolist() == [False, False, False, True]


@pytest.mark.parametrize("mode", ["traced", "host"])
def test_the_batch_of_an_idle_replica_refuses_nothing(mode):
    step, state = trained(js.only_finite(INNER["local_sgd"]()), js.make_mesh({"replica": 4}), mode)
    for _ in range(2):
        state, _ = step(state, poisoned_batch(2), np.float32([1, 1, 0, 1]))
    assert not np.any(state.opt_state[-1].refused)
    w = np.asarray(state.params["w"])
    assert np.isfinite(w).all()
    np.testing.assert_allclose(w, np.broadcast_to(w[0], w.shape), rtol=1e-6)


STATEFUL = {
    "local_sgd": lambda: js.local_sgd("replica", sync_every=2),
    "slowmo over guarded": lambda: js.slowmo(
        "replica", base=js.only_finite(js.local_sgd("replica", sync_every=1)), sync_every=2
    ),
    "sgp": lambda: js.sgp("replica", graph=js.topology.ring(4)),
    "hierarchical": lambda: js.hierarchical_local_sgd({"replica": 2}),
}


@pytest.mark.parametrize("where", ["parameters", "model state alone"])
@pytest.mark.parametrize("name", STATEFUL)
def test_model_state_is_not_averaged_where_an_exchange_is_refused(name, where):
    """One NaN on one replica stays there, through several exchanges that are refused."""

    def loss(params, batch, *, model_state):
        mean = batch.mean(0)
        value = params["w"] * mean if where == "parameters" else params["w"] ** 2
        return value.sum(), ({}, 0.5 * model_state + mean)

    inner = STATEFUL[name]()
    sync = inner if "guarded" in name else js.only_finite(inner)
    step = js.make_train_step(loss, optax.sgd(0.1), sync=sync, mesh=js.virtual_mesh({"replica": 4}))
    state = step.init({"w": np.ones(3, np.float32)}, model_state=np.zeros(3, np.float32))
    for _ in range(4):
        state, _ = step(state, poisoned_batch(2))
    assert np.isnan(state.model_state).any(1).tolist() == [False, False, True, False]
    assert np.isfinite(np.delete(state.params["w"], 2, axis=0)).all()


def test_rounds_of_gossip_follow_what_was_refused():
    """On the host, too, an exchange that is refused does not rotate the graph."""
    graph = js.topology.directed_exponential(4)
    runs = {}
    for mode in ("traced", "host"):
        sync = js.only_finite(js.sgp("replica", graph=graph))
        step, state = trained(sync, js.virtual_mesh({"replica": 4}), mode, steps=3)
        healthy = state.params
        state, _ = step(state, poisoned_batch(2))  # refused
        state = state._replace(params=healthy)  # recovered, by hand
        rng = np.random.default_rng(1)
        for _ in range(3):
            state, _ = step(state, rng.normal(size=(4, 3)).astype(np.float32))
        assert np.asarray(state.opt_state[-1].inner.exchanges).tolist() == [6] * 4
        runs[mode] = np.asarray(state.params["w"])
    np.testing.assert_allclose(runs["traced"], runs["host"], rtol=1e-6)
    assert step.sync.phases() == [("any round",)]


def test_what_travels_is_asked_about():
    """60000 + 9000 is finite in float32 and no float16."""
    tx = js.only_finite(js.local_sgd("replica", sync_every=1))

    def one(p, u):
        updates, state = tx.update(u, tx.init(p), p)
        return optax.apply_updates(p, updates), state.refused

    params = np.full((4, 1), 60000, np.float16)
    updates = np.float32([[0], [9000], [0], [0]])
    moved, refused = jax.jit(jax.vmap(one, axis_name="replica"))(params, updates)
    assert np.isinf(moved).ravel().tolist() == [False, True, False, False]
    assert refused.tolist() == [1] * 4
