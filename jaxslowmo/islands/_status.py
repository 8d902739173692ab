"""The status of a run: who takes part, by what lies in the bucket."""

from datetime import datetime
from typing import NamedTuple

from ._format import parse_island, parse_round, read_heartbeat, read_run, round_folder
from ._store import Clock, IslandsError, ObstoreClient, RetryingStore


class IslandStatus(NamedTuple):
    """What an island last did.

    Attributes:
      name: its name.
      round: the round towards which it trains, or of which it waits for the manifest.
      lag: rounds between that and the open round.
      has_part: whether the open round has a part of it.
      updates: its updates so far.
      sent, received: bytes of its last exchange.
      last_seen: when it last wrote, by the store's clock.
    """

    name: str
    round: int
    lag: int
    has_part: bool
    updates: int
    sent: int
    received: int
    last_seen: datetime


class Status(NamedTuple):
    """Where a run is.

    Attributes:
      run: its name.
      round: the open round: as many are decided.
      snapshot: round of the newest snapshot.
      bytes: size of all objects in the store.
      islands: the islands that have ever joined.
    """

    run: str
    round: int
    snapshot: int
    bytes: int
    islands: list[IslandStatus]

    def __str__(self) -> str:
        """Return a table."""
        head = (
            f"run {self.run}: round {self.round} is open, newest snapshot {self.snapshot}, "
            f"{self.bytes:,} bytes in the store"
        )
        rows = [("island", "round", "lag", "part", "updates", "sent", "received", "last seen")]
        rows += [
            (
                x.name, str(x.round), str(x.lag), "yes" if x.has_part else "-", str(x.updates),
                f"{x.sent:,}", f"{x.received:,}", f"{x.last_seen:%Y-%m-%d %H:%M:%S} UTC",
            )
            for x in self.islands
        ]  # fmt: skip
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([head, *lines])


def status(url: str) -> Status:
    """Return who takes part in the run at a URL: islands, rounds, lags, bytes and when they wrote.

    Args:
      url: the URL or the folder of the run, as in `js.islands.join`.

    Returns:
      A `Status`, which prints as a table.

    Raises:
      IslandsError: there is no run, or the store does not answer.

    Communication: one listing of the store, and one small object per island.
    """
    store = RetryingStore(ObstoreClient(url, creates=False), url, 10.0, Clock(), lambda line: None)
    settings = read_run(store)
    if settings is None:
        raise IslandsError(f"{store.url}: there is no run here.")
    entries = store.list("")
    keys = [entry.key for entry in entries]
    decided = [parse_round(key) for key in keys if key.endswith("/manifest.json")]
    number = max((n + 1 for n in decided if n is not None), default=0)
    snapshots = [parse_round(key) or 0 for key in keys if key.startswith("snapshots/")]
    present = {parse_island(key) for key in keys if key.startswith(f"{round_folder(number)}/")}
    islands = []
    for entry in entries:
        if not entry.key.startswith("islands/"):
            continue
        heartbeat = read_heartbeat(store, entry.key)
        if heartbeat is not None:
            islands.append(
                IslandStatus(
                    heartbeat.island, heartbeat.round, number - heartbeat.round,
                    heartbeat.island in present, heartbeat.updates, heartbeat.sent,
                    heartbeat.received, entry.modified,
                )
            )  # fmt: skip
    size = sum(entry.size for entry in entries)
    return Status(settings.run_id, number, max(snapshots, default=0), size, islands)
