"""Outer states in other fragments, with a delay or without, on as many replicas or fewer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from jaxslowmo.checkpoint import Checkpoints

PERIOD = 12
PARAMS = {"a": jnp.arange(3.0), "b": -jnp.ones(2), "c": jnp.ones(4) / 3, "d": jnp.zeros(3)}


def loss_of_leaves(params, batch):
    return sum(jnp.sum(params[name] * batch[name].mean(0)) for name in params)


def by_hand(name):
    return {"a": 1, "b": 0, "c": 1, "d": 2}[name]


# Divided otherwise, with a delay and without one, sharded and whole
DIVISIONS = [
    {},
    {"fragments": 3, "delay": 2},
    {"fragments": by_hand, "delay": 1, "merge": 0.5},
]
# From one to another, on how many replicas, whether sharded; the last is the same.
MOVES = [(0, 2, 2, False), (1, 1, 2, True)]


@pytest.mark.parametrize(("then", "now", "replicas", "shard_state"), MOVES)
def test_a_run_goes_on_in_other_fragments(tmp_path, then, now, replicas, shard_state):
    """Each leaf keeps its anchor and its momentum, whatever its fragment was."""
    outer = optax.chain(optax.scale_by_adam(b1=0.5, b2=0.9), optax.scale(-0.1))

    def step_on(count, options):
        sync = js.diloco(
            "replica", sync_every=PERIOD, outer_optimizer=outer, shard_state=shard_state, **options
        )
        mesh = js.virtual_mesh({"replica": count})
        return js.make_train_step(loss_of_leaves, optax.sgd(0.1), sync=sync, mesh=mesh)

    def by_leaf(step, state):
        """Return the anchor by leaf, and the two moments that Adam keeps of each leaf."""
        own, anchor_of = state.opt_state[-1], jax.vmap(step.sync.anchor, axis_name="replica")
        is_one = step.sync.division(state.params)["fragments"] is None
        moments = [
            [getattr(x[0], n) for x in ([own.outer] if is_one else own.outer)] for n in ("mu", "nu")
        ]
        alike = [own.anchor]
        alike += [x[0] if is_one else tuple(x) for x in moments]
        all_of = jax.jit(
            lambda trees: [anchor_of(own._replace(anchor=x), state.params) for x in trees]
        )
        return all_of(alike)

    random = np.random.default_rng(5)
    batches = [
        {name: random.normal(size=(4, *x.shape)).astype(np.float32) for name, x in PARAMS.items()}
        for _ in range(16)
    ]
    step, other = step_on(4, DIVISIONS[then]), step_on(replicas, DIVISIONS[now])
    state = step.init(PARAMS)
    for batch in batches[:14]:
        state, _ = step(state, batch)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(14, state, wait=True)
        resumed = checkpoints.restore(other, PARAMS)
    after = by_leaf(other, resumed.state)
    for saved, restored in zip(by_leaf(step, state), after, strict=True):
        for name in PARAMS:
            np.testing.assert_array_equal(saved[name][0], restored[name][0])
    again = resumed.state
    for batch in batches[14:]:
        state, again = step(state, batch)[0], other(again, batch)[0]
    assert np.isfinite(again.params["a"]).all()
    if then == now:  # update 16 applies what was taken before
        for one, two in zip(by_leaf(step, state), by_leaf(other, again), strict=True):
            for name in PARAMS:
                np.testing.assert_allclose(one[name][0], two[name][0], rtol=1e-6, atol=1e-6)
