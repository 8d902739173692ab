"""Whatever a store and islands do to each other: one run, each part once, the same bits for all."""

import itertools
import math
import random
import re
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import optax
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import jaxslowmo as js
from islands.world import Died, Process, World
from jaxslowmo.islands import _rounds
from jaxslowmo.islands._anchors import Anchor, Rules
from jaxslowmo.islands._format import (
    Manifest,
    PartCodec,
    PartHeader,
    RunSettings,
    manifest_key,
    parse_arrays,
    parse_header,
)
from jaxslowmo.islands._optimizer import HostOptimizer
from jaxslowmo.islands._rounds import Outcome, Rounds
from jaxslowmo.islands._store import RetryingStore, StoreError

SIZE, PLACES = 64, 48
ROUNDING = 1e-5  # what is left of a difference of parameters
PATIENCE, DEADLINE, LONGEST_PAUSE = 3.0, 8.0, 2.0
OPTIMIZER = HostOptimizer(optax.sgd(0.5, momentum=0.5, nesterov=True), [np.zeros(SIZE, np.float32)])
PART_CODECS = {None: PartCodec(None, SIZE), "int4": PartCodec(js.codecs.int4(block=SIZE), SIZE)}
# Each displacement is one of these, at a place of its own; a codec loses some of it.
UNITS = np.resize(np.array([1, 0.375, 0.75], np.float32), PLACES)
CALM, SLOW, BAD = {}, {"delay": 10}, {"fails": 8, "times out": 8, "delay": 5, "outage": 1, "cut": 1}
DEADLY = {**BAD, "dies": 2, "dies after": 3, "silent": 1}
SOUND = {"damages": 0, "loses": 0}
SPOILED = {"damages": 4, "loses": 4}


# What an example is about.
SETTINGS = st.builds(
    SimpleNamespace,
    islands=st.sampled_from([3, 2, 1, 3]),
    quorum=st.integers(1, 3),
    late_share=st.sampled_from([1.0, 0.0, 0.5, 1.0]),
    snapshot_every=st.integers(1, 3),
    keep=st.sampled_from([None, 1, 2]),
    codec=st.sampled_from([None, "int4"]),
    trouble=st.sampled_from([CALM, SLOW, BAD, DEADLY, {**BAD, "silent": 2}]),
    spoils=st.sampled_from([SOUND, SPOILED]),
    nan=st.sampled_from([0, 10]),  # percent of an island's parts
)


class Saved(NamedTuple):
    """What a checkpoint of an island holds."""

    round: int
    values: np.ndarray
    lost: np.ndarray | None


