"""The training step against loops written by hand with optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.train.step import _host

RNG = np.random.default_rng(0)
PARAMS = {
    "b": RNG.normal(size=3).astype(np.float32),
    "w": RNG.normal(size=(8, 3)).astype(np.float32),
}
BATCHES = RNG.normal(size=(6, 32, 8)).astype(np.float32)
RATE = optax.linear_schedule(0.2, 0.0, 5)


def loss(params, batch):
    return jnp.mean(jnp.tanh(batch @ params["w"] + params["b"]) ** 2)


def explicit_mesh(axes):
    devices = np.array(jax.devices()[: int(np.prod(list(axes.values())))])
    shaped = devices.reshape(tuple(axes.values()))
    return Mesh(shaped, tuple(axes), axis_types=(AxisType.Explicit,) * len(axes))


KINDS = {"auto": js.make_mesh, "explicit": explicit_mesh, "virtual": js.virtual_mesh}


def slow_over_local(**options):
    base = js.local_sgd("replica", sync_every=2, **options)
    return js.slowmo("replica", base=base, sync_every=4, learning_rate=RATE, **options)


def by_hand(steps=4):
    """One replica on the whole batch."""
    tx = optax.sgd(RATE, momentum=0.9)
    params, state = PARAMS, tx.init(PARAMS)
    for batch in BATCHES[:steps]:
        updates, state = tx.update(jax.grad(loss)(params, batch), state, params)
        params = optax.apply_updates(params, updates)
    return params


def local_sgd_by_hand(replicas, steps=4):
    """Each replica alone on its part, averaged after every second step."""
    grad = jax.jit(jax.grad(loss))
    params = [PARAMS] * replicas
    for t, batch in enumerate(BATCHES[:steps], start=1):
        parts = np.split(batch, replicas)
        rate = np.float32(RATE(t - 1))
        params = [
            jax.tree.map(lambda p, g, rate=rate: np.asarray(p - rate * g), p, grad(p, part))
            for p, part in zip(params, parts, strict=True)
        ]
        if t % 2 == 0:
            mean = jax.tree.map(lambda *x: np.mean(x, axis=0), *params)
            params = [mean] * replicas
    return jax.tree.map(lambda *x: np.stack(x), *params)


def train(step, state, batches=BATCHES[:4]):
    for batch in batches:
        state, metrics = step(state, batch)
    return state, metrics


def assert_close(found, expected, atol=2e-6):
    for key in expected:
        np.testing.assert_allclose(
            found[key], np.broadcast_to(expected[key], found[key].shape), atol=atol, err_msg=key
        )


ONE, TWO = {"replica": 4}, {"replica": 2, "device": 2}


@pytest.mark.parametrize(
    ("kind", "axes", "accumulate"),
    [
        ("auto", ONE, 1),
        ("auto", TWO, 2),
        ("explicit", ONE, 2),
        ("explicit", TWO, 1),
        ("virtual", ONE, 2),
        ("virtual", TWO, 1),
    ],
)
def test_all_reduce_equals_one_big_batch(kind, axes, accumulate):
    step = js.make_train_step(
        loss,
        optax.sgd(RATE, momentum=0.9),
        gradients=js.all_reduce_gradients(tuple(axes) if len(axes) > 1 else "replica"),
        mesh=KINDS[kind](axes),
        accumulate=accumulate,
    )
    state, metrics = train(step, step.init(PARAMS))
    assert_close(state.params, by_hand())
    assert metrics["loss"].shape == (axes["replica"],)
    assert np.array_equal(state.step, [4] * axes["replica"])
    mean = float(loss(by_hand(3), BATCHES[3]))
    np.testing.assert_allclose(np.mean(metrics["loss"]), mean, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "devices", "mode"),
    [
        ("auto", None, "traced"),
        ("auto", 1, "traced"),
        ("auto", 2, "host"),
        ("virtual", 1, "traced"),
        ("virtual", 2, "traced"),
    ],
)
def test_local_sgd_equals_a_loop_by_hand(kind, mode, devices):
    axes = {"replica": 2} if devices is None else {"replica": 2, "device": devices}
    local = None if devices is None else "device"
    step = js.make_train_step(
        loss,
        optax.sgd(RATE),
        sync=js.local_sgd("replica", sync_every=2, local_axis_name=local),
        mesh=KINDS[kind](axes),
        mode=mode,
        accumulate=2,
    )
    state, _ = train(step, step.init(PARAMS), BATCHES[:3])
    assert_close(state.params, local_sgd_by_hand(2, steps=3))


def test_a_leaf_without_elements_beside_an_inner_axis():
    step = js.make_train_step(
        lambda p, b: loss({"w": p["w"], "b": p["b"]}, b),
        optax.sgd(RATE),
        sync=js.local_sgd("replica", sync_every=2),
        mesh=js.make_mesh({"replica": 2, "device": 2}),
    )
    params = {**PARAMS, "none": np.ones((0, 3), np.float16)}
    state, _ = train(step, step.init(params), BATCHES[:1])
    assert state.params["none"].shape == (2, 0, 3)


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("auto", "traced"), ("auto", "host"), ("explicit", "traced"), ("virtual", "host")],
)
def test_gossip_of_two_replicas_equals_one_big_batch(kind, mode):
    """Two nodes that keep one half and send the other one have averaged after every update."""
    step = js.make_train_step(
        loss,
        optax.sgd(RATE, momentum=0.9),
        sync=js.sgp("replica"),
        mesh=KINDS[kind]({"replica": 2}),
        mode=mode,
    )
    state, _ = train(step, step.init(PARAMS))
    assert_close(state.params, by_hand())


@pytest.mark.parametrize("kind", ["auto", "virtual"])
def test_random_keys_differ_everywhere(kind):
    def noisy(params, batch, *, rng):
        u = jax.random.uniform(rng)
        return params["x"] * batch.mean(), {"u": u, "square": u**2}

    def numbers(accumulate, axes):
        step = js.make_train_step(
            noisy,
            optax.sgd(0.1),
            sync=js.local_sgd("replica", sync_every=2),
            mesh=KINDS[kind](axes),
            accumulate=accumulate,
        )
        state = step.init({"x": np.float32(1)}, seed=3)
        out = []
        for batch in BATCHES[:2]:
            state, metrics = step(state, batch)
            out.append((np.asarray(metrics["u"]), np.asarray(metrics["square"])))
        return out

    (first, _), (second, _) = numbers(1, {"replica": 4})
    assert len({*first.tolist(), *second.tolist()}) == 8
    # A mean of squares above the squared mean: what it averages over drew different numbers.
    for accumulate, axes in ((1, {"replica": 2, "device": 2}), (2, {"replica": 2})):
        for u, square in numbers(accumulate, axes):
            assert np.all(square - u**2 > 1e-4)


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("kind", ["auto", "virtual"])
def test_donation(kind, donate):
    source = jax.tree.map(jnp.array, PARAMS)
    step = js.make_train_step(
        loss,
        optax.adam(0.1),
        sync=slow_over_local(),
        mesh=KINDS[kind]({"replica": 4}),
        donate=donate,
    )
    first = step.init(source)
    second, _ = step(first, BATCHES[0])
    assert {x.is_deleted() for x in jax.tree.leaves((first.params, first.opt_state))} == {donate}
    assert not any(x.is_deleted() for x in jax.tree.leaves((source, second)))


UNEVEN = js.topology.self_weighted([0.3, 0.6])
FSDP = {"b": P(), "w": P("fsdp")}


@pytest.mark.parametrize("keys", ["w", "wb"])
@pytest.mark.parametrize(
    "make",
    [
        lambda s: js.local_sgd("replica", sync_every=2, param_specs=s),
        lambda s: slow_over_local(param_specs=s),
        lambda s: js.diloco("replica", sync_every=2, shard_state=False, param_specs=s),
        lambda s: js.sgp("replica", mixing=UNEVEN, param_specs=s),
        lambda s: js.slowmo(
            "replica",
            base=js.sgp("replica", mixing=UNEVEN, overlap=2, param_specs=s),
            sync_every=3,
            param_specs=s,
        ),
    ],
    ids=["local_sgd", "slowmo", "diloco whole", "sgp", "slowmo over sgp"],
)
def test_parameters_sharded_inside_a_replica(make, keys):
    """Equal to the unsharded run, and sharded in the end; alone and beside a whole leaf."""
    specs = {k: FSDP[k] for k in keys}
    params = {k: PARAMS[k] for k in keys}

    def some(p, batch):
        return loss({"b": PARAMS["b"], **p}, batch)

    mesh = js.make_mesh({"replica": 2, "fsdp": 4})
    placed = jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), params, specs)
    plain = js.make_train_step(
        some, optax.sgd(RATE), sync=make(None), mesh=js.virtual_mesh({"replica": 2})
    )
    sharded = js.make_train_step(some, optax.sgd(RATE), sync=make(specs), mesh=mesh)
    expected, _ = train(plain, plain.init(params))
    state, _ = train(sharded, sharded.init(placed))
    assert_close(state.params, expected.params)
    for key, spec in specs.items():
        wanted = NamedSharding(mesh, P("replica", *spec))
        assert state.params[key].sharding.is_equivalent_to(wanted, state.params[key].ndim)


class CountingNumpy:
    """NumPy, with reads of arrays counted."""

    def __init__(self):
        self.reads = 0

    def asarray(self, *args, **kwargs):
        self.reads += 1
        return np.asarray(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(np, name)


@pytest.mark.parametrize("mode", ["traced", "host"])
def test_the_counter_is_read_once(mode, monkeypatch):
    counting = CountingNumpy()
    monkeypatch.setattr(_host, "np", counting)
    step = js.make_train_step(
        loss,
        optax.sgd(RATE),
        sync=js.local_sgd("replica"),
        mesh=js.virtual_mesh({"replica": 2}),
        mode=mode,
    )
    for _ in js.train_loop(step, step.init(PARAMS), BATCHES):
        pass
    assert counting.reads == 1


@pytest.mark.parametrize(("mode", "numpy"), [("host", False), ("host", True), ("traced", False)])
def test_resuming_at_any_step_gives_the_same_bits(mode, numpy):
    def make():
        return js.make_train_step(
            loss,
            optax.sgd(RATE, momentum=0.9),
            sync=slow_over_local(),
            mesh=js.virtual_mesh({"replica": 2}),
            mode=mode,
        )

    def saved(state):
        copy = jax.tree.map(np.array, state._replace(rng=()))
        copy = copy if numpy else jax.tree.map(jnp.asarray, copy)
        return copy._replace(rng=jax.random.wrap_key_data(np.array(jax.random.key_data(state.rng))))

    whole, other = make(), make()
    state, saves, phases = whole.init(PARAMS), [], []
    for batch in BATCHES:
        saves.append(saved(state))
        phases.append(whole.next_phase(state))
        state, _ = whole(state, batch)
    assert phases == [(), ("average",), (), ("slow",), (), ("average",)]
    for t in (5, 3, 2):
        assert other.next_phase(saves[t]) == phases[t]
        resumed, _ = train(other, saves[t], BATCHES[t:])
        for a, b in zip(
            jax.tree.leaves(state.params), jax.tree.leaves(resumed.params), strict=True
        ):
            assert np.array_equal(a, b)
        assert np.array_equal(resumed.step, state.step)


@pytest.mark.parametrize(
    ("case", "mode"),
    [("auto", "host"), ("explicit", "traced"), ("virtual", "traced"), ("fsdp", "traced")],
)
def test_nothing_compiles_after_the_first_step_of_each_phase(case, mode, compilations):
    params = {"w": PARAMS["w"]}
    options = {}
    if case == "fsdp":
        mesh = js.make_mesh({"replica": 2, "fsdp": 4})
        params = {"w": jax.device_put(params["w"], NamedSharding(mesh, P("fsdp")))}
        options = {"param_specs": {"w": P("fsdp")}}
    else:
        mesh = KINDS[case]({"replica": 4})
    step = js.make_train_step(
        lambda p, b: loss({**p, "b": 0.0}, b),
        optax.adam(0.1),
        sync=slow_over_local(**options),
        mesh=mesh,
        mode=mode,
    )
    state = step.init(params)
    seen, compiled = set(), []
    for batch in (*BATCHES, *BATCHES):
        phase = step.next_phase(state)
        before = compilations.count
        state, _ = step(state, batch)
        if phase in seen or (seen and mode == "traced"):
            compiled.append(compilations.count - before)
        else:
            assert compilations.count > before
        seen.add(phase)
    assert sum(compiled) == 0
    assert len(step._programs) == (3 if mode == "host" else 1)


@pytest.mark.parametrize("kind", ["devices", "virtual"])
def test_a_traced_step_inside_of_jit(kind):
    mesh = {"devices": js.make_mesh, "virtual": js.virtual_mesh}[kind]({"replica": 4})
    sync = js.local_sgd("replica", sync_every=2)
    step = js.make_train_step(loss, optax.sgd(0.1), sync=sync, mesh=mesh, donate=False)
    apart = inside = step.init(PARAMS)
    jitted = jax.jit(lambda state, batch: step(state, batch)[0])
    for batch in BATCHES[:2]:
        apart, inside = step(apart, batch)[0], jitted(inside, batch)
    assert_close(inside.params, apart.params)
    assert step.next_phase(inside) == ()
