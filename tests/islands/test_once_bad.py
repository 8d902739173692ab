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
    PartCodec,
    RunSettings,
    leaf_descriptions,
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

    _, said = life("a", world, act, part_codec=CODED)
    world.run()
    assert any("not finite" in line for line in said)


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


@pytest.mark.parametrize(("earlier", "kind"), [("0" * 16, "healthy"), ("f" * 16, "damaged")])
def test_of_two_parts_of_one_island_the_newest_that_can_be_read_is_taken(earlier, kind):
    world, ends = World(lambda n: 0), list[Anchor]()

    def act(rounds: Rounds) -> None:
        data = part(rounds.settings, "b", UNIT[3])
        data = data[:-1] + b"\x01" if kind == "damaged" else data
        key = part_key(0, "b", earlier)
        world.objects[key] = world.ever[key] = data
        world.changed()
        moved(rounds, UNIT[1])
        ends.append(rounds.anchor)

    _, said = life("b", world, act, quorum=2)
    life("a", world, repeat(1, ends), quorum=2)
    world.run()
    assert ends[0].digest == ends[1].digest
    np.testing.assert_allclose(ends[0].values[0], -(UNIT[0] + UNIT[1]) / 2)
    assert not any("earlier process" in line for line in said)


def test_of_two_parts_of_one_island_an_older_one_is_taken_if_the_newest_is_damaged():
    world, ends = World(lambda n: 0), list[Anchor]()

    def first(rounds: Rounds) -> None:
        rounds._send_part(UNIT[1], 1.0, 1)

    def second(rounds: Rounds) -> None:
        rounds._send_part(NAN, 1.0, 1)

    life("b", world, first, quorum=2)
    life("b", world, second, 2.0, quorum=2)
    life("a", world, repeat(1, ends), 6.0, quorum=2)
    world.run()
    np.testing.assert_allclose(ends[0].values[0], -(UNIT[0] + UNIT[1]) / 2)


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


def test_the_author_of_a_part_that_was_damaged_leaves_it_out_like_the_others():
    world, ends = World(lambda n: 0), list[Anchor]()

    def act(rounds: Rounds) -> None:
        put = rounds._store.put

        def damaging(key: str, data: bytes) -> None:
            put(key, data)
            if "00000000/part-" in key:
                world.objects[key] = data[:-1] + b"\xff"

        rounds._store.put = damaging  # type: ignore[method-assign]
        moved(rounds, UNIT[1])
        assert rounds.anchor.values[0][1] == 0
        moved(rounds, UNIT[2])
        ends.append(rounds.anchor)

    _, said = life("a", world, act, quorum=2, late_share=1.0)
    life("b", world, repeat(2, ends), quorum=2)
    world.run()
    assert ends[0].digest == ends[1].digest
    np.testing.assert_allclose(ends[0].values[0], -1.5 * UNIT[0] - UNIT[2] / 2)
    assert sum("part of a is left out" in line for line in said) == 1


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


def named_rounds(process: Any, names: list[str]) -> Rounds:
    """Return the rounds of a model with one number of each name."""
    shapes = [(1,)] * len(names)
    optimizer = HostOptimizer(optax.sgd(1.0), [np.zeros(shape, np.float32) for shape in shapes])
    quiet = lambda line: None  # noqa: E731
    store = RetryingStore(process, "memory://run", 5.0, process.clock, quiet)
    agreed = RunSettings(
        "", "", "1", "None", optimizer.fingerprint, leaf_descriptions(names, shapes)
    )
    part_codec = PartCodec(None, len(names))
    return Rounds(store, Rules("a"), optimizer, part_codec, agreed, quiet)


def test_a_model_of_many_leaves_is_read_as_it_was_written():
    names = [f"{'block/' * 20}{i}/{'kernel' * 5}" for i in range(8000)]
    start, ends = [np.full(1, i, np.float32) for i in range(8000)], []
    world = World(lambda n: 0)

    def act(process: Any) -> None:
        for _ in range(2):
            rounds = named_rounds(process, names)
            rounds.join(start)
            ends.append(rounds.anchor)

    Process(world, "a", act, 0.0)
    world.run()
    assert len(world.objects["run.json"]) > 1 << 20
    assert ends[0].digest == ends[1].digest
    np.testing.assert_array_equal(ends[1].values, start)


def test_a_model_of_more_names_than_headers_hold_is_refused_before_anything_is_written(monkeypatch):
    monkeypatch.setattr(_format, "MAX_HEADER", 100_000)
    names, world = [f"{i:0200d}" for i in range(400)], World(lambda n: 0)

    def act(process: Any) -> None:
        with pytest.raises(ValueError, match=r"headers of at most 0.1 MB.*names"):
            named_rounds(process, names).join([np.zeros(1, np.float32)] * 400)

    Process(world, "a", act, 0.0)
    world.run()
    assert not world.objects


def test_a_model_without_elements_is_named(tmp_path):
    island = js.islands.join(str(tmp_path), name="one", codec=js.codecs.int8())
    stacked: Any = {"w": np.zeros((2, 0, 3), np.float32)}
    none: Any = ()
    step: Any = np.zeros(2, np.int32)
    state = js.TrainState(step=step, params=stacked, opt_state=none, model_state={}, rng=none)
    with pytest.raises(ValueError, match="`state` has no parameters"):
        island.exchange(state)
