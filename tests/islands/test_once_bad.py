"""What was bad once leaves no mark: on later rounds, on other islands, on who comes later."""

from typing import Any

import numpy as np
import optax
import pytest

import jaxslowmo as js
from islands.test_trust import NAN, SIZE, UNIT, life, moved, part
from islands.world import Process, World
from jaxslowmo.islands import IslandsError, _format
from jaxslowmo.islands._anchors import Anchor, Rules
from jaxslowmo.islands._format import (
    Manifest,
    PartCodec,
    RunSettings,
    leaf_descriptions,
    manifest_key,
    part_key,
)
from jaxslowmo.islands._optimizer import HostOptimizer
from jaxslowmo.islands._rounds import Rounds
from jaxslowmo.islands._store import RetryingStore

CODED = PartCodec(js.codecs.int8(block=SIZE), SIZE)
KEEPS_ONE: Any = {"snapshot_every": 1, "keep": 1}


def sleeps_before_reading(rounds: Rounds, seconds: float) -> None:
    """Let an island sleep once, between sending its part and reading the round's parts."""
    get, naps = rounds._store.get, [seconds]

    def slow(key: str, limit: int | None = None) -> bytes | None:
        if "/part-" in key and naps:
            rounds._clock.sleep(naps.pop())
        return get(key, limit)

    rounds._store.get = slow  # type: ignore[method-assign]


def repeat(count: int, ends: list[Anchor], by: np.ndarray = UNIT[0]) -> Any:
    def act(rounds: Rounds) -> None:
        for _ in range(count):
            moved(rounds, by)
        ends.append(rounds.anchor)

    return act


def test_a_part_with_nan_whose_round_was_cleaned_up_poisons_no_later_one():
    """Its author can't read whether it counted: the round is gone."""
    world, ends = World(lambda n: 0), list[Anchor]()

    def act(rounds: Rounds) -> None:
        sleeps_before_reading(rounds, 100.0)
        moved(rounds, NAN)
        assert rounds.anchor.round > 1
        assert rounds.residual is None or np.isfinite(rounds.residual).all()
        moved(rounds, UNIT[1])
        ends.append(rounds.anchor)

    life("a", world, repeat(6, []), part_codec=CODED, **KEEPS_ONE)
    _, said = life("b", world, act, part_codec=CODED, **KEEPS_ONE)
    world.run()
    assert ends[0].values[0][1] < -0.3
    assert any("not finite" in line for line in said)


def test_what_a_checkpoint_kept_of_a_codec_starts_anew_if_it_is_not_finite():
    world = World(lambda n: 0)

    def act(rounds: Rounds) -> None:
        rounds.resume(0, rounds.anchor.values, NAN)
        moved(rounds, UNIT[1])
        np.testing.assert_allclose(rounds.anchor.values[0], -UNIT[1], rtol=1e-2)

    life("a", world, act, part_codec=CODED)
    world.run()


@pytest.mark.parametrize("outer", [optax.sgd(4.0), optax.adamw(1.0)])
def test_an_outer_step_that_would_leave_the_range_of_float32_is_not_taken(outer):
    """It would end the run: Adam would never move again, for its second moment is infinite."""
    world, optimizer = World(lambda n: 0), HostOptimizer(outer, [UNIT[0]])

    def act(rounds: Rounds) -> None:
        before = rounds.anchor
        moved(rounds, np.float32(3e38) * UNIT[0])
        assert [x.tobytes() for x in (*rounds.anchor.values, *rounds.anchor.outer)] == [
            x.tobytes() for x in (*before.values, *before.outer)
        ]
        for _ in range(2):
            moved(rounds, UNIT[0])
        assert rounds.anchor.values[0][0] < -1.5
        assert rounds.anchor.round == 3

    _, said = life("a", world, act, optimizer=optimizer)
    world.run()
    assert sum("round 0: " in line and "not finite" in line for line in said) == 1


# The name of the process tells nothing of when it was there.
@pytest.mark.parametrize(("earlier", "own"), [(UNIT[3], UNIT[1]), (UNIT[1], NAN), (NAN, UNIT[1])])
def test_of_two_parts_of_one_island_the_newest_that_can_be_read_is_taken(earlier, own):
    world, ends = World(lambda n: 0), list[Anchor]()

    def act(rounds: Rounds) -> None:
        key = part_key(0, "b", "f" * 16)
        world.objects[key] = world.ever[key] = part(rounds.settings, "b", earlier)
        world.changed()
        moved(rounds, own)
        ends.append(rounds.anchor)

    life("b", world, act, quorum=2)
    life("a", world, repeat(1, ends), quorum=2)
    world.run()
    assert ends[0].digest == ends[1].digest
    np.testing.assert_allclose(ends[0].values[0], -(UNIT[0] + UNIT[1]) / 2)


