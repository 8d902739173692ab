"""Outer states in other fragments, with a delay or without, on as many replicas or fewer."""

import itertools

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
    {"fragments": 2},
    {"fragments": 3, "delay": 2},
    {"fragments": by_hand, "delay": 1, "merge": 0.5},
    {"delay": 3},
    {"fragments": 4, "delay": 2},
]


ALL = list(itertools.product(range(6), range(6), (2, 4), (True, False)))
FEW = [(then, (then + by) % 6, 2 * by, then % 2 == 0) for then in range(6) for by in (1, 2)]


@pytest.mark.parametrize(
    ("then", "now", "replicas", "shard_state"),
    [pytest.param(*case, marks=() if case in FEW else pytest.mark.exhaustive) for case in ALL],
)
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
        sync_state = state.opt_state[-1]
        outer, is_one = sync_state.outer, not isinstance(sync_state.outer, dict)
        moments = [
            getattr(outer[0], name)
            if is_one
            else {k: getattr(x[0], name) for k, x in outer.items()}
            for name in ("mu", "nu")
        ]
        return [
            jax.vmap(step.sync.anchor, axis_name="replica")(
                sync_state._replace(anchor=like_anchor), state.params
            )
            for like_anchor in (sync_state.anchor, *moments)
        ]

    random = np.random.default_rng(5)
    batches = [
        {name: random.normal(size=(4, *x.shape)).astype(np.float32) for name, x in PARAMS.items()}
        for _ in range(15)
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
    state, metrics = other(resumed.state, batches[14])
    assert np.isfinite(metrics["loss"]).all()
