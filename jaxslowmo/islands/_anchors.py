"""The anchors of a run, which every island computes from the same objects to the same bits.

The anchor after a round is the outer optimizer's step along the weighted mean of the parts that the
round's manifest lists. A snapshot holds the anchor before a round. So an island that joins reads
the newest snapshot and replays the rounds since.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..algorithms import NormWeighted
from ._format import (
    MAX_JSON,
    FormatError,
    Manifest,
    PartCodec,
    PartHeader,
    RunSettings,
    Shapes,
    SnapshotHeader,
    dump,
    manifest_key,
    max_num_bytes,
    missing_key,
    parse_arrays,
    parse_header,
    parse_island,
    parse_round,
    round_folder,
    sha256,
    snapshot_key,
    split_like,
)
from ._optimizer import HostOptimizer
from ._store import IslandsError, RetryingStore, TooLargeError

POLL_SECONDS = 0.05, 2.0  # the first and the longest pause between two looks at a round
_MANIFEST_REMEDY = (
    "Put back the object that was written first, or begin another run in an empty folder."
)
_COLUMNS, _ROWS = 1 << 10, 1 << 10  # of the blocks in which `_norm` sums


class PartNotFoundError(Exception):
    """The error that a part is not there: removed since a newer snapshot holds its result, or lost.

    Args:
      key: the part's.
    """

    def __init__(self, key: str) -> None:
        super().__init__(f"{key} is not there")
        self.key = key


@dataclass(frozen=True)
class Rules:
    """How an island takes part; the arguments of `js.islands.join`, checked there."""

    name: str
    quorum: int = 1
    deadline_seconds: float = 600.0
    late_share: float = 0.0
    snapshot_every: int = 10
    keep: int | None = 2


@dataclass(frozen=True)
class Anchor:
    """The values that all islands share before a round.

    Attributes:
      round: number of the round.
      values: the leaves of the model, float32.
      outer: the arrays of the outer optimizer's state.
      digest: SHA-256 of all three.
    """

    round: int
    values: list[np.ndarray]
    outer: list[np.ndarray]
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        """Compute the digest."""
        number = self.round.to_bytes(8, "little")
        object.__setattr__(self, "digest", sha256(number, *self.values, *self.outer))


@dataclass
class _ReceivedPart:
    """A part as an island has read it.

    Attributes:
      key, header: of the object; no header if it is unreadable.
      payload: the encoded displacement.
      norm: norm of the displacement.
      rejection: why it is left out; None if it counts.
    """

    key: str
    header: PartHeader | None = None
    payload: np.ndarray | None = None
    norm: float = 0.0
    rejection: str | None = None


class Anchors:
    """The anchors of a run.

    Args:
      store: the store that holds the run.
      rules: how this island takes part.
      optimizer: the outer optimizer.
      part_codec: how displacements are encoded.
      settings: what all islands must agree on.
      log: function that shows one line to the user.

    Attributes:
      settings: the same; once the island has joined, those of the store's run.
      part_limit: largest size of a part in bytes.
      replayed_islands: maps a round that was replayed to the islands whose parts counted.
      payloads: maps a SHA-256 to a payload that is in memory, which parts read later share.
    """

    def __init__(
        self,
        store: RetryingStore,
        rules: Rules,
        optimizer: HostOptimizer,
        part_codec: PartCodec,
        settings: RunSettings,
        log: Callable[[str], None],
    ) -> None:
        self._store, self._rules, self._optimizer = store, rules, optimizer
        self._part_codec, self._clock, self._log = part_codec, store.clock, log
        self.settings = settings
        self.part_limit = max_num_bytes(part_codec.shapes)
        self._snapshot_limit = max_num_bytes(self._snapshot_shapes())
        self.replayed_islands: dict[int, set[str]] = {}
        self.payloads: dict[str, np.ndarray] = {}

    def replay(self, anchor: Anchor, until: int | None = None) -> Anchor:
        """Return the anchor after all rounds that are decided, or that of round `until`."""
        while until is None or anchor.round < until:
            manifest = self.read_manifest(anchor.round)
            if manifest is None:
                return anchor
            anchor, _ = self.step(anchor, manifest)
        return anchor

    def step(
        self, anchor: Anchor, manifest: Manifest, *, is_live: bool = False
    ) -> tuple[Anchor, set[str]]:
        """Return the anchor after one round, and the keys of the parts that counted.

        Every island decides by the same rules, from the same objects, in the same order.

        Args:
          anchor: the anchor before the round.
          manifest: the round's manifest.
          is_live: whether `anchor` was kept in memory; else it was just computed from the store.
        """
        received = [self.read_part(key, anchor.round) for key in manifest.parts]
        anchor = self._reject_other_anchors(anchor, manifest, received, is_live)
        counting = [x for x in received if x.rejection is None]
        norms, most = np.array([x.norm for x in counting]), self.settings.max_norm_ratio
        factors = NormWeighted(most).factors(norms) if counting else ()
        for part, factor in zip(counting, factors, strict=True):
            if factor == 0:
                usual = np.median(norms)
                rule = f"above {most:g} times {usual:.3g}, the median"
                part.rejection = f"has norm {part.norm:.3g}, {rule}"
        for part in received:
            if part.rejection is not None:
                who = parse_island(part.key)
                self._log(
                    f"round {anchor.round}: the part of {who} is left out: it {part.rejection}"
                )
        counting = [x for x in counting if x.rejection is None]
        values, outer = anchor.values, anchor.outer
        if counting:
            mean = split_like(self._weighted_mean(counting), anchor.values)
            values, outer = self._optimizer.step(mean, anchor.outer, anchor.values)
            if not are_finite([*values, *outer]):
                self._log(f"round {anchor.round}: an outer step that is not finite is not taken")
                values, outer, counting = anchor.values, anchor.outer, []
        if not is_live:
            self.replayed_islands[anchor.round] = {parse_island(x.key) or "" for x in counting}
        return Anchor(anchor.round + 1, values, outer), {x.key for x in counting}

    def _weighted_mean(self, parts: list[_ReceivedPart]) -> np.ndarray:
        """Return the weighted mean, summed in order, in float32."""
        weights = [x.header.weight for x in parts if x.header is not None]
        if math.isinf(sum(weights)):
            weights = [math.ldexp(x, -64) for x in weights]  # exact, and so are their shares
        total, mean = sum(weights), None
        for part, weight in zip(parts, weights, strict=True):
            assert part.payload is not None
            term = self._part_codec.decode(part.payload) * np.float32(weight / total)
            mean = term if mean is None else np.add(mean, term, out=mean)
        assert mean is not None
        return mean

    def _reject_other_anchors(
        self, anchor: Anchor, manifest: Manifest, received: list[_ReceivedPart], is_live: bool
    ) -> Anchor:
        """Reject the parts that are measured from another anchor than most, and return that anchor.

        If several anchors have most parts, those of islands that took part in the last round
        decide: an island that has joined since may have read damaged parts.
        """
        anchor_of = {
            parse_island(x.key): x.header.anchor
            for x in received
            if x.header and x.rejection is None
        }
        if not anchor_of:
            return anchor
        votes, last_manifest = Counter(anchor_of.values()), None
        if len(votes) > 1 and anchor.round:
            last_manifest = self.read_manifest(anchor.round - 1)
        last_islands = last_manifest.islands() if last_manifest else ()
        old_votes = Counter(anchor_of.get(x) for x in last_islands)
        majority = min(votes, key=lambda digest: (-votes[digest], -old_votes[digest], digest))
        if majority != anchor.digest:
            anchor = self._recover_anchor(anchor, manifest, majority, is_live)
        for part in received:
            if part.rejection is None and part.header and part.header.anchor != anchor.digest:
                part.rejection = f"is measured from another anchor, {part.header.anchor[:16]}"
        if len(votes) > 1 and anchor.digest == majority and is_live:
            self.write_snapshot(anchor, self.settings.run_id)  # for those who have another one
        return anchor

    def _recover_anchor(
        self, anchor: Anchor, manifest: Manifest, majority: str, is_live: bool
    ) -> Anchor:
        """Return the anchor of the majority; the computed one if no island writes a snapshot of it.

        An anchor differs after an error of this machine's memory, which computing it again heals,
        or if its NumPy computes in another way: then a snapshot of the others does.
        """
        number, clock = anchor.round, self._clock
        self._log(
            f"round {number}: this island's anchor is {anchor.digest[:16]}, and that of most parts "
            f"{majority[:16]}; it adopts theirs"
        )
        snapshot = self._read_snapshot(snapshot_key(number, majority))
        if snapshot is None and is_live:
            anchor = self.find(number) or anchor
            # The others read this island's part, see that anchors differ, and write a snapshot.
            start_time, is_seen = clock.now(), self._rules.name in manifest.islands()
            while anchor.digest != majority and snapshot is None and is_seen:
                if clock.now() - start_time >= self._rules.deadline_seconds:
                    break
                clock.sleep(POLL_SECONDS[1])
                snapshot = self._read_snapshot(snapshot_key(number, majority))
        return anchor if snapshot is None else snapshot

    def find(self, number: int) -> Anchor | None:
        """Return the anchor of a round; None if nothing in the store leads there."""
        try:
            return self.compute(number)
        except PartNotFoundError:
            return None

    def compute(self, until: int | None = None) -> Anchor | None:
        """Return the newest anchor, or that of a round; None if there is no snapshot before it.

        Raises:
          PartNotFoundError: a part since the newest snapshot is not there.
        """
        first = snapshot_key(0, self.settings.digest)
        for key in sorted({first, *(x.key for x in self._store.list("snapshots"))}, reverse=True):
            number = parse_round(key)
            if number is None or (until is not None and number > until):
                continue
            if number == 0 and key != first:  # of another island that would have begun the run
                continue
            anchor = self._read_snapshot(key)
            if anchor is not None:
                return self.replay(anchor, until)
        return None

    # Parts, manifests and snapshots.

    def read_part(self, key: str, number: int) -> _ReceivedPart:
        """Return a part of a round, with the reason if it is left out.

        An island reads its own part, too: all islands decide by what the store holds.

        Raises:
          PartNotFoundError: it is not there.
        """
        part = _ReceivedPart(key)
        try:
            data = self._store.get(key, self.part_limit)
            if data is None and self._store.get(missing_key(key), MAX_JSON) is not None:
                part.rejection = "is missing in the store"
                return part
            if data is None:
                raise PartNotFoundError(key)
            part.header = head = parse_header(data, PartHeader)
            (part.payload,) = parse_arrays(data, self._part_codec.shapes)
        except (TooLargeError, FormatError) as error:
            part.rejection = f"is unreadable: {error}"
            return part
        expected = self.settings.run_id, number, parse_island(key)
        if (head.run_id, head.round, head.island) != expected:
            part.rejection = "belongs to another run, round or island"
        elif head.sha256 != sha256(part.payload):
            part.rejection = "has another SHA-256 than its header says"
        elif head.weight <= 0:
            part.rejection = f"has weight {head.weight:g}"
        else:
            part.payload = self.payloads.get(head.sha256, part.payload)
            part.norm = _norm(self._part_codec.decode(part.payload))
            if not math.isfinite(part.norm):
                part.rejection = "holds values that are not finite"
        return part

    def read_manifest(self, number: int) -> Manifest | None:
        """Return the manifest of a round; None if the round is not decided.

        Raises:
          IslandsError: the object is no manifest of this round.
        """
        where = f"{self._store.url}/{manifest_key(number)}"
        try:
            data = self._store.get(manifest_key(number), MAX_JSON)
            if data is None:
                return None
            manifest = Manifest.loads(data)
        except (FormatError, TooLargeError) as error:
            raise IslandsError(f"{where} is unreadable: {error}. {_MANIFEST_REMEDY}") from error
        if (manifest.run_id, manifest.round) != (self.settings.run_id, number):
            raise IslandsError(f"{where} belongs to another run or round. {_MANIFEST_REMEDY}")
        islands = {parse_island(key) for key in manifest.parts if parse_round(key) == number}
        if None in islands or len(islands) != len(manifest.parts):
            raise IslandsError(
                f"{where} lists other things than one part of each island. {_MANIFEST_REMEDY}"
            )
        return manifest

    def _read_snapshot(self, key: str) -> Anchor | None:
        """Return the anchor of a snapshot; None if there is none, or none that is whole."""
        shapes = self._snapshot_shapes()
        try:
            data = self._store.get(key, self._snapshot_limit)
            if data is None:
                return None
            head = parse_header(data, SnapshotHeader)
            arrays = parse_arrays(data, shapes)
        except (TooLargeError, FormatError) as error:
            self._log(f"{self._store.url}/{key} is unreadable: {error}")
            return None
        count = len(self.settings.leaves)
        anchor = Anchor(head.round, arrays[:count], arrays[count:])
        # Two islands that would begin a run with the same values write the same first snapshot.
        is_of_run = anchor.round == 0 or head.run_id == self.settings.run_id
        if not is_of_run or key != snapshot_key(anchor.round, anchor.digest):
            self._log(f"{self._store.url}/{key} is of another run, round or digest")
            return None
        return anchor

    def write_snapshot(self, anchor: Anchor, run_id: str) -> None:
        """Write a snapshot of an anchor, for islands that have not computed it."""
        header = SnapshotHeader(run_id, anchor.round, anchor.digest)
        names = self._snapshot_shapes()
        arrays = dict(zip(names, [*anchor.values, *anchor.outer], strict=True))
        self._store.put(snapshot_key(anchor.round, anchor.digest), dump(header, arrays))

    def _snapshot_shapes(self) -> Shapes:
        names = [x.rpartition("[")[0] for x in self.settings.leaves]
        values = zip(names, self._optimizer.shapes, strict=True)
        return {
            **{f"anchor/{name}": (shape, np.float32) for name, shape in values},
            **{f"outer/{i}": x for i, x in enumerate(self._optimizer.state_types)},
        }

    def rotate_snapshots(self, anchor: Anchor) -> None:
        """Write a snapshot if it is time, and remove what newer ones make needless.

        Manifests stay: a round that was decided once can never be decided again.
        """
        if anchor.round % self._rules.snapshot_every:
            return
        self.write_snapshot(anchor, self.settings.run_id)
        if (keep := self._rules.keep) is None:
            return
        snapshots = {x.key: parse_round(x.key) or 0 for x in self._store.list("snapshots")}
        numbers = sorted({*snapshots.values()})
        if len(numbers) <= keep:
            return
        oldest = numbers[-keep]
        for number in range(numbers[0], oldest):
            for entry in self._store.list(round_folder(number)):
                if entry.key != manifest_key(number):
                    self._store.delete(entry.key)
        for key, number in snapshots.items():
            if number < oldest:
                self._store.delete(key)


def are_finite(arrays: Sequence[np.ndarray]) -> bool:
    """Return whether all values are finite."""
    return all(bool(np.isfinite(x).all()) for x in arrays)


def _norm(x: np.ndarray) -> float:
    """Return the norm of a vector, to the same bits whatever the width of a machine's SIMD."""
    columns = np.zeros(_COLUMNS)
    whole = x.size - x.size % _COLUMNS
    rows, rest = x[:whole].reshape(-1, _COLUMNS), x[whole:]
    with np.errstate(all="ignore"):
        for start in range(0, len(rows), _ROWS):
            block = rows[start : start + _ROWS]
            squares = np.multiply(block, block, dtype=np.float64)
            columns += np.add.reduce(squares, axis=0)  # column by column, row after row
        columns[: rest.size] += np.multiply(rest, rest, dtype=np.float64)
    return math.sqrt(math.fsum(columns)) if np.isfinite(columns).all() else math.inf