def test_progress_is_not_dropped_for_an_earlier_part_that_did_not_count():
    world = World(lambda n: 0)

    def act(rounds: Rounds) -> None:
        key, name = part_key(0, "b", "0" * 16), manifest_key(0)
        world.objects[key] = part(rounds.settings, "b", NAN)
        world.objects[name] = Manifest(rounds.settings.run_id, 0, "b", [key]).dumps().encode()
        outcome = rounds.exchange([rounds.anchor.values[0] - UNIT[1]], 1.0, 1)
        assert outcome is not None
        np.testing.assert_array_equal(outcome.remainder, UNIT[1])

    life("b", world, act, late_share=1.0)
    world.run()


@pytest.mark.parametrize("counts", [True, False])
def test_a_checkpoint_is_dropped_for_an_earlier_part_only_if_that_counted(counts):
    world = World(lambda n: 0)

    def before(rounds: Rounds) -> None:
        moved(rounds, UNIT[3] if counts else NAN)

    def after(rounds: Rounds) -> None:
        outcome = rounds.resume(0, [-UNIT[1]])
        assert outcome is not None
        assert (outcome.remainder is None) == counts
        if outcome.remainder is not None:
            np.testing.assert_array_equal(outcome.remainder, UNIT[1])

    life("b", world, before, late_share=1.0)
    _, said = life("b", world, after, 50.0, late_share=1.0)
    world.run()
    assert any("has contributed" in line for line in said) == counts


@pytest.mark.parametrize("weight", [1e308, 5e-324])
def test_two_islands_of_any_equal_weights_make_their_mean_progress(weight):
    world, ends = World(lambda n: 0), list[Anchor]()

    def act(rounds: Rounds) -> None:
        by = UNIT[0] if rounds._rules.name == "a" else UNIT[1]
        rounds.exchange([rounds.anchor.values[0] - by], weight, 1)
        ends.append(rounds.anchor)

    for name in ("a", "b"):
        life(name, world, act, quorum=2)
    world.run()
    for end in ends:
        np.testing.assert_array_equal(end.values[0], -(UNIT[0] + UNIT[1]) / 2)


def test_a_round_that_was_cleaned_up_first_counts_for_merge():
    """The manifest lists the part, so the others have counted it."""
    world = World(lambda n: 0)

    def act(rounds: Rounds) -> None:
        sleeps_before_reading(rounds, 100.0)
        outcome = rounds.exchange([rounds.anchor.values[0] - UNIT[1]], 1.0, 1)
        assert outcome is not None
        assert (outcome.anchor.round > 1, outcome.is_counted) == (True, True)

    life("a", world, repeat(6, []), **KEEPS_ONE)
    life("b", world, act, **KEEPS_ONE)
    world.run()


def test_no_run_is_begun_where_rounds_lie_already():
    world = World(lambda n: 0)

    def act(rounds: Rounds) -> None:
        moved(rounds, UNIT[0])
        del world.objects["run.json"]

    life("a", world, act)
    world.run()
    before = dict(world.objects)
    life("b", world, lambda rounds: None)
    with pytest.raises(IslandsError, match=r"rounds of a run and no run.json"):
        world.run()
    assert world.objects == before


def test_headers_may_be_as_large_as_a_model_of_many_leaves_needs_and_no_larger(monkeypatch):
    names, world, ends = [f"{i:0180d}" for i in range(8000)], World(lambda n: 0), list[Anchor]()
    start = [np.full(1, i, np.float32) for i in range(8000)]
    optimizer = HostOptimizer(optax.sgd(1.0), start)
    agreed = RunSettings(
        "", "", "1", "None", optimizer.fingerprint, leaf_descriptions(names, [(1,)] * 8000)
    )

    def act(process: Any) -> None:
        store = RetryingStore(process, "memory://run", 5.0, process.clock, print)
        for _ in range(2):
            codec = PartCodec(None, 8000)
            rounds = Rounds(store, Rules("a"), optimizer, codec, agreed, print)
            rounds.join(start)
            ends.append(rounds.anchor)
        before = dict(world.objects)
        monkeypatch.setattr(_format, "MAX_HEADER", 100_000)
        with pytest.raises(ValueError, match=r"headers of at most 0.1 MB.*names"):
            Rounds(store, Rules("a"), optimizer, codec, agreed, print).join(start)
        assert world.objects == before

    Process(world, "a", act, 0.0)
    world.run()
    assert len(world.objects["run.json"]) > 1 << 20
    np.testing.assert_array_equal(ends[1].values, start)


def test_a_model_without_elements_is_named(tmp_path):
    island = js.islands.join(str(tmp_path), name="one", codec=js.codecs.int8())
    stacked: Any = {"w": np.zeros((2, 0, 3), np.float32)}
    none: Any = ()
    step: Any = np.zeros(2, np.int32)
    state = js.TrainState(step=step, params=stacked, opt_state=none, model_state={}, rng=none)
    with pytest.raises(ValueError, match="`state` has no parameters"):
        island.exchange(state)
