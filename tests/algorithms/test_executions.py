"""Every algorithm in every execution gives what NumPy gives, and so all executions agree."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

import jaxslowmo as js
from support import oracle
from support.places import drawn
from support.side_by_side import RATES, check_oracle, run_together, schedule
from support.transforms import IRREGULAR

NODES = 4
UNEVEN = js.topology.self_weighted([0.3, 0.5, 0.65, 0.4])


class Case(NamedTuple):
    """A base, what the oracle is told of it, and the slow step over it; DiLoCo without a base."""

    base: Callable[..., js.ParameterTransform] | None
    of_base: dict[str, Any]
    slow: oracle.Outer | None = None
    options: dict[str, Any] | None = None

    def sync(self, local: str | None) -> js.ParameterTransform:
        options = {"local_axis_name": local}
        slow, base = self.slow, None
        if self.base is not None:
            base = self.base(**options).bound({"replica": NODES})
        if slow is None:
            return base
        options = {"sync_every": slow.every, **(self.options or {}), **options}
        if base is None:
            return js.diloco("replica", **options)
        return js.slowmo(
            "replica",
            base=base,
            momentum=slow.momentum,
            slow_learning_rate=slow.rate,
            nesterov=slow.nesterov,
            exact_average=slow.exact,
            learning_rate=schedule,
            **options,
        )

    def oracle(self) -> dict[str, Any]:
        return {**self.of_base, "outer": self.slow}


def average(**options):
    return functools.partial(js.local_sgd, "replica", sync_every=2, **options), {"average_every": 2}


def gossip(graph=None, mixing=None, overlap=0, **options):
    make = js.topology.npeer_directed_exponential if graph is None else graph
    made = make if isinstance(make, js.topology.Graph) else make(NODES)
    matrices = [js.topology.mixing_matrix(made, mixing, r) for r in range(made.num_rounds)]
    base = functools.partial(
        js.sgp, "replica", graph=graph, mixing=mixing, overlap=overlap, **options
    )
    return base, {"gossip": oracle.Gossip(matrices, overlap)}


def pairs(pull=None, **options):
    graph = js.topology.random_matching(NODES, seed=3)
    matrices = [js.topology.mixing_matrix(graph, None, r) for r in range(graph.num_rounds)]
    base = functools.partial(js.noloco, "replica", sync_every=2, graph=graph, pull=pull, **options)
    return base, {"other": oracle.Pairs(matrices, 2, 0.5, 0.7, 0.7 if pull is None else pull)}


def sample(every, share=0.2, **options):
    base = functools.partial(js.sparta, "replica", sync_every=every, share=share, **options)
    seed = options.get("seed", 0)
    places = functools.partial(drawn, block=round(1 / share), seed=seed)
    return base, {"other": oracle.Sample(places, every)}


def slow(momentum=0.5, **options):
    return oracle.Outer(4, momentum, gamma=lambda t: RATES[t], **options)


RING = js.topology.ring(NODES, peers_per_step=2)
CASES = {
    "local_sgd": Case(*average(bucket_bytes=64)),
    "slowmo": Case(*average(), slow()),
    "slowmo inexact": Case(*average(), slow(exact=False)),
    "diloco": Case(None, {}, oracle.Outer(4, 0.9, 0.7, nesterov=True)),
    "noloco with a pull": Case(*pairs(0.9, bucket_bytes=64)),
    "sparta": Case(*sample(1, bucket_bytes=64)),
    "sgp ring": Case(*gossip(RING, push_sum=False, bucket_bytes=64)),
    "sgp irregular later": Case(*gossip(IRREGULAR, UNEVEN, overlap=3)),
    "slow late": Case(*gossip(overlap=1, bucket_bytes=64), slow()),
    "slow irregular whole": Case(
        *gossip(IRREGULAR, UNEVEN, overlap=2), slow(), {"shard_state": False}
    ),
    "slow star nesterov": Case(
        *gossip(js.topology.star, overlap=2), slow(0.8, rate=0.7, nesterov=True)
    ),
    "slow gossip inexact later": Case(*gossip(IRREGULAR, UNEVEN, overlap=3), slow(exact=False)),
}
ALL = tuple(CASES)
MAIN = (
    "slowmo inexact",
    "noloco with a pull",
    "sparta",
    "sgp irregular later",
    "slow irregular whole",
)
# One program per phase: fewer chains, and steps enough for a slow one and what follows.
HOST = ("slowmo", "slow late", "slow gossip inexact later", "noloco with a pull")
HOST_STEPS = 6


@pytest.mark.parametrize(
    ("names", "devices", "execution", "scheduled"),
    [
        (ALL, 1, "vmap", "traced"),
        (HOST[:2], 1, "pmap", "host"),
        (MAIN, 2, "shard_map", "traced"),
        (HOST[2:], 2, "shard_map_unchecked", "host"),
    ],
)
def test_equal_to_the_oracle(names, devices, execution, scheduled):
    parts = {name: CASES[name].sync("device" if devices > 1 else None) for name in names}
    steps = {"steps": HOST_STEPS} if scheduled == "host" else {}
    ours = run_together(parts, NODES, devices, execution, scheduled, **steps)
    for name in names:
        check_oracle(ours, name, NODES, devices, **CASES[name].oracle())
