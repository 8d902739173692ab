"""The page "Before you move `pmean`": the overflow of one replica, in each form of the program."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from recipes.doc_blocks import run, sections

PAGE = "before-you-move-pmean"
TITLES = [title for title, blocks in sections(PAGE).items() if blocks]
REPLICAS, UPDATES, BAD, AT = 4, 24, 2, 4  # the gradient of replica 2 overflows in the fifth step

pytestmark = pytest.mark.xdist_group("before you move pmean")  # one process runs the page


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    return run(PAGE, *TITLES)


def assert_equal_counts(sync_state: Any, updates: int = UPDATES) -> None:
    np.testing.assert_array_equal(sync_state.count, [updates] * REPLICAS)


def assert_consensus(params: Any) -> None:
    """Parameters are finite, and equal on all replicas."""
    for leaf in map(np.asarray, jax.tree.leaves(params)):
        assert np.all(np.isfinite(leaf))
        np.testing.assert_allclose(leaf, np.broadcast_to(leaf[:1], leaf.shape), atol=1e-6)


def assert_close(tree: Any, expected: Any) -> None:
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, tree, expected)


def by_hand(page: dict[str, Any], period: int, optimizer: optax.GradientTransformation) -> Any:
    """Local steps of every replica but one, which leaves out its bad step; averages of all."""
    replicas = [{"w": jnp.zeros(3), "b": jnp.zeros(())}] * REPLICAS
    states = [optimizer.init(params) for params in replicas]
    grad = jax.jit(jax.grad(page["loss_fn"]))
    for t in range(UPDATES):
        for r in range(REPLICAS):
            if (r, t) != (BAD, AT):
                grads = grad(replicas[r], (page["x"][t, r], page["y"][t, r]))
                updates, states[r] = optimizer.update(grads, states[r], replicas[r])
                replicas[r] = optax.apply_updates(replicas[r], updates)
        if (t + 1) % period == 0:
            mean = jax.tree.map(lambda *leaves: sum(leaves) / REPLICAS, *replicas)
            replicas = [mean] * REPLICAS
    return replicas[0]


@pytest.mark.parametrize("name", ["local_sgd", "slowmo"])
def test_a_replica_that_skips_its_update_stays_in_step(page, name):
    params, (optimizer, sync) = page["trained"][name]
    assert_consensus(params)
    assert_equal_counts(sync)
    adam = optimizer.inner_state[0]
    assert adam.count.tolist() == [UPDATES - (r == BAD) for r in range(REPLICAS)]


def test_averages_are_those_of_replicas_trained_by_hand(page):
    expected = by_hand(page, 3, page["adam"])
    for params in (page["trained"]["local_sgd"][0], page["scaled_params"], page["flax_params"]):
        assert_close(jax.tree.map(lambda leaf: leaf[0], params), expected)
    clipped = optax.chain(optax.clip_by_global_norm(1.0), page["adam"])
    one = jax.tree.map(lambda leaf: leaf[0], page["clipped_params"])
    assert_close(one, by_hand(page, 3, clipped))


def test_each_replica_lowers_its_own_loss_scale(page):
    scaled, flax_scale = page["scaled_state"], page["flax_scale"]
    for scale in (scaled[0].loss_scale, flax_scale.scale):
        assert scale.tolist() == [2.0 ** (15 if r == BAD else 16) for r in range(REPLICAS)]
    for state in (scaled, page["flax_state"]):
        assert_equal_counts(state[-1])
