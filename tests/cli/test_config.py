"""Configurations, what is built from them, and numbers as text."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxslowmo.cli._algorithms import build_algorithm, learning_rate_schedule
from jaxslowmo.cli._bytes import ByteLedger
from jaxslowmo.cli._config import (
    ALGORITHMS,
    PRESET_DEFAULTS,
    CompareConfig,
    OptimizerConfig,
    flat_fields,
    train_config,
)
from jaxslowmo.cli._units import format_bytes, format_count, format_loss
from jaxslowmo.models import GPT_PRESETS


def test_every_preset_has_defaults_that_are_valid():
    assert set(PRESET_DEFAULTS) == set(GPT_PRESETS)
    for preset in PRESET_DEFAULTS:
        assert train_config({"preset": preset}).preset == preset
    named = {name for values in PRESET_DEFAULTS.values() for name in values}
    assert named <= set(flat_fields())


def test_what_is_given_goes_before_the_preset_and_that_before_the_defaults():
    config = train_config({"preset": "demo", "steps": 77, "batch": None})
    assert config.steps == 77
    assert config.batch == PRESET_DEFAULTS["demo"]["batch"]
    assert config.replicas == flat_fields()["replicas"][1].default
    assert config.optimizer.warmup == 7  # a tenth, since the preset's is for its own steps
    assert train_config({"steps": 1}).optimizer.warmup == 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.steps = 3  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(("kind", "end"), [("cosine", 0.1), ("constant", 1.0)])
def test_schedules_warm_up_from_zero(kind, end):
    config = OptimizerConfig(learning_rate=2.0, warmup=4, schedule=kind)
    schedule = learning_rate_schedule(config, 20)
    np.testing.assert_allclose([schedule(t) for t in (0, 2, 4, 20)], [0, 1, 2, 2 * end])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_algorithms_exchange_gradients_or_parameters(algorithm):
    built = build_algorithm(train_config({"algorithm": algorithm, "replicas": 2}))
    assert (built.gradients is None) != (built.sync is None)
    if built.sync is not None:
        last = {"local_sgd": ("average",), "sgp": ("round 0",)}.get(algorithm, ("slow",))
        due = {48: last, 47: ("round 0",) if "sgp" in algorithm else ()}
        sync = built.sync.sized({"replica": 2})
        assert {t: sync.phase(t) for t in due} == due


@pytest.mark.parametrize(("mib", "buckets"), [(25, 1), (0.01, 2), (0, 5)])
def test_gradients_travel_in_buckets_of_the_size_that_is_asked_for(mib, buckets, mesh_of):
    """Last leaf first: four of 4 KiB, then one of 1 MiB; the first bucket obeys as well."""
    given = {"algorithm": "all_reduce", "replicas": 2, "bucket_mib": mib}
    gradients = build_algorithm(train_config(given)).gradients
    assert gradients is not None
    tree = [np.zeros(2**18, np.float32), *[np.zeros(2**10, np.float32)] * 4]
    exchange = jax.shard_map(
        lambda g: gradients.update(jax.lax.pcast(g, "replica", to="varying"), gradients.init(g))[0],
        mesh=mesh_of({"replica": 2}),
        in_specs=jax.sharding.PartitionSpec(),
        out_specs=jax.sharding.PartitionSpec(),
    )
    assert jax.jit(exchange).lower(tree).as_text().count("stablehlo.all_reduce") == buckets


@pytest.mark.parametrize("mib", [-1, float("nan"), float("inf")])
def test_a_bucket_size_that_is_none_is_refused(mib):
    with pytest.raises(ValueError, match="--bucket-mib must be "):
        train_config({"bucket_mib": mib})


def test_gossip_is_built_as_configured():
    given = {
        "algorithm": "sgp",
        "graph": "ring",
        "peers_per_step": 2,
        "mixing": "self_weighted:0.5",
    }
    sync = build_algorithm(train_config(given)).sync
    assert sync is not None
    params = np.arange(4.0, dtype=np.float32)

    def update(p):
        return sync.update(np.zeros((), np.float32), sync.init(p), p)[0]

    moved = jax.vmap(update, axis_name="replica")(params)
    # Half of its own value, a quarter of each neighbour's on the ring.
    np.testing.assert_allclose(params + moved, [1, 1, 2, 2])


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ("sgp", {}),
        ("sgp+overlap=1", {"overlap": 1}),
        ("sgp+peers-per-step=2+graph=ring", {"peers_per_step": 2, "graph": "ring"}),
        ("slowmo+slow_momentum=0.1+nesterov=true", {"slow_momentum": 0.1, "nesterov": True}),
        ("sgp+mixing=self_weighted:0.7", {"mixing": "self_weighted:0.7"}),
    ],
)
def test_algorithms_of_a_comparison_bring_settings(algorithm, expected):
    config = CompareConfig(train_config({}), algorithms=("all_reduce", algorithm), seeds=(0,))
    chosen = config.run(algorithm, 0).algorithm
    assert chosen.algorithm == algorithm.partition("+")[0]
    assert {name: getattr(chosen, name) for name in expected} == expected
    assert config.run("all_reduce", 0).algorithm.overlap == 0


def test_bytes_of_events_that_no_kind_holds_together_add_up():
    ledger = ByteLedger({"local": 1, "average": 11, "slow": 101})
    assert [ledger.add(p) for p in ((), ("average",), ("average", "slow"))] == [1, 12, 123]
    assert ByteLedger({"every": 5}).add(()) == 5
    joined = ByteLedger({"local": 0, "average": 10, "slow": 100, "average+slow": 105})
    assert joined.add(("slow", "average")) == 105


def test_numbers_have_three_digits():
    assert [format_bytes(n) for n in (0, 999, 1000, 56_463_360, 999_700_000)] == [
        "0 B", "999 B", "1.00 kB", "56.5 MB", "1.00 GB",
    ]  # fmt: skip
    assert [format_count(n) for n in (12, 470_528, 1_073_536)] == ["12", "471k", "1.07M"]
    assert [format_loss(x) for x in (2.4164, None, float("nan"))] == ["2.416", "-", "-"]
