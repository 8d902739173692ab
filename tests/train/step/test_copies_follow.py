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
from support.exhaustive import sweep

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
            "d": optax.MultiSteps(SAM, 1).gradient_transformation(),
        },
        {name: name for name in PARAMS},
    ),
    3,
)
COPIES = {"init_particles": "a", "x0": "b", "z": "c", "cache": "d"}
SYNCS = {
    "local_sgd": lambda: js.local_sgd("replica", sync_every=3),
    "sgp": lambda: js.sgp("replica", graph=js.topology.ring(3)),
    "overlapped": lambda: js.sgp("replica", graph=js.topology.ring(3), overlap=1),
    "slowmo": lambda: js.slowmo(
        "replica", base=js.local_sgd("replica", sync_every=2), sync_every=4, learning_rate=0.1
    ),
    "diloco": lambda: js.diloco("replica", sync_every=3),
}
KINDS = {"virtual": js.virtual_mesh, "devices": js.make_mesh}

pytestmark = pytest.mark.filterwarnings("ignore:`optimizer` holds optax.contrib.sam:UserWarning")


def linear(params, batch):
    return sum(jnp.sum(params[name] * jnp.mean(batch, 0)[i]) for i, name in enumerate(PARAMS))


def trained(sync, kind, optimizer=OPTIMIZER, weights=None, **options):
    mesh = KINDS[kind]({"replica": 3})
    step = js.make_train_step(linear, optimizer, sync=sync, mesh=mesh, **options)
    state = step.init(PARAMS)
    for t, batch in enumerate(BATCHES):
        state, _ = step(state, batch) if weights is None else step(state, batch, weights[t])
    return state


def copies(state):
    """Copies of parameters in the state, by name of the parameter."""
    found = {}
    for field, name in COPIES.items():
        ((_, tree),) = optax.tree.get_all_with_path(state.opt_state[1], field)
        found[name] = tree[name]
    return found


@pytest.fixture(scope="module")
def apart():
    return trained("none", "virtual"), trained("none", "virtual", weights=WEIGHTS)


def is_usual(sync, kind, mode, accumulate, weighted):
    return (sync, kind, mode, accumulate, weighted) in [
        ("local_sgd", "virtual", "traced", 1, True),
        ("sgp", "virtual", "host", 1, False),
        ("overlapped", "virtual", "traced", 1, False),
        ("slowmo", "devices", "host", 1, False),
        ("diloco", "devices", "traced", 2, False),
    ]


@pytest.mark.parametrize(
    ("sync", "kind", "mode", "accumulate", "weighted"),
    sweep(
        [
            (sync, kind, mode, accumulate, weighted)
            for sync in SYNCS
            for kind in KINDS
            for mode in ("traced", "host")
            for accumulate in (1, 2)
            for weighted in (False, True)
        ],
        is_usual,
    ),
)
def test_copies_move_with_the_parameters(apart, sync, kind, mode, accumulate, weighted):
    alone = apart[weighted]
    state = trained(
        SYNCS[sync](),
        kind,
        mode=mode,
        accumulate=accumulate,
        weights=WEIGHTS if weighted else None,
    )
    before, after = copies(alone), copies(state)
    for name in PARAMS:
        moved = np.asarray(state.params[name]) - np.asarray(alone.params[name])
        assert np.abs(moved).max() > 1e-3
        np.testing.assert_allclose(after[name] - before[name], moved, atol=2e-6, err_msg=name)


def test_copies_of_leaves_that_are_sharded_inside_a_replica(apart):
    """Also `optax.MultiSteps`, which makes zeros like shapes of such leaves, where jax asserts."""
    mesh = js.make_mesh({"replica": 3, "fsdp": 2})
    sharded = jax.device_put(PARAMS, NamedSharding(mesh, P("fsdp")))
    sync = js.local_sgd("replica", sync_every=3)
    step = js.make_train_step(linear, OPTIMIZER, sync=sync, mesh=mesh)
    state = step.init(sharded)
    for batch in BATCHES:
        state, _ = step(state, batch)
    before, after = copies(apart[False]), copies(state)
    for name in PARAMS:
        assert after[name].sharding.spec[:2] == ("replica", "fsdp")
        moved = np.asarray(state.params[name]) - np.asarray(apart[False].params[name])
        np.testing.assert_allclose(after[name] - before[name], moved, atol=2e-6, err_msg=name)


def spread(params):
    return max(float(np.ptp(np.asarray(x), axis=0).max()) for x in jax.tree.leaves(params))


def test_an_average_stays():
    """One update without gradients after the average: COCOB took all of it back."""
    step = js.make_train_step(
        linear,
        contrib.cocob(),
        sync=js.local_sgd("replica", sync_every=7),
        mesh=js.virtual_mesh({"replica": 3}),
    )
    state = step.init(PARAMS)
    for t, batch in enumerate([*BATCHES, np.zeros_like(BATCHES[0])], start=1):
        state, _ = step(state, batch)
        if t == 6:
            assert spread(state.params) > 1e-3
    assert spread(state.params) < 1e-6


def test_schedule_free_at_every_update_is_one_run_on_all_data():
    """It is linear in the gradients, so averages at every update leave nothing to differ."""
    free = contrib.schedule_free_sgd(0.1)
    mesh, square = js.virtual_mesh({"replica": 3}), lambda p, b: jnp.sum((p["a"] - b[:, 0]) ** 2)
    runs = [
        js.make_train_step(square, free, mesh=mesh, **how)
        for how in (
            {"sync": js.local_sgd("replica", sync_every=1)},
            {"gradients": js.all_reduce_gradients("replica")},
        )
    ]
    states = [step.init(PARAMS) for step in runs]
    for batch in BATCHES:
        states = [step(state, batch)[0] for step, state in zip(runs, states, strict=True)]
    found, expected = states
    np.testing.assert_allclose(found.params["a"], expected.params["a"], rtol=2e-5, atol=2e-6)
    evaluated = jax.vmap(contrib.schedule_free_eval_params)
    both = [evaluated(state.opt_state[1], state.params)["a"] for state in states]
    np.testing.assert_allclose(both[0].mean(0), both[1][0], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("mode", ["traced", "host"])
def test_nothing_more_is_sent(mode):
    """The same collectives by kind of step as with an optimizer that remembers no parameters."""

    def sent(optimizer):
        mesh = js.make_mesh({"replica": 3})
        sync = js.local_sgd("replica", sync_every=3)
        step = js.make_train_step(linear, optimizer, sync=sync, mesh=mesh, mode=mode)
        state = jax.eval_shape(step.init, PARAMS)
        found = {}
        for phase, traced in step.traced_by_phase(state, BATCHES[0]).items():
            report = js.comm_report_of(traced.lower(), compile=False)
            for kind in report.kinds:
                rows = report.select(axis="replica", kind=kind)
                found[phase, kind] = sum(r.count for r in rows), sum(r.bytes for r in rows)
        return found

    wanted = sent(optax.sgd(0.1))
    assert sorted(wanted.values()) == [(0, 0), (1, 4 * 6 * len(PARAMS))]
    assert sent(OPTIMIZER) == wanted
