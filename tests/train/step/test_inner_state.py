"""What an exchange does to the moments of the inner optimizer: it keeps, resets or averages them.

Gradients do not depend on the parameters here, so NumPy has them, too.
"""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js

REPLICAS, ROWS, UPDATES = 4, 2, 10
RNG = np.random.default_rng(0)
START = {"b": RNG.normal(size=2).astype(np.float32), "w": RNG.normal(size=3).astype(np.float32)}
BATCHES = RNG.normal(size=(UPDATES, REPLICAS * ROWS, 5)).astype(np.float32)
GRADS = BATCHES.reshape(UPDATES, REPLICAS, ROWS, 5).mean(2).astype(np.float64)
VIRTUAL = js.virtual_mesh({"replica": REPLICAS})


def rate(t):
    """A schedule that shows whether its counter goes on."""
    return 0.1 / (1.0 + t)


def rate_of_count(count):
    return rate(count.astype(jnp.float32))


OPTIMIZERS = {"adam": optax.adam(rate_of_count), "momentum": optax.sgd(rate_of_count, momentum=0.9)}
SYNCS = {
    "local_sgd": lambda **o: js.local_sgd("replica", sync_every=4, **o),
    "diloco": lambda **o: js.diloco("replica", sync_every=4, **o),
    "slowmo": lambda **o: js.slowmo(
        "replica", base=js.local_sgd("replica", sync_every=2), sync_every=4, momentum=0.5, **o
    ),
}


def loss(params, batch):
    return jnp.mean(batch[:, :2], 0) @ params["b"] + jnp.mean(batch[:, 2:], 0) @ params["w"]


def step_of(sync, optimizer, mesh=VIRTUAL, **options):
    return js.make_train_step(loss, optimizer, sync=sync, mesh=mesh, **options)


def trained(step, updates=UPDATES, weight=None):
    state = step.init(START)
    for t, batch in enumerate(BATCHES[:updates], 1):
        state, _ = step(state, batch, weight)
        found = flat(state.params)  # replicas agree to the bit: they are set to the result
        assert np.array_equal(found, np.tile(found[0], (REPLICAS, 1))) or t % 4
    return state


def flat(tree):
    """(replicas, 5): the leaves of a stacked tree side by side."""
    return np.concatenate([np.asarray(tree["b"]), np.asarray(tree["w"])], 1)


def moments(state):
    """Mean and variance of Adam, or momentum, of all replicas; and the counter beside them."""
    inner = state.opt_state[0]
    if hasattr(inner, "trace"):
        return [flat(inner.trace)], None
    return [flat(inner.mu), flat(inner.nu)], np.asarray(inner.count)


def oracle(sync, optimizer, inner, weights=None):
    """Return parameters, moments and Adam's counter of all replicas after all updates."""
    start = np.concatenate([START["b"], START["w"]]).astype(np.float64)
    x, anchor, slow = np.tile(start, (REPLICAS, 1)), start, np.zeros(5)
    m, v, count = np.zeros_like(x), np.zeros_like(x), 0
    for t, grads in enumerate(GRADS):
        count += 1
        if optimizer == "adam":
            m, v = 0.9 * m + 0.1 * grads, 0.999 * v + 0.001 * grads**2
            update = m / (1 - 0.9**count) / (np.sqrt(v / (1 - 0.999**count)) + 1e-8)
        else:
            m = 0.9 * m + grads
            update = m
        x = x - rate(t) * update
        if isinstance(inner, dict):
            mean = np.average(np.stack([m, v]), axis=1, weights=weights)
            due = [not (t + 1) % 3, not (t + 1) % 6]
            m, v = (
                np.where(d, one, y) for d, one, y in zip(due, mean[:, None], (m, v), strict=True)
            )
        if (t + 1) % 4:
            if sync == "slowmo" and (t + 1) % 2 == 0:
                x = np.tile(np.average(x, 0, weights), (REPLICAS, 1))
            continue
        average = np.average(x, 0, weights)
        displacement = anchor - average
        if sync == "local_sgd":
            anchor = average
        elif sync == "slowmo":
            slow = 0.5 * slow + displacement
            anchor = anchor - slow
        else:
            slow = 0.9 * slow + displacement
            anchor = anchor - 0.7 * (0.9 * slow + displacement)
        x = np.tile(anchor, (REPLICAS, 1))
        if inner == "reset":
            m, v, count = np.zeros_like(m), np.zeros_like(v), 0
        elif inner == "average":
            m, v = (np.tile(np.average(y, 0, weights), (REPLICAS, 1)) for y in (m, v))
    return x, [m, v] if optimizer == "adam" else [m], count


