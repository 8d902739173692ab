"""Every algorithm compiled for v5e:2x4 (8 replicas) and for 4 slices of v5e:4x4 (4 replicas of 16).

Whole training steps, host-scheduled, from the program of the TPU compiler: what travels inside a
slice and between slices, what runs beside it, how much memory it takes. Nothing runs here.
"""

import itertools
from collections.abc import Iterable

import pytest

from support.steps_of_algorithms import (
    SHARDED,
    Place,
    check_bytes,
    check_memory_of_sharded_state,
    check_what_is_left_out,
    kinds,
)
from support.table_of_steps import formula_kind
from support.tpu_steps import CASES, FOUR_SLICES, NUM_BUCKETS, ONE_SLICE, PLACES, TABLE, facts

# Between slices in `make test-exhaustive` alone: parts of others, or as inside of a slice.
SELDOM = ("local_sgd", "sgp overlap=0", "slowmo(local_sgd)")


def at(place: Place) -> pytest.MarkDecorator:
    """Tests at one place share its compiled programs."""
    return pytest.mark.xdist_group(f"proofs on {place.name}")


def each_of(cases: Iterable[tuple[str, Place]]) -> pytest.MarkDecorator:
    parameters = []
    for algorithm, place in cases:
        seldom = place is FOUR_SLICES and (algorithm in SELDOM or "unsharded" in algorithm)
        marks = [at(place), *([pytest.mark.exhaustive] if seldom else [])]
        parameters.append(
            pytest.param(algorithm, place, marks=marks, id=f"{algorithm} on {place.name}")
        )
    return pytest.mark.parametrize(("algorithm", "place"), parameters)


@each_of(CASES)
def test_bytes_are_as_computed_and_local_steps_send_nothing_between_replicas(algorithm, place):
    """On several slices no transfer leaves the slice. The text of the program says so too."""
    local = [kind for kind in kinds(algorithm, place) if kind == "local"]
    assert bool(local) == (algorithm.startswith(("local_sgd", "diloco", "slowmo(local")))
    for kind in kinds(algorithm, place):
        found = facts(algorithm, place, kind)
        # Parts of an all-reduce over both levels are the compiler's.
        if (kind, place) != ("every", FOUR_SLICES):
            check_bytes(found, formula_kind(kind), place)
        crossing = [word for word in (" send(", " recv(", "megascale") if word in found.text]
        if kind in local:
            assert found.counts("replica") == {}
            assert not crossing
            inside = {} if place is ONE_SLICE else {"all-reduce": 1}  # gradients and loss
            assert found.counts("device") == inside
        else:  # so the words are the right ones
            assert found.counts("replica") != {}
            assert bool(crossing) == (place is FOUR_SLICES)


@each_of(itertools.product(["sgp overlap=0", "sgp overlap=1", "slowmo(sgp overlap=1)"], PLACES))
def test_gossip_runs_beside_all_products_or_behind_them(algorithm, place):
    schedule = facts(algorithm, place, "round 0").schedule
    assert len(schedule.starts) == 1
    overlaps = algorithm != "sgp overlap=0"
    assert (schedule.runs_beside, schedule.runs_behind) == (overlaps, not overlaps)
    assert schedule.num_under_way == (len(schedule.products) if overlaps else 0)


@at(FOUR_SLICES)
def test_buckets_between_slices_overlap_with_an_option():
    """By default no bucket travels before all products are done; kept apart, the first one does.

    Inside the slice the compiler makes one all-reduce of them, for which all others wait.
    """
    merged = facts("all_reduce", FOUR_SLICES, "every")
    assert merged.counts("device")["all-reduce"] == 1
    assert merged.schedule.num_under_way == 0
    assert merged.schedule.runs_behind
    apart = facts("all_reduce, option", FOUR_SLICES, "every")
    assert apart.counts("device")["all-reduce"] == NUM_BUCKETS + 1  # and the loss
    assert apart.schedule.num_under_way >= 2
    assert min(apart.schedule.starts) < apart.schedule.products[-1]


@each_of(itertools.product([*SHARDED, "slowmo(sgp overlap=1)"], PLACES))
def test_slow_step_is_a_true_reduce_scatter(algorithm, place):
    found = facts(algorithm, place, "slow")
    if place is ONE_SLICE:
        # Small leaves share one of each; two large ones are sent as they lie.
        assert found.counts("replica") == {"reduce-scatter": 3, "all-gather": 3}
        return
    assert found.counts("replica") == {"send": 2, "recv": 2}
    transfers = {
        name for name in ("REDUCE_SCATTER", "ALL_GATHER", "ALL_REDUCE") if name in found.text
    }
    assert transfers == {"REDUCE_SCATTER", "ALL_GATHER"}


@each_of(itertools.product(SHARDED, PLACES))
def test_memory_of_sharded_state(algorithm, place):
    check_memory_of_sharded_state(facts, algorithm, place)


@pytest.mark.parametrize("place", [pytest.param(place, marks=at(place)) for place in PLACES])
def test_what_is_left_out(place):
    check_what_is_left_out(place)


@pytest.mark.exhaustive
@pytest.mark.parametrize("place", [pytest.param(place, marks=at(place)) for place in PLACES])
def test_documented_table(place):
    """`tpu_programs.md` has the table that `python benchmarks/tpu_proofs.py` prints now."""
    TABLE.check_documented(place)
