"""One update against loops written by hand with optax: gradients, averages, gossip, keys."""

import itertools

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from support.exhaustive import sweep
from train.step.problem import (
    BATCHES,
    KINDS,
    PARAMS,
    RATE,
    assert_close,
    loss,
    slow_over_local,
    train,
)


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


ONE, TWO = {"replica": 4}, {"replica": 2, "device": 2}


@pytest.mark.parametrize(
    ("kind", "axes", "accumulate"),
    sweep(
        itertools.product(["auto", "explicit", "virtual"], [ONE, TWO], [1, 2]),
        lambda *case: case in [("auto", TWO, 2), ("explicit", TWO, 1), ("virtual", ONE, 2)],
    ),
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


UNEVEN = js.topology.self_weighted([0.3, 0.6])
FSDP = {"b": P(), "w": P("fsdp")}


@pytest.mark.parametrize("keys", sweep(["w", "wb"], lambda keys: keys == "wb"))
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(
            lambda s: js.local_sgd("replica", sync_every=2, param_specs=s),
            marks=pytest.mark.exhaustive,
        ),
        lambda s: slow_over_local(param_specs=s),
        lambda s: js.diloco("replica", sync_every=2, shard_state=False, param_specs=s),
        pytest.param(
            lambda s: js.sgp("replica", mixing=UNEVEN, param_specs=s), marks=pytest.mark.exhaustive
        ),
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


@pytest.mark.parametrize("kind", ["auto", "virtual"])
def test_gradients_left_apart_on_the_devices_of_a_replica(kind):
    step = js.make_train_step(
        loss,
        optax.sgd(0.1),
        gradients=js.all_reduce_gradients("replica"),
        mesh=KINDS[kind]({"replica": 2, "device": 2}),
    )
    message = r"`gradients` must average over the inner axes \('device',\).*: b, w"
    with pytest.raises(ValueError, match=message):
        step(step.init(PARAMS), BATCHES[0])


def test_a_chain_that_reduces_by_itself():
    """On two levels the step averages gradients over "device" unless told that the chain does."""
    mesh = js.make_mesh({"replica": 2, "device": 2})
    chain = optax.chain(js.all_reduce_gradients("device"), optax.sgd(0.1), js.local_sgd("replica"))
    twice = js.make_train_step(loss, chain, mesh=mesh)
    with pytest.raises(ValueError, match=r"gradients=optax\.identity\(\)"):
        twice(twice.init(PARAMS), BATCHES[0])
    once = js.make_train_step(loss, chain, gradients=optax.identity(), mesh=mesh)
    parts = js.make_train_step(loss, optax.sgd(0.1), sync=js.local_sgd("replica"), mesh=mesh)
    found, expected = (step(step.init(PARAMS), BATCHES[0])[0].params["w"] for step in (once, parts))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