PERIODS = {"adam": {"nu": js.every(6), "mu": 3}, "momentum": {"trace": 3}}
WEIGHT = np.float32([1, 3, 0.5, 2])


@pytest.mark.parametrize(
    ("sync", "optimizer", "inner", "weight", "options"),
    [
        ("local_sgd", "adam", "keep", None, {}),
        ("diloco", "adam", "reset", None, {"mode": "host"}),
        ("slowmo", "momentum", "average", WEIGHT, {}),
        ("local_sgd", "adam", "average", WEIGHT, {"mode": "host", "mesh": {"replica": REPLICAS}}),
        ("slowmo", "adam", "reset", None, {"mesh": {"replica": REPLICAS}}),
        ("local_sgd", "momentum", "periods", WEIGHT, {}),
        ("diloco", "adam", "periods", None, {"mode": "host", "mesh": {"replica": REPLICAS}}),
        ("slowmo", "adam", "periods", None, {}),
    ],
)
def test_two_exchanges_equal_numpy(mesh_of, sync, optimizer, inner, weight, options):
    """With periods of their own, too; a replica's weight counts in means of moments."""
    inner = PERIODS[optimizer] if inner == "periods" else inner
    options |= {"mesh": mesh_of(options["mesh"])} if "mesh" in options else {}
    tx = SYNCS[sync](inner_state=inner)
    tx = js.only_finite(tx) if sync == "slowmo" else tx
    state = trained(step_of(tx, OPTIMIZERS[optimizer], **options), weight=weight)
    x, wanted, count = oracle(sync, optimizer, inner, weight)
    np.testing.assert_allclose(flat(state.params), x, rtol=1e-5, atol=1e-6)
    found, counter = moments(state)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
    if counter is not None:
        np.testing.assert_array_equal(counter, [count] * REPLICAS)


def test_des_loc_is_local_sgd_with_moments_every_3_and_6_averages():
    """What is sent are N bytes for the parameters, and N for each moment that is due."""
    tx = js.des_loc("replica", sync_every=js.every(2, start=2, before="all"))
    assert [t for t in range(1, 40) if "mu" in tx.phase(t)] == [1, 2, 8, 14, 20, 26, 32, 38]
    own = js.des_loc("replica", sync_every=2, moments={"trace": 5})
    assert [t for t in range(1, 21) if "trace" in own.phase(t)] == [10, 20]
    mesh, size = js.make_mesh({"replica": REPLICAS}), 4 * 5
    step = step_of(js.des_loc("replica", sync_every=2), optax.adam(0.1), mesh, mode="host")
    report = js.comm_report(step, step.init(START), BATCHES[0])
    assert {kind: report.bytes(kind=kind) for kind in report.kinds} == {
        "local": 0,
        "average": size,
        "average+mu": 2 * size,
        "average+mu+nu": 3 * size,
    }


@pytest.mark.parametrize("inner", ["reset", "average"])
def test_what_starts_anew_and_what_goes_on(inner):
    """Moments and the counters beside them do; schedules, rates and loss scales do not."""
    optimizer = js.dynamic_loss_scale(
        optax.chain(
            optax.inject_hyperparams(optax.adam)(learning_rate=0.3),
            optax.scale_by_schedule(rate_of_count),
        ),
        initial=8.0,
        growth_interval=3,
    )
    state, kept = (
        trained(step_of(SYNCS["local_sgd"](inner_state=x), optimizer), 4).opt_state
        for x in (inner, "keep")
    )
    assert state.loss_scale[0] == kept.loss_scale[0] == 16.0
    adam, schedule = state.inner
    assert adam.count[0] == schedule.count[0] == 4
    assert adam.hyperparams["learning_rate"][0] == np.float32(0.3)
    assert adam.inner_state[0].count[0] == (0 if inner == "reset" else 4)
    own = flat(kept.inner[0].inner_state[0].mu)
    wanted = 0 * own if inner == "reset" else np.tile(own.mean(0), (REPLICAS, 1))
    np.testing.assert_allclose(flat(adam.inner_state[0].mu), wanted, rtol=1e-5)


@pytest.mark.parametrize(("optimizer", "known"), [("adam", "'mu', 'nu'"), ("momentum", "'trace'")])
def test_a_field_that_the_optimizer_lacks_is_refused_in_the_first_update(optimizer, known):
    step = step_of(js.des_loc("replica", moments={"count": 2}), OPTIMIZERS[optimizer], mode="host")
    with pytest.raises(ValueError, match=f"`inner_state` names .* are {known}"):
        trained(step, 1)
    with pytest.raises(ValueError, match="`inner_state` counts updates and must be an int >= 1"):
        js.diloco("replica", inner_state={"mu": 0})
