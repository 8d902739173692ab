"""Gossip in every execution: equal results, and all equal to push-sum in NumPy."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from support import oracle
from support.executions import SCHEDULES, gossip_state
from support.side_by_side import RATES, STEPS, check_oracle, compare, run_together, schedule

NODES = 4
# Nodes 0 and 1 hear from two others in the first round, node 2 from nobody in the second one.
IRREGULAR = js.topology.from_phone_book([[1, 3], [0, 2], [0, 3], [1, 0]])
UNEVEN = js.topology.self_weighted([0.3, 0.5, 0.65, 0.4])


def by_step(graph, step):
    """Other shares in every exchange of a rotation."""
    return js.topology.self_weighted(0.3 + 0.2 * (step % 2))(graph, step)


@dataclass(frozen=True)
class Flavour:
    """Gossip, perhaps under slow momentum."""

    graph: Any = None
    mixing: Any = None
    overlap: int = 0
    slow: oracle.Outer | None = None
    gossip_options: tuple[tuple[str, Any], ...] = ()
    slow_options: tuple[tuple[str, Any], ...] = ()

    def sync(self, local: str | None) -> js.ParameterTransform:
        base = js.sgp(
            "replica",
            graph=self.graph,
            mixing=self.mixing,
            overlap=self.overlap,
            local_axis_name=local,
            **dict(self.gossip_options),
        ).sized({"replica": NODES})
        if self.slow is None:
            return base
        return js.slowmo(
            "replica",
            base=base,
            sync_every=self.slow.every,
            momentum=self.slow.momentum,
            slow_learning_rate=self.slow.rate,
            nesterov=self.slow.nesterov,
            exact_average=self.slow.exact,
            learning_rate=schedule,
            local_axis_name=local,
            **dict(self.slow_options),
        )

    def oracle(self) -> dict[str, Any]:
        chosen = js.topology.npeer_directed_exponential if self.graph is None else self.graph
        graph = chosen if isinstance(chosen, js.topology.Graph) else chosen(NODES)
        matrices = [
            js.topology.mixing_matrix(graph, self.mixing, r) for r in range(graph.num_rounds)
        ]
        return {"gossip": oracle.Gossip(matrices, self.overlap), "outer": self.slow}


def outer(momentum: float = 0.5, **options: Any) -> oracle.Outer:
    return oracle.Outer(4, momentum, gamma=lambda t: RATES[t], **options)


FLAVOURS = {
    "default": Flavour(),
    "default late": Flavour(overlap=1),
    "ring": Flavour(
        js.topology.ring(NODES, peers_per_step=2),
        gossip_options=(("push_sum", False), ("bucket_bytes", 64)),
    ),
    "irregular": Flavour(IRREGULAR, gossip_options=(("bucket_bytes", 512),)),
    "irregular late": Flavour(IRREGULAR, overlap=1),
    "irregular later": Flavour(IRREGULAR, UNEVEN, overlap=3),
    "star": Flavour(js.topology.star),
    "uneven": Flavour(mixing=UNEVEN),
    "even later": Flavour(overlap=2),
    "by step": Flavour(mixing=by_step),
    "by step later": Flavour(mixing=by_step, overlap=2),
    "slow": Flavour(slow=outer()),
    "slow late": Flavour(overlap=1, slow=outer(), gossip_options=(("bucket_bytes", 64),)),
    "slow even later": Flavour(overlap=3, slow=outer(), slow_options=(("bucket_bytes", 512),)),
    "slow irregular": Flavour(IRREGULAR, slow=outer()),
    "slow irregular whole": Flavour(
        IRREGULAR, UNEVEN, overlap=2, slow=outer(), slow_options=(("shard_state", False),)
    ),
    "slow star nesterov": Flavour(
        js.topology.star, overlap=2, slow=outer(0.8, rate=0.7, nesterov=True)
    ),
    "slow inexact": Flavour(IRREGULAR, UNEVEN, slow=outer(exact=False)),
    "slow inexact later": Flavour(IRREGULAR, UNEVEN, overlap=3, slow=outer(exact=False)),
}
MAIN = ("default", "irregular later", "slow even later", "slow irregular", "slow inexact")
# One program per phase: fewer chains, and steps enough for a slow one and what follows.
HOST = ("irregular later", "slow even later", "slow inexact")
HOST_STEPS = 6


@functools.cache
def results(devices: int, execution: str, scheduled: str, names: tuple[str, ...] | None = None):
    local = "device" if devices > 1 else None
    parts = {name: FLAVOURS[name].sync(local) for name in names or FLAVOURS}
    steps = HOST_STEPS if scheduled == "host" else STEPS
    return run_together(parts, NODES, devices, execution, scheduled, steps=steps)


def share(devices: int) -> pytest.MarkDecorator:
    """Tests that share cached results run in one process."""
    return pytest.mark.xdist_group(f"gossip over {devices}")


def case(
    execution: str, scheduled: str, devices: int, names: tuple[str, ...] | None, *more: Any
) -> Any:
    return pytest.param(execution, scheduled, devices, names, marks=[share(devices), *more])


@pytest.mark.parametrize(
    ("execution", "scheduled", "devices", "names"),
    [
        case("vmap", "traced", 1, None),
        case("shard_map", "traced", 1, MAIN),
        case("shard_map_unchecked", "traced", 1, MAIN, pytest.mark.exhaustive),
        case("vmap", "host", 1, HOST, pytest.mark.exhaustive),
        case("pmap", "host", 1, HOST),
        case("vmap", "traced", 2, MAIN, pytest.mark.exhaustive),
        case("shard_map", "traced", 2, MAIN, pytest.mark.exhaustive),
        case("shard_map_unchecked", "host", 2, HOST),
    ],
)
def test_equal_to_the_oracle_and_to_each_other(execution, scheduled, devices, names):
    ours, _ = results(devices, execution, scheduled, names)
    for name in ours:
        check_oracle(ours, name, NODES, devices, **FLAVOURS[name].oracle())
    reference, _ = results(devices, "vmap", "traced", None if devices == 1 else MAIN)
    steps = len(ours[HOST[0]]["scalar"])
    same = {name: jax.tree.map(lambda x: x[:steps], reference[name]) for name in ours}
    # Half-precision leaves: compilers may round at other places, 2**-8 relative at a time.
    compare(ours, same, float32=1e-6, half=3e-2)


@pytest.mark.parametrize(
    ("execution", "scheduled", "pause"),
    [
        ("vmap", "traced", "array"),
        pytest.param("shard_map_unchecked", "host", "static", marks=pytest.mark.exhaustive),
    ],
)
def test_paused_updates(execution, scheduled, pause):
    """Update 3 exchanges nothing and does not rotate; slow step 4 is as if it had."""
    parts = {name: FLAVOURS[name].sync(None) for name in HOST}
    ours, state = run_together(
        parts, NODES, 1, execution, scheduled, steps=HOST_STEPS, paused={3}, pause=pause
    )
    for name in ours:
        check_oracle(ours, name, NODES, 1, paused={3}, **FLAVOURS[name].oracle())
    exchanges = {name: gossip_state(state[name]).exchanges for name in ours}
    assert np.array_equal(exchanges["irregular later"], [5] * NODES)
    assert np.array_equal(exchanges["slow even later"], [4] * NODES)
    assert np.array_equal(exchanges["slow inexact"], [5] * NODES)


@pytest.mark.parametrize("scheduled", SCHEDULES)
@pytest.mark.parametrize(("name", "skipped"), [("slow", {2}), ("slow inexact", {2, 4})])
def test_paused_slow_steps(scheduled, name, skipped):
    """With an exact average slow steps never gossip, so that nothing is skipped in them."""
    ours, _ = run_together(
        {name: FLAVOURS[name].sync(None)},
        NODES,
        1,
        "vmap",
        scheduled,
        paused={2, 4},
        skipped=skipped,
    )
    check_oracle(ours, name, NODES, 1, paused={2, 4}, **FLAVOURS[name].oracle())


@share(1)
def test_states_agree_between_executions():
    _, virtual = results(1, "vmap", "traced", None)
    _, devices = results(1, "shard_map", "traced", MAIN)
    virtual = {name: virtual[name] for name in MAIN}
    assert jax.tree.structure(virtual) == jax.tree.structure(devices)
    for a, b in zip(jax.tree.leaves(virtual), jax.tree.leaves(devices), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(
            np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=3e-2, atol=3e-2
        )


@pytest.mark.parametrize("order", [("node", "replica"), ("replica", "node")])
@pytest.mark.parametrize("check_vma", [True, False])
def test_nodes_of_several_axes_count_as_they_are_named(order, check_vma):
    axes = {"node": 2, "replica": 4}
    graph = js.topology.star(8, peers_per_step=1)
    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)

    def updated(tx, params):
        updates, state = tx.update(params, tx.init(params), params, phase=("round 1",))
        return params + updates, state.weight

    virtual = jax.vmap(functools.partial(updated, js.sgp("r", graph=graph)), axis_name="r")

    def per_device(params):
        return jax.tree.map(lambda v: v[None], updated(js.sgp(order, graph=graph), params[0]))

    mapped = jax.shard_map(
        per_device,
        mesh=js.make_mesh(axes),
        in_specs=P(order),
        out_specs=P(order),
        check_vma=check_vma,
    )
    expected, found = jax.jit(virtual)(x), jax.jit(mapped)(x)
    assert np.ptp(expected[1]) > 0.1
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