class Example:
    """A run of some islands, from start to end.

    Args:
      setting: what they do.
      seed: of all choices.
      limit: how many choices are random; the others are harmless.
    """

    def __init__(self, setting: SimpleNamespace, seed: int, limit: int) -> None:
        self.setting, self.random, self.limit = setting, random.Random(seed), limit
        self.quorum = min(setting.quorum, setting.islands)
        self.part_codec = PART_CODECS[setting.codec]
        self.world = World(self.choose)
        self.world.trouble, self.world.spoils = dict(setting.trouble), dict(setting.spoils)
        self.places = iter(range(PLACES))
        self.displaced = np.zeros(PLACES, np.float32)
        self.seen: set[tuple[int, str]] = set()
        self.saved: dict[str, Saved] = {}
        self.lost: dict[str, np.ndarray | None] = {}
        self.busy, self.deaths, self.nans = setting.islands, 0, 0
        for i in range(setting.islands):
            Process(self.world, f"i{i}", self.life, (0.0, 0.1, 6.0, 30.0)[self.choose(4)])

    def choose(self, n: int) -> int:
        """Return a number in [0, n)."""
        self.limit -= 1
        return self.random.randrange(n) if self.limit >= 0 else 0

    def rounds(self, process: Process) -> Rounds:
        """Return the rounds of a process that begins."""
        store = RetryingStore(process, "memory://run", PATIENCE, process.clock, lambda line: None)
        wanted = self.setting
        rules = Rules(
            process.island, self.quorum, DEADLINE, wanted.late_share, wanted.snapshot_every,
            wanted.keep,
        )  # fmt: skip
        agreed = RunSettings(
            "", "", "1", self.setting.codec or "None", OPTIMIZER.fingerprint, [f"w[{SIZE}]"], 1e300
        )
        return Rounds(store, rules, OPTIMIZER, self.part_codec, agreed, lambda line: None)

    def life(self, process: Process) -> None:
        """Join, train and exchange; if the process dies, begin another one later."""
        try:
            self.train(process)
        except Died:
            if not process.is_ended:
                self.deaths += 1
                if self.deaths == 4:
                    self.world.trouble = dict(BAD)
                start = self.world.time + (1.0, 9.0, 40.0, 0.1)[self.choose(4)]
                Process(self.world, process.island, self.life, start)
            raise

    def train(self, process: Process) -> None:
        """Train for some periods, and then serve the others until all progress is counted."""
        name, rounds = process.island, self.rounds(process)
        saved = self.saved.get(name) if self.choose(2) else None
        rest = np.zeros(SIZE, np.float32)
        while True:
            try:
                rounds.join([start_of(name)])
                if saved is not None:
                    outcome = rounds.resume(saved.round, [saved.values], saved.lost)
                    own = rounds.anchor.values[0] - saved.values
                    rest = own if outcome is None else self.rest_of(outcome)
                break
            except StoreError:
                process.sleep(1.0)
        self.seen.add((rounds.anchor.round, rounds.anchor.digest))
        for _ in range(1 + self.choose(5)):
            process.sleep((3.0, 0.2, 7.0, 15.0)[self.choose(4)])
            place = next(self.places, None)
            if place is not None:
                rest[place] = self.displaced[place] = UNITS[place]
                # Places of all islands, where the order of a sum tells in the last bit.
                rest[PLACES:-1] += [self.random.random() / 4 for _ in rest[PLACES:-1]]
            if self.choose(100) >= 100 - self.setting.nan:
                rest[PLACES] = (np.nan, np.inf)[self.choose(2)]
                self.nans += 1
            if self.choose(3):
                values = rounds.anchor.values[0] - rest
                self.saved[name] = Saved(rounds.anchor.round, values, rounds.residual)
            rest = self.exchange(process, rounds, rest)
        self.busy -= 1
        while True:
            if not self.busy:
                self.world.trouble, self.world.spoils = {}, dict(SOUND)
            process.sleep(1.0 + self.choose(3))
            process.is_quiet, number = False, rounds.anchor.round
            rest = self.exchange(process, rounds, rest)
            is_left = rounds._pending_part is not None or np.any(np.abs(rest) > ROUNDING)
            process.is_quiet = number < rounds.anchor.round and not is_left

    def exchange(self, process: Process, rounds: Rounds, rest: np.ndarray) -> np.ndarray:
        """Exchange, and return the displacement from the new anchor."""
        world, number, start = self.world, rounds.anchor.round, self.world.time
        store_time, process.exchanging_since = process.store_time, start
        weight = 2.0 if process.island == "i1" else 1.0
        outcome = rounds.exchange([rounds.anchor.values[0] - rest], weight, number)
        self.lost[process.island] = rounds.residual
        waited = world.time - start - (process.store_time - store_time)
        times = sorted(t for (k, _), t in world.part_times.items() if k == number)
        possible = times[self.quorum - 1] if len(times) >= self.quorum else math.inf
        # Some listings are old ones, so it may look a few times more.
        most = max(DEADLINE, possible - start) + 6 * LONGEST_PAUSE
        most += len(world.lost) * (DEADLINE + 2 * LONGEST_PAUSE)  # it waits for each of them
        assert waited <= most, f"{process.island} waited for {waited:.1f} s in round {number}"
        assert rounds.residual is None or np.isfinite(rounds.residual).all()
        if outcome is None:
            assert rounds.anchor.round == number
            return rest
        assert outcome.remainder is None or np.isfinite(outcome.remainder).all()
        self.seen.add((outcome.anchor.round, outcome.anchor.digest))
        return self.rest_of(outcome)

    def rest_of(self, outcome: Outcome) -> np.ndarray:
        """Return what an island keeps."""
        return np.zeros(SIZE, np.float32) if outcome.remainder is None else outcome.remainder.copy()

    def check(self) -> None:
        """Raise `AssertionError` for whatever must not be."""
        anchors, total, times = self.by_hand()
        for number, digest in self.seen:
            assert anchors[number].digest == digest, f"two anchors of round {number}"
        self.check_newcomers(anchors[-1])
        if self.setting.codec is None:
            assert times.max() <= 1, f"counted twice: {np.flatnonzero(times > 1)}"
        else:  # what was rounded up is corrected in the next part
            assert (total <= 1.25 * UNITS + 0.15).all(), f"counted twice: {total / UNITS}"
        bad = self.deaths or self.nans or self.world.lost or self.world.damaged
        if self.setting.late_share == 1 and not bad:
            lost = sum((x[:PLACES] for x in self.lost.values() if x is not None), np.zeros(PLACES))
            np.testing.assert_allclose(total + lost, self.displaced, atol=1e-5)

    def by_hand(self) -> tuple[list[Anchor], np.ndarray, np.ndarray]:
        """Return the anchors of all rounds, from what was ever written.

        Returns:
          anchors: those of all rounds.
          total: (PLACES,) float32: the sum of all displacements that were counted.
          times: (PLACES,) int: in how many parts each place was not 0.
        """
        ever = self.world.ever
        run = RunSettings.loads(ever["run.json"])
        firsts = [
            Anchor(0, [x], OPTIMIZER.init([x]))
            for x in map(start_of, (f"i{i}" for i in range(self.setting.islands)))
        ]
        (first,) = (x for x in firsts if x.digest == run.digest)
        anchors, before = [first], set[str]()
        total, times = np.zeros(PLACES, np.float32), np.zeros(PLACES, int)
        while (key := manifest_key(number := len(anchors) - 1)) in ever:
            manifest = Manifest.loads(ever[key])
            listed: list[Any] = [parse_header(ever[part], PartHeader) for part in manifest.parts]
            islands = {x.island for x in listed}
            assert len(islands) == len(listed) >= self.quorum
            assert manifest.author in islands
            is_early = not before <= islands and self.world.closed_after[number] < DEADLINE - 1e-6
            assert not is_early, f"round {number} closed without {before - islands}, too early"
            before = islands
            found = [x for x in manifest.parts if x not in self.world.lost | self.world.damaged]
            payloads = [parse_arrays(ever[x], self.part_codec.shapes)[0] for x in found]
            parts = [self.part_codec.decode(x) for x in payloads]
            is_good = [bool(np.isfinite(x).all()) for x in parts]
            heads: list[Any] = [
                parse_header(ever[x], PartHeader) for x in itertools.compress(found, is_good)
            ]
            parts = list(itertools.compress(parts, is_good))
            if not parts:
                anchors.append(Anchor(number + 1, anchors[-1].values, anchors[-1].outer))
                continue
            whole = sum(x.weight for x in heads)
            terms = [
                x * np.float32(head.weight / whole) for x, head in zip(parts, heads, strict=True)
            ]
            mean = np.add.accumulate(terms)[-1]
            last = anchors[-1]
            anchors.append(Anchor(number + 1, *OPTIMIZER.step([mean], last.outer, last.values)))
            total += np.sum(parts, axis=0)[:PLACES]
            times += np.sum([np.abs(x[:PLACES]) > ROUNDING for x in parts], axis=0)
        return anchors, total, times

    def check_newcomers(self, newest: Anchor) -> None:
        """Check that islands that join now compute the same anchor."""
        objects, later = self.world.objects, re.compile("snapshots/(?!00000000)")
        first_only = {key: x for key, x in objects.items() if not later.match(key)}
        for kept in (objects, first_only) if self.setting.keep is None else (objects,):
            world, found = World(lambda n: 0), []
            world.objects, world.ever = dict(kept), dict(kept)
            world.changed()

            def join(process: Process, found: list[Anchor] = found) -> None:
                rounds = self.rounds(process)
                rounds.join([start_of("new")])
                found.append(rounds.anchor)

            Process(world, "new", join, 0.0)
            world.run()
            assert (found[0].round, found[0].digest) == (newest.round, newest.digest)


def start_of(name: str) -> np.ndarray:
    """Return the parameters with which an island would begin the run; the last tells its name."""
    start = np.zeros(SIZE, np.float32)
    start[-1] = sum(map(ord, name))
    return start


# Of a run of some hundred choices a shorter one fails in another way: shrinking takes minutes.
@settings(phases=[Phase.generate], max_examples=150)
@given(setting=SETTINGS, seed=st.integers(0, 2**32), limit=st.integers(0, 3000))
def test_one_run_for_all_whatever_happens(setting, seed, limit):
    order = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_rounds.secrets, "token_hex", lambda n: order.randbytes(n).hex())
        example = Example(setting, seed, limit)
        example.world.run()
        example.check()
