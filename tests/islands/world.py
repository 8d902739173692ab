"""Islands in threads that take turns, one request at a time, over a bucket in memory.

A test says who goes on and what becomes of each request, so a run is the same each time. Time is
virtual: it passes when all islands sleep. Nothing waits really, and nothing can hang.
"""

import json
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from jaxslowmo.islands._format import parse_island, parse_round
from jaxslowmo.islands._store import Clock, Entry, TooLargeError

MAX_TURNS = 12000
LAG_SECONDS = 3.0
_EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


class Died(BaseException):
    """The end of an island's process, wherever it is."""


class World:
    """A bucket in memory, the islands that use it, and their time.

    Args:
      choose: function of n that returns a number in [0, n); 0 is the harmless choice.

    Attributes:
      trouble: shares of requests, in percent, that meet each kind of trouble; see `_fate`.
      spoils: shares of parts, in percent, that the store damages and loses.
      damaged, lost: keys of those.
      listed_parts: keys of parts of which rounds consist.
      objects: the bucket now.
      ever: all that was ever written, also what was removed since.
      modified: maps a key to the time at which it was last written.
      part_times: maps a round and an island to the time at which its first part was there.
      closed_after: maps a round to the seconds that the island which closed it was exchanging.
    """

    def __init__(self, choose: Callable[[int], int]) -> None:
        self.choose, self.trouble = choose, dict[str, int]()
        self.spoils = {"damages": 0, "loses": 0}
        self.damaged, self.lost, self.listed_parts = set[str](), set[str](), set[str]()
        self.wrong = ""
        self.time, self.islands = 0.0, list[Process]()
        self.objects, self.ever = dict[str, bytes](), dict[str, bytes]()
        self.modified: dict[str, float] = {}
        self.part_times: dict[tuple[int, str], float] = {}
        self.closed_after: dict[int, float] = {}
        # The keys after each change of them, and its time.
        self.listings: list[tuple[float, list[str]]] = [(0.0, [])]
        self.back = threading.Lock()  # held while an island runs
        self.back.acquire()

    def run(self) -> None:
        """Let the islands go on until all have ended or are quiet; raise what one of them raised.

        Raises:
          AssertionError: one of them never comes to an end.
        """
        try:
            for _ in range(MAX_TURNS):
                alive = [x for x in self.islands if not x.is_over]
                if all(x.is_quiet for x in alive):
                    return
                self.time = max(self.time, min(x.wake for x in alive))
                ready = [x for x in alive if x.wake <= self.time]
                self._step(ready[self.choose(len(ready))])
            doing = [f"{x.island}: {x.doing}" for x in self.islands if not x.is_over]
            raise AssertionError(f"no end after {MAX_TURNS} turns, {self.time:.0f} s: {doing}")
        finally:
            for island in self.islands:
                island.end()

    def _step(self, island: "Process") -> None:
        fate = self._fate() if island.is_asking else ""
        if fate == "silent":
            island.silent_until = self.time + (0.0, 2.0, 20.0)[self.choose(3)]
        was_silent, island.is_unanswered = island.is_unanswered, False
        if was_silent:
            fate = "fails"
        elif island.is_asking and (fate == "silent" or self.time < island.silent_until):
            # Each request takes all the time that it has.
            island.wake, island.is_unanswered = self.time + island.timeout_seconds, True
            island.store_time += island.timeout_seconds
            return
        if fate == "delay":  # its request is under way
            seconds = (0.3, 1.0, 9.0)[self.choose(3)]
            island.wake, island.store_time = self.time + seconds, island.store_time + seconds
            return
        if fate in ("outage", "cut"):
            island.no_answer_until = self.time + (2.0, 20.0)[self.choose(2)]
        is_out = self.time < island.no_answer_until
        island.go_on("fails" if is_out and fate != "cut" else fate)
        assert not self.wrong, self.wrong
        if island.error is not None:
            raise island.error

    def _fate(self) -> str:
        if not self.trouble:
            return ""
        draw = 99 - self.choose(100)
        for kind, share in self.trouble.items():
            draw -= share
            if draw < 0:
                return kind
        return ""

    def listed(self) -> list[str]:
        """Return the keys of a listing, which may be that of some seconds ago."""
        last = len(self.listings) - 1
        first = last
        while first and self.listings[first][0] > self.time - LAG_SECONDS:
            first -= 1
        return self.listings[max(first, last - self._fate_of_listing())][1]

    def _fate_of_listing(self) -> int:
        return self.choose(15) if self.trouble and self.choose(100) >= 70 else 0

    def expect(self, is_right: bool, wrong: str) -> None:
        """Remember what must not be; an exception would be repeated as a failure of the store."""
        self.wrong = self.wrong or ("" if is_right else wrong)

    def changed(self) -> None:
        """Remember the keys after a change of them."""
        self.listings.append((self.time, sorted(self.objects)))


