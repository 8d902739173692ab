"""The algorithm between an island's replicas runs as it does alone, and what it keeps decides."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from islands.together import batch, loss, params
from support.strict import assert_equal_bits

REPLICAS = 3
STAR = js.topology.star(REPLICAS)  # its nodes have push-sum weights that differ
BASES = {
    "local_sgd": lambda: js.local_sgd("replica", sync_every=3),
    "gossip": lambda: js.sgp("replica", graph=STAR, overlap=1),
    "late gossip": lambda: js.sgp("replica", graph=STAR, overlap=2),
    "only_finite": lambda: js.only_finite(js.local_sgd("replica", sync_every=3)),
}
AROUND = {
    "": lambda base: base,
    "slowmo that merges": lambda base: js.slowmo("replica", base=base, sync_every=3, merge=0.5),
}


def trained(
    sync: Any, updates: int = 7, *, diverges: bool = False, **options: Any
) -> tuple[Any, Any, list[Any]]:
    """Return step, state and phases of a run, in which the second replica may become NaN."""
    mesh = js.virtual_mesh({"replica": REPLICAS})
    step = js.make_train_step(loss, optax.sgd(0.1), mesh=mesh, sync=sync, **options)
    state, phases = step.init(params()), []
    for t in range(1, updates + 1):
        if step.mode == "host":
            phases.append(step.next_phase(state))
        inputs, targets = batch(t, slice(0, REPLICAS))
        if diverges and t == 5:
            inputs[2:4] = np.nan
        state, _ = step(state, (inputs, targets))
    return step, state, phases


@pytest.mark.parametrize(
    ("base", "around", "mode"),
    [
        ("local_sgd", "", "host"),
        ("late gossip", "slowmo that merges", "traced"),
        ("only_finite", "slowmo that merges", "host"),
    ],
)
def test_a_base_runs_as_it_does_alone(base, around, mode):
    alone, inside = BASES[base](), js.islands.transform(BASES[base](), js.codecs.int8())
    options = {"mode": mode, "diverges": base == "only_finite"}
    before, expected, phases = trained(AROUND[around](alone), **options)
    step, state, others = trained(AROUND[around](inside), **options)
    assert phases == others
    assert_equal_bits(state.params, expected.params)
    assert_equal_bits(of_base(state), of_base(expected))
    assert_equal_bits(step.consensus(state), before.consensus(expected))


def of_base(state: Any) -> list[Any]:
    """Return the arrays of the exchange's state, without the island's place."""
    is_place = lambda x: isinstance(x, js.islands.IslandState)  # noqa: E731
    leaves = jax.tree.leaves(state.exchange, is_leaf=is_place)
    return [x for x in leaves if not is_place(x)]


def test_an_island_counts_replicas_as_gossip_weighs_them(tmp_path):
    island = js.islands.join(str(tmp_path), name="one", outer_optimizer=optax.sgd(1.0))
    step, state, _ = trained(island.transform(BASES["gossip"]()), updates=0)
    state = island.exchange(state)
    for t in range(1, 4):
        state, _ = step(state, batch(t, slice(0, REPLICAS)))
    mean, plain = step.consensus(state), jax.tree.map(lambda x: x.mean(0), state.params)
    state = island.exchange(state)
    for x, near, far in zip(*map(jax.tree.leaves, (state.params, mean, plain)), strict=True):
        np.testing.assert_allclose(x, np.broadcast_to(near, x.shape), atol=1e-6)
        assert np.abs(near - far).max() > 1e-4


def centred() -> js.ParameterTransform:
    """Return an algorithm of a user, which keeps a point of its own."""
    point = lambda params: {"centre": jax.tree.map(jnp.array, params)}  # noqa: E731
    pull = js.spec.Event("pull", js.every(2), lambda carry, replicas, context: carry)
    kind = js.Algorithm(events=(pull,))
    return js.ParameterTransform(dataclasses.replace(kind, local=point), "replica")


REFUSED = {
    "an anchor": lambda: js.diloco("replica"),
    "parameters under way": lambda: js.only_finite(js.sgp("replica", overlap=2)),
    "a codec's error": lambda: js.local_sgd("replica", codec=js.codecs.int8()),
    "centres of replicas": centred,
}


@pytest.mark.parametrize("kept", REFUSED)
def test_what_an_exchange_would_leave_behind_is_refused(kept, tmp_path):
    _, state, _ = trained(REFUSED[kept](), updates=0)
    island = js.islands.join(str(tmp_path), name="one")
    with pytest.raises(ValueError, match="keeps an anchor, or parameters under way"):
        island.exchange(state)
    assert not list(tmp_path.iterdir())


def test_a_base_with_an_anchor_is_refused_at_once():
    with pytest.raises(ValueError, match=r"`base` must not keep an anchor, got diloco"):
        js.islands.transform(js.diloco("replica"))
