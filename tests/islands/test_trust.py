"""What islands do not take from each other's objects, and how they come together again."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import optax
import pytest

from islands.world import Process, World
from jaxslowmo.islands import IslandsError
from jaxslowmo.islands._anchors import Anchor, Rules
from jaxslowmo.islands._format import (
    Manifest,
    PartCodec,
    PartHeader,
    RunSettings,
    dump,
    manifest_key,
    part_key,
    sha256,
)
from jaxslowmo.islands._optimizer import HostOptimizer
from jaxslowmo.islands._rounds import Rounds
from jaxslowmo.islands._store import RetryingStore

SIZE, DEADLINE = 8, 20.0
OPTIMIZER = HostOptimizer(optax.sgd(1.0), [np.zeros(SIZE, np.float32)])
UNIT = np.eye(SIZE, dtype=np.float32)
PLAIN = PartCodec(None, SIZE)


def life(
    name: str,
    world: World,
    act: Callable[[Rounds], object],
    start: float = 0.0,
    part_codec: PartCodec = PLAIN,
    optimizer: HostOptimizer = OPTIMIZER,
    **options: Any,
) -> tuple[Process, list[str]]:
    """Add an island to a world that joins and acts; return its process and what it says."""
    said: list[str] = []

    def run(process: Process) -> None:
        store = RetryingStore(process, "memory://run", 5.0, process.clock, said.append)
        agreed = RunSettings("", "", "1", "None", optimizer.fingerprint, [f"w[{SIZE}]"])
        rules = Rules(name, deadline_seconds=DEADLINE, **options)
        rounds = Rounds(store, rules, optimizer, part_codec, agreed, said.append)
        rounds.join([np.zeros(SIZE, np.float32)])
        process.sleep(1.0)  # until all have joined
        act(rounds)

    return Process(world, name, run, start), said


def moved(rounds: Rounds, by: np.ndarray) -> None:
    """Exchange a displacement."""
    rounds.exchange([rounds.anchor.values[0] - by], 1.0, 1)


def part(run: RunSettings, island: str, sent: np.ndarray, **header: Any) -> bytes:
    """Return a part of round 0, whose header may be another one."""
    head = PartHeader(run.run_id, 0, island, run.digest, 1.0, 1, sha256(sent))
    return dump(dataclasses.replace(head, **header), {"displacement": sent})


def same(anchor: Anchor, until: int | None = None) -> Anchor:
    """Stand in for `Anchors.compute` on a machine that computes wrongly."""
    del until
    return anchor


NAN = np.where(UNIT[3] > 0, np.float32(np.nan), UNIT[2])
BAD_PARTS: dict[str, tuple[Callable[[RunSettings], bytes], str]] = {
    "truncated": (lambda run: part(run, "bad", UNIT[3])[:-4], "is unreadable: no safetensors"),
    "another version": (
        lambda run: part(run, "bad", UNIT[3]).replace(b'version\\": 1', b'version\\": 2'),
        "version 2, and this jaxslowmo reads 1",
    ),
    "another shape": (lambda run: part(run, "bad", UNIT[3, :4]), "arrays of other names, shapes"),
    "another run": (
        lambda run: part(dataclasses.replace(run, run_id="x"), "bad", UNIT[3]),
        "belongs to another",
    ),
    "NaN": (lambda run: part(run, "bad", NAN), "holds values that are not finite"),
    "norm": (lambda run: part(run, "bad", 11 * UNIT[3]), "has norm 11, above 10 times 1, the med"),
    "another anchor": (
        lambda run: part(run, "bad", UNIT[3], anchor=64 * "0"), "is measured from another anchor",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD_PARTS)
def test_a_bad_part_is_left_out_by_all_and_named(kind):
    bad, message = BAD_PARTS[kind]
    world = World(lambda n: 0)
    anchors: list[Anchor] = []

    def act(rounds: Rounds) -> None:
        objects, run = world.objects, rounds.settings
        for i, island in enumerate(["good", "more"]):
            objects[part_key(0, island, "0")] = part(run, island, UNIT[i])
        objects[part_key(0, "bad", "0")] = bad(run)
        world.ever |= objects
        world.changed()
        moved(rounds, UNIT[2])
        anchors.append(rounds.anchor)

    said = [life(name, world, act)[1] for name in ("a", "b")]
    world.run()
    key = "the part of bad is left out: it "
    lines = [[line for line in x if key in line] for x in said]
    assert lines[0] == lines[1]
    assert len(lines[0]) == 1
    assert message in lines[0][0]
    assert anchors[0].digest == anchors[1].digest
    assert anchors[0].round == 1
    others = len(Manifest.loads(world.objects[manifest_key(0)]).parts) - 1
    counted = UNIT[0] + UNIT[1] + (others - 2) * UNIT[2]
    np.testing.assert_allclose(anchors[0].values[0], -counted / others, rtol=1e-6)


@pytest.mark.parametrize("is_memory", [True, False])
def test_an_island_that_diverged_adopts_the_anchor_of_most(is_memory):
    """After an error of memory it computes its anchor again; else the others show theirs."""
    world = World(lambda n: 0)
    ends: list[Anchor] = []

    def act(rounds: Rounds) -> None:
        for number in range(5):
            if number == 1 and rounds._rules.name == "b":
                values = [x.copy() for x in rounds.anchor.values]
                values[0].view(np.uint32)[0] ^= 1 << 20
                rounds.anchor = Anchor(number, values, rounds.anchor.outer)
                if not is_memory:  # its NumPy computes the same wrong value again
                    rounds._anchors.compute = functools.partial(same, rounds.anchor)
            moved(rounds, UNIT[number])
        ends.append(rounds.anchor)

    said = [life(name, world, act, quorum=3)[1] for name in ("a", "b", "c")]
    world.run()
    assert {(x.round, x.digest) for x in ends} == {(5, ends[0].digest)}
    assert [any("it adopts theirs" in line for line in x) for x in said] == [False, True, False]
    for lines in said:
        left_out = [line for line in lines if "left out" in line]
        assert len(left_out) == 1
        assert "round 1: the part of b is left out: it is measured from another" in left_out[0]
    assert world.time < DEADLINE


@pytest.mark.parametrize(("direction", "is_lost"), [(0, False), (1, True)])
def test_who_joins_after_a_part_was_damaged_adopts_the_anchor_of_those_who_were_there(
    direction, is_lost
):
    """It can't know better: the others had the part before. Digests, and so ties, differ."""
    world = World(lambda n: 0)
    ends: list[Anchor] = []

    def old(rounds: Rounds) -> None:
        for number in range(5):
            if number == 2:
                (key,) = [x for x in world.objects if x.startswith(part_key(1, "old", ""))]
                data = world.objects.pop(key)
                if not is_lost:
                    world.objects[key] = data[:-1] + b"\xff"
                rounds._clock.sleep(30.0 if is_lost else 8.0)  # until the other has joined
            moved(rounds, UNIT[direction])
        ends.append(rounds.anchor)

    def new(rounds: Rounds) -> None:
        while rounds.anchor.round < 5:
            moved(rounds, UNIT[direction])
        ends.append(rounds.anchor)

    life("old", world, old)
    _, said = life("new", world, new, start=5.0)
    world.run()
    why = "is missing in the store" if is_lost else "has another SHA-256 than its header says"
    assert why in said[0]
    assert ends[0].digest == ends[1].digest
    np.testing.assert_allclose(ends[0].values[0], -5 * UNIT[direction], rtol=1e-6)


def test_a_manifest_that_is_garbage_is_named():
    world = World(lambda n: 0)

    def act(rounds: Rounds) -> None:
        twice = [part_key(0, "a", "0"), part_key(0, "a", "1")]
        for garbage, message in (
            (b'{"version": 1', "is unreadable: no JSON object"),
            (Manifest("x", 0, "a").dumps().encode(), "belongs to another run"),
            (
                Manifest(rounds.settings.run_id, 0, "a", twice).dumps().encode(),
                "one part of each island",
            ),
        ):
            world.objects[manifest_key(0)] = garbage
            with pytest.raises(IslandsError, match=f"{message}.* begin another run") as error:
                moved(rounds, UNIT[0])
            assert str(error.value).startswith("memory://run/rounds/00000000/manifest.json ")

    life("a", world, act)
    world.run()
