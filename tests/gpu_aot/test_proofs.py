"""Every algorithm compiled for a host of 8 H100s (8 replicas) and for four (4 replicas of 8).

Whole training steps, host-scheduled, from the programs that XLA compiles for GPUs: what travels
inside a host and between hosts, what runs beside it, how much memory it takes. Nothing runs here.
"""

import itertools

import pytest

from support.gpu_steps import (
    A100S,
    CASES,
    ONE_HOST,
    OVERLAPPED,
    PLACES,
    TABLE,
    each_of,
    facts,
    formula,
    group_of,
)
from support.steps_of_algorithms import (
    NUM_PRODUCTS,
    OPTION,
    SHARDED,
    check_bytes,
    check_memory_of_sharded_state,
    check_what_is_left_out,
    kinds,
)


@each_of(CASES)
def test_bytes_are_as_computed_and_local_steps_send_nothing_between_replicas(algorithm, place):
    """The schedule, which does not know of axes, says so too."""
    local = [kind for kind in kinds(algorithm, place) if kind == "local"]
    assert bool(local) == algorithm.startswith(("local_sgd", "diloco", "slowmo(local"))
    # Gradients and loss, inside of a host.
    inside = {} if place.num_groups == 1 else {"all-reduce": 1}
    for kind in kinds(algorithm, place):
        found = facts(algorithm, place, kind)
        check_bytes(found, formula(kind, place), place, "replica,device")
        transfers = [t.collective for t in found.schedule.transfers]
        assert found.schedule.in_branches == 0
        if kind in local:
            assert found.rows == () if place.num_groups == 1 else found.counts("device") == inside
            assert transfers == list(inside)
        else:
            assert len(transfers) > len(inside)


@each_of((algorithm, ONE_HOST) for algorithm in OVERLAPPED)
def test_overlapped_gossip_runs_beside_all_products(algorithm, place):
    (permute,) = facts(algorithm, place, "round 0").schedule.select("collective-permute")
    assert len(permute.products) == NUM_PRODUCTS


@each_of(itertools.product(["sgp overlap=0"], PLACES))
def test_gossip_without_overlap_runs_behind_all_products(algorithm, place):
    schedule = facts(algorithm, place, "round 0").schedule
    (permute,) = schedule.select("collective-permute")
    assert permute.start > schedule.products[-1].place


@each_of(itertools.product([*SHARDED, "slowmo(sgp overlap=1)"], PLACES))
def test_slow_step_is_a_true_reduce_scatter(algorithm, place):
    """One reduce-scatter, for which everything waits, and one all-gather, which is asynchronous."""
    found = facts(algorithm, place, "slow")
    assert found.counts("replica") == {"reduce-scatter": 1, "all-gather": 1}
    (scatter,) = found.schedule.select("reduce-scatter")
    if place.num_groups == 1:
        assert not found.schedule.select("all-reduce")
        (gather,) = found.schedule.select("all-gather")
        assert not gather.is_blocking
        assert gather.bytes == place.replicas * scatter.bytes


@each_of(itertools.product(SHARDED, PLACES))
def test_memory_of_sharded_state(algorithm, place):
    check_memory_of_sharded_state(facts, algorithm, place)


@pytest.mark.parametrize("place", [pytest.param(x, marks=group_of(x)) for x in PLACES])
def test_what_is_left_out(place):
    check_what_is_left_out(place)


@each_of([("sgp overlap=1", A100S)])
def test_on_a100s_nothing_overlaps_by_default(algorithm, place):
    """With the options the permute starts among the products: half of them run beside it.

    If this fails, compilers overlap by default: mend `docs/gpu.md`, which names the options.
    """
    (permute,) = facts(algorithm, place, "round 0").schedule.transfers
    assert permute.is_blocking
    (permute,) = facts(algorithm + OPTION, place, "round 0").schedule.transfers
    assert not permute.is_blocking
    assert 2 * len(permute.products) >= NUM_PRODUCTS


@pytest.mark.exhaustive
@pytest.mark.parametrize("place", [*PLACES, A100S], ids=lambda place: place.name)
def test_documented_table(place):
    """`gpu_programs.md` has the table that `python benchmarks/gpu_proofs.py` prints now."""
    TABLE.check_documented(place)