class Process(threading.Thread):
    """A process of an island, which is also its `ObjectStore`.

    Args:
      world: where it runs.
      name: the island's name.
      life: what it does, given this process.
      start: the time at which it begins.

    Attributes:
      store_time: seconds that its requests took, and those after which it repeated them.
      is_quiet: whether it has nothing left to do but to serve the others.
    """

    refusals: tuple[type[Exception], ...] = (PermissionError,)
    timeout_seconds = 1.0

    def __init__(
        self, world: World, name: str, life: Callable[["Process"], None], start: float
    ) -> None:
        super().__init__(daemon=True)
        self.world, self.island, self.life, self.wake = world, name, life, start
        self.skew = 1e4 * len(world.islands)  # clocks of two machines have nothing in common
        self.turn, self.fate, self.doing = threading.Lock(), "", "start"
        self.turn.acquire()  # held while another runs
        self.is_over = self.is_ended = self.is_quiet = self.is_asking = self.has_failed = False
        self.error: BaseException | None = None
        self.store_time, self.no_answer_until, self.exchanging_since = 0.0, 0.0, 0.0
        self.silent_until, self.is_unanswered = 0.0, False
        self.clock = Clock(lambda: world.time + self.skew, self.sleep)
        world.islands.append(self)
        self.start()

    def run(self) -> None:
        """Run its life, one turn after another."""
        self.turn.acquire()
        try:
            if self.fate != "dies":
                self.life(self)
        except Died:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.is_over = True
            self.world.back.release()

    def go_on(self, fate: str) -> None:
        """Let it run until it asks for something again; called by the world."""
        self.fate = fate
        self.turn.release()
        self.world.back.acquire()

    def end(self) -> None:
        """End the thread."""
        if not self.is_over:
            self.is_ended = True
            self.go_on("dies")
        self.join()

    def sleep(self, seconds: float) -> None:
        """Sleep; after a failed request this is the store's time."""
        if self.has_failed:
            self.store_time += seconds
            self.has_failed = False
        self.wake = self.world.time + seconds
        self._wait(f"sleep {seconds:.2f}")

    def _wait(self, doing: str) -> str:
        self.doing = doing
        self.world.back.release()
        self.turn.acquire()
        if self.fate == "dies":
            raise Died
        return self.fate

    def _ask(self, doing: str, effect: Callable[[], object]) -> object:
        self.is_asking = True
        fate = self._wait(doing)
        self.is_asking = False
        if fate in ("fails", "outage"):
            self.has_failed = True
            raise ConnectionError("503, please slow down")
        result = effect()
        if fate == "dies after":
            raise Died
        if fate in ("times out", "cut"):  # after it took effect
            self.has_failed = True
            raise TimeoutError("no answer")
        return result

    # The bucket.

    def get(self, key: str, limit: int | None) -> bytes:
        def effect() -> bytes:
            data = self.world.objects.get(key)
            if data is None:
                raise FileNotFoundError(key)
            if limit is not None and len(data) > limit:
                raise TooLargeError(f"{len(data)} bytes, and at most {limit} belong there")
            return data

        return self._ask(f"get {key}", effect)  # type: ignore[return-value]

    def create(self, key: str, data: bytes) -> None:
        def effect() -> None:
            if key in self.world.objects:
                raise FileExistsError(key)
            self._write(key, data)

        self._ask(f"create {key}", effect)

    def put(self, key: str, data: bytes) -> None:
        self._ask(f"put {key}", lambda: self._write(key, data))

    def _write(self, key: str, data: bytes) -> None:
        world = self.world
        if key.startswith("rounds/"):
            known = world.ever.setdefault(key, data)
            world.expect(known == data, f"{key} was written twice, with other contents")
            if key.endswith("manifest.json"):
                world.expect(key not in world.objects, f"{key} was written twice")
                world.closed_after[parse_round(key) or 0] = world.time - self.exchanging_since
        is_new, is_first = key not in world.objects, key not in world.modified
        world.objects[key] = world.ever[key] = data
        world.modified[key] = world.time
        if (island := parse_island(key)) is not None:
            self._spoil(key, is_drawn=is_first)
            if key not in world.lost:  # else nobody sees it but its author
                world.part_times.setdefault((parse_round(key) or 0, island), world.time)
        elif key.endswith("manifest.json"):
            world.listed_parts |= {*json.loads(data)["parts"]}
            for part in json.loads(data)["parts"]:
                self._spoil(part, damages=False)
        if is_new:
            world.changed()

    def _spoil(self, part: str, *, is_drawn: bool = True, damages: bool = True) -> None:
        """Let the store damage or lose a part for good, or until it is written again in time."""
        world, spoils = self.world, self.world.spoils
        if part not in world.listed_parts:
            world.lost.discard(part)
        is_known = part in world.damaged | world.lost
        draw = world.choose(100) if is_drawn and not is_known and any(spoils.values()) else 0
        if draw >= 100 - spoils["loses"]:
            world.lost.add(part)
        elif damages and draw >= 100 - spoils["loses"] - spoils["damages"]:
            world.damaged.add(part)
        if part in world.lost:
            world.objects.pop(part, None)
        elif part in world.damaged:
            data = world.ever[part]
            world.objects[part] = data[:-1] + bytes([data[-1] ^ 0xFF])

    def delete(self, key: str) -> None:
        def effect() -> None:
            self.world.expect(not key.endswith(".json"), f"{key} was removed")
            if self.world.objects.pop(key, None) is None:
                raise FileNotFoundError(key)
            self.world.changed()

        self._ask(f"delete {key}", effect)

    def list(self, prefix: str) -> list[Entry]:
        def effect() -> list[Entry]:
            keys = [x for x in self.world.listed() if x.startswith(f"{prefix}/")]
            times = [_EPOCH + timedelta(seconds=self.world.modified.get(key, 0.0)) for key in keys]
            return [
                Entry(key, len(self.world.ever[key]), time)
                for key, time in zip(keys, times, strict=True)
            ]

        return self._ask(f"list {prefix}", effect)  # type: ignore[return-value]
