"""Every algorithm compiled for v5e:2x4 (8 replicas) and for 4 slices of v5e:4x4 (4 replicas of 16).

Whole training steps, host-scheduled, from the program of the TPU compiler: what travels inside a
slice and between slices, what runs beside it, how much memory it takes. Nothing runs here.
"""

import itertools
from collections.abc import Iterable

import pytest

from support.bytes_of_steps import PADDED_TO, bytes_sent
from support.steps_of_algorithms import (
    NUM_PARAMETERS,
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


def places(*between: pytest.MarkDecorator) -> pytest.MarkDecorator:
    """Both places, that of four slices with more marks."""
    four = pytest.param(FOUR_SLICES, marks=[at(FOUR_SLICES), *between], id=FOUR_SLICES.name)
    one = pytest.param(ONE_SLICE, marks=at(ONE_SLICE), id=ONE_SLICE.name)
    return pytest.mark.parametrize("place", [one, four])


each_case = each_of(CASES)


@each_case
def test_bytes_are_as_computed(algorithm, place):
    for kind in kinds(algorithm, place):
        # Parts of an all-reduce over both levels are the compiler's: the next test.
        if (kind, place) != ("every", FOUR_SLICES):
            check_bytes(facts(algorithm, place, kind), formula_kind(kind), place)


@at(FOUR_SLICES)
@pytest.mark.parametrize("algorithm", ["all_reduce", "all_reduce, option"])
def test_bytes_of_an_all_reduce_over_both_levels(algorithm):
    """Between slices each chip sends its part, padded by at most 8 KiB in each bucket.

    Inside, the compiler scatters by an all-reduce and a slice: 1.5 times the bytes that are needed.
    """
    found = facts(algorithm, FOUR_SLICES, "every")
    ideal = bytes_sent("every", NUM_PARAMETERS, 4, 16, with_padding=False)
    assert found.counts("replica") == {"send": NUM_BUCKETS, "recv": NUM_BUCKETS}
    assert (
        0 <= found.bytes_sent("replica") - ideal.replica <= 2 * 3 / 4 * NUM_BUCKETS * 4 * PADDED_TO
    )
    assert found.bytes_sent("device") == pytest.approx(1.5 * ideal.device, rel=0.03)


@each_case
def test_local_steps_send_nothing_between_replicas(algorithm, place):
    """On several slices: no transfer leaves the slice. The text of the program says so too."""
    local = [kind for kind in kinds(algorithm, place) if kind == "local"]
    assert bool(local) == (algorithm.startswith(("local_sgd", "diloco", "slowmo(local")))
    for kind in kinds(algorithm, place):
        found = facts(algorithm, place, kind)
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


@places()
def test_what_is_left_out(place):
    check_what_is_left_out(place)


@places(pytest.mark.exhaustive)
def test_documented_table(place):
    """`tpu_programs.md` has the table that `python benchmarks/tpu_proofs.py` prints now."""
    TABLE.check_documented(place)
