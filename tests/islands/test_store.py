"""What a store's failures mean: some pass, some do not, and what is waited for is said."""

import pytest

from islands.test_trust import UNIT, life, moved
from islands.world import Process, World
from jaxslowmo.islands._format import round_folder
from jaxslowmo.islands._rounds import Rounds
from jaxslowmo.islands._store import RetryingStore, StoreError


@pytest.mark.parametrize(("error", "asked"), [(PermissionError, "put"), (OSError, "list")])
def test_what_does_not_pass_is_told_at_once_and_the_rest_after_a_while(error, asked):
    def act(process: Process) -> None:
        def fails(*args: object) -> None:
            raise error("https://x.test/?signature=abc&x=1\nmore")

        setattr(process, asked, fails)
        store = RetryingStore(process, "s3://b/run", 5.0, process.clock, lambda line: None)
        message = rf"^{asked} s3://b/run/k: {error.__name__}: https://x.test/.signature=...&x=1$"
        with pytest.raises(StoreError, match=message):
            store.put("k", b"") if asked == "put" else store.list("k")

    world = World(lambda n: 0)
    Process(world, "a", act, 0.0)
    world.run()
    assert (world.time >= 5.0) == (error is OSError)


def test_a_lonely_island_soon_says_whom_it_waits_for_and_that_no_deadline_ends_that():
    world, early = World(lambda n: 0), list[str]()

    def stay(rounds: Rounds) -> None:
        moved(rounds, UNIT[0])

    def act(rounds: Rounds) -> None:
        rounds._clock.sleep(40.0)
        moved(rounds, UNIT[1])

    _, said = life("a", world, stay, quorum=3)
    # Its own exchange begins one second after it has joined.
    Process(world, "clock", lambda process: (process.sleep(6.0), early.extend(said)), 0.0)
    for name in "bc":
        life(name, world, act, quorum=3)
    world.run()
    line = (
        "round 0: 1 of 3 parts are there; waiting for b, c without a limit: "
        "`deadline_seconds` ends no wait below quorum=3"
    )
    assert early == [line]
    assert len(said) == 2  # the next one half a minute later
    assert "waiting for b" in said[1]


def test_an_island_that_joins_while_old_rounds_are_removed_looks_again():
    world = World(lambda n: 0)
    ends: list[str] = []

    def act(rounds: Rounds) -> None:
        for number in range(3):
            moved(rounds, UNIT[number])
        # An old listing, from before the newest snapshot.
        store = rounds._store
        old = store.list("snapshots")
        for number in range(3, 20):
            moved(rounds, UNIT[number % 8])
        listings = [old, old]
        fresh = rounds._store.list

        def listed(prefix: str):
            return listings.pop() if prefix == "snapshots" and listings else fresh(prefix)

        store.list = listed  # type: ignore[method-assign]
        assert not any(x.key.startswith(round_folder(0) + "/part") for x in fresh(round_folder(0)))
        ends.append(rounds._wait_for_anchor()[0].digest)
        ends.append(rounds.anchor.digest)

    life("a", world, act, snapshot_every=2, keep=1)
    world.run()
    assert ends[0] == ends[1]
