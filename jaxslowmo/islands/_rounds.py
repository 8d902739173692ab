"""The rounds of a run, as one island sees them: who takes part is decided in the store.

A round begins with an anchor that all islands share. Each island puts a part into the store: how
far it has moved from the anchor. Whichever island first sees that the round can close creates its
manifest, which lists the parts; the store lets only one of them create it. Then every island reads
the listed parts, takes the outer optimizer's step along their weighted mean, and has the next
anchor, to the bit. So nothing but the store is asked who is there, and whoever reads it later gets
the same.
"""

import math
import secrets
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ._format import (
    MAX_JSON,
    RUN,
    FormatError,
    Manifest,
    Note,
    Part,
    Run,
    Snapshot,
    arrays_of,
    dump,
    folder_of,
    head_of,
    island_of,
    limit_of,
    manifest_of,
    number_of,
    part_of,
    sha256,
    snapshot_of,
)
from ._optimizer import HostOptimizer
from ._store import Clock, IslandsError, Store, StoreError, TooLargeError
from ._wire import Wire, divided, joined

_POLL_SECONDS = 0.05, 2.0  # the first and the longest pause between two looks at a round
_PROGRESS_SECONDS = 30.0
_ATTEMPTS = 5  # to read a run whose old rounds are being removed


class _GoneError(Exception):
    """The error that parts or a snapshot were removed since a newer snapshot holds their result."""


@dataclass(frozen=True)
class Rules:
    """How an island takes part; the arguments of `js.islands.join`, checked there."""

    name: str
    quorum: int = 1
    deadline_seconds: float = 600.0
    late_share: float = 0.0
    snapshot_every: int = 10
    keep: int | None = 2
    max_norm_ratio: float = 10.0


@dataclass(frozen=True)
class Anchor:
    """What all islands share before a round.

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
class _Received:
    """A part as an island has read it.

    Attributes:
      why: why it is left out; None if it counts.
    """

    key: str
    header: Part | None = None
    sent: np.ndarray | None = None
    why: str | None = None


class _Sent(NamedTuple):
    """The part of this island in a round that is not decided yet."""

    round: int
    key: str
    data: bytes
    own: np.ndarray  # the displacement
    lost: np.ndarray | None  # what the codec will have lost


class Outcome(NamedTuple):
    """Where an island goes on.

    Attributes:
      anchor: the newest anchor.
      rest: displacement from it that the island keeps; None: none, it starts at the anchor.
    """

    anchor: Anchor
    rest: np.ndarray | None = None


class Rounds:
    """The rounds of a run.

    Args:
      store: where the run is.
      rules: how this island takes part.
      optimizer: the outer optimizer.
      wire: how displacements travel.
      agreed: what all islands must agree on; `run` and `digest` are those of the store's run.
      clock: this machine's time.
      say: function that shows one line to the user.

    Attributes:
      anchor: the anchor from which this island's displacement is measured.
      run: the run.
      lost: what the codec has not sent yet, with error feedback.
    """

    anchor: Anchor
    run: Run

    def __init__(
        self,
        store: Store,
        rules: Rules,
        optimizer: HostOptimizer,
        wire: Wire,
        agreed: Run,
        clock: Clock,
        say: Callable[[str], None],
    ) -> None:
        self._store, self._rules, self._optimizer, self._wire = store, rules, optimizer, wire
        self._agreed, self._clock, self._say = agreed, clock, say
        self._process = secrets.token_hex(8)
        self._waiting: _Sent | None = None
        self._tried: list[_Sent] = []
        self._newest_snapshot = 0
        self.lost: np.ndarray | None = None

    # Joining.

    def join(self, start: Sequence[np.ndarray]) -> None:
        """Join the run in the store, or begin it with these values.

        Raises:
          IslandsError: another run's bucket, or a run whose anchor can't be read.
          StoreError: the store does not answer.
        """
        run = read_run(self._store)
        if run is None:
            first = Anchor(0, list(start), self._optimizer.init(start))
            name = secrets.token_hex(8)
            self._write_snapshot(first, name)
            mine = Run(**{**vars(self._agreed), "run": name, "digest": first.digest})
            self._store.create(RUN, mine.dumps().encode())
            run = read_run(self._store)
            if run is None:
                raise StoreError(f"get {self._store.url}/{RUN}: it was written and is not there.")
        compare(self._store.url, run, self._agreed)
        self.run, self._agreed = run, run
        self.anchor = self._newest()
        self._note(0, self._store.traffic.sent, self._store.traffic.received)

    def resume(self, number: int, values: Sequence[np.ndarray]) -> Outcome:
        """Return where an island goes on that was saved with an anchor of another round.

        Args:
          number: the round from whose anchor `values` were trained.
          values: the island's parameters.
        """
        if number > self.anchor.round:
            raise IslandsError(
                f"{self._store.url}: the state of this island is of round {number}, and the run "
                f"has come to {self.anchor.round} only: was the bucket put back to an older state?"
            )
        if number == self.anchor.round:
            return Outcome(self.anchor, joined(self.anchor.values) - joined(values))
        share, rounds = self._rules.late_share, range(number, self.anchor.round)
        was_counted = share and any(self._was_counted(k) for k in rounds)
        start = self._newest(number) if share and not was_counted else None
        if start is None or start.round != number:
            return Outcome(self.anchor)
        return Outcome(self.anchor, (joined(start.values) - joined(values)) * np.float32(share))

    def _was_counted(self, number: int) -> bool:
        manifest = self._manifest(number)
        return manifest is not None and self._rules.name in manifest.islands()

    # One exchange.

    def exchange(
        self, values: Sequence[np.ndarray], weight: float, updates: int
    ) -> Outcome | None:
        """Contribute to the open round, wait until it is decided, and return where to go on.

        Args:
          values: the island's parameters, the mean of its replicas.
          weight: the island's weight.
          updates: its updates so far.

        Returns:
          None if the store does not answer. Then nothing is lost: the island trains on, and its
          next exchange contributes all that it did since the anchor.

        Raises:
          IslandsError: another process took this island's name.
        """
        traffic = self._store.traffic
        before = traffic.sent, traffic.received
        requests = traffic.requests.total()
        own = joined(self.anchor.values) - joined(values)
        try:
            self._check_name()
            manifest = self._manifest(self.anchor.round)
            if manifest is None:
                if self._waiting is None or self._waiting.round != self.anchor.round:
                    self._send(own, weight, updates)
                manifest = self._decided()
            anchor, counted = self._step_or_jump(manifest)
        except StoreError as error:
            self._say(f"{error}. Training goes on; the next exchange sends this progress, too.")
            return None
        rest = self._after(own, manifest, counted)
        closed, self.anchor, self._waiting, self._tried = self.anchor, anchor, None, []
        try:
            self.anchor = self._replayed(anchor)
            if rest is not None:
                # The next exchange may be too late for the open round; so others do not wait.
                self._send(rest, weight, updates)
            if manifest.author == self._rules.name:
                self._keep_snapshots(anchor)
            self._note(updates, *before, requests=requests)
        except (StoreError, _GoneError) as error:
            self._say(f"after round {closed.round}: {error}")
        return Outcome(self.anchor, rest)

    def _send(self, own: np.ndarray, weight: float, updates: int) -> None:
        """Put this island's part into the open round."""
        number, part = self.anchor.round, own
        if self._wire.keeps_lost and self.lost is not None:
            part = own + self.lost
        sent = self._wire.encode(part)
        lost = part - self._wire.decode(sent) if self._wire.keeps_lost else None
        header = Part(
            self.run.run, number, self._rules.name, self.anchor.digest, weight, updates,
            sha256(sent),
        )  # fmt: skip
        data = dump(header, {name: sent for name in self._wire.shapes})
        # A name of its own for each: one that was put and never answered is not this one.
        key = part_of(number, self._rules.name, self._process + secrets.token_hex(4))
        mine = _Sent(number, key, data, own, lost)
        # A write without an answer may have taken effect, and others may count it.
        self._tried.append(mine._replace(data=b""))
        self._store.put(key, data)
        self._waiting = mine

    def _decided(self) -> Manifest:
        """Wait until the open round is decided, and return its manifest; close it if it can be."""
        number, rules, clock = self.anchor.round, self._rules, self._clock
        done = said = clock.now()
        expected = self._training_towards(number)
        pause, longest = _POLL_SECONDS
        while True:
            manifest = self._manifest(number)
            if manifest is not None:
                return manifest
            present = self._present(number)
            missing, waited = expected - present.keys(), clock.now() - done
            left = rules.deadline_seconds - waited
            if len(present) >= rules.quorum and (not missing or left <= 0):
                return self._close(present)
            if clock.now() - said >= _PROGRESS_SECONDS:
                said = clock.now()
                few = rules.quorum - len(present)
                whom = f"{few} more of quorum={rules.quorum}" if few > 0 else ", ".join(missing)
                until = f", for {left:.0f} s at most" if few <= 0 else ""
                self._say(f"round {number}: waiting for {whom}{until}")
            clock.sleep(max(0.01, min(pause, left)) if left > 0 else pause)
            pause = min(1.5 * pause, longest)

    def _training_towards(self, number: int) -> set[str]:
        """Return the islands that have started from the anchor of a round, by their notes.

        Those of the last round are not enough: one that has joined since would come too late for
        this round and, at equal speed, for all later ones.
        """
        notes = [read_note(self._store, entry.key) for entry in self._store.list("islands")]
        return {note.island for note in notes if note is not None and note.round == number}

    def _present(self, number: int) -> dict[str, str]:
        """Return the key of one part of each island that has one in a round."""
        keys = [entry.key for entry in self._store.list(folder_of(number))]
        if self._waiting is not None and self._waiting.round == number:
            keys.append(self._waiting.key)  # listings may lag behind
        found: dict[str, str] = {}
        for key in sorted(keys):
            island = island_of(key)
            if island is not None:
                found.setdefault(island, key)
        return found

    def _close(self, present: dict[str, str]) -> Manifest:
        """Create the manifest of the open round; return the one that was created first."""
        number = self.anchor.round
        parts = [present[island] for island in sorted(present)]
        mine = Manifest(self.run.run, number, self._rules.name, parts)
        if self._store.create(manifest_of(number), mine.dumps().encode()):
            return mine
        manifest = self._manifest(number)
        if manifest is None:
            raise StoreError(f"get {self._store.url}/{manifest_of(number)}: it is there and is not")
        return manifest

    def _after(
        self, own: np.ndarray, manifest: Manifest, counted: set[str] | None
    ) -> np.ndarray | None:
        """Return the displacement that this island keeps, after a round was decided."""
        name, number = self._rules.name, manifest.round
        sent = next((x for x in self._tried if x.key in manifest.parts), None)
        if sent is not None:
            if counted is None or sent.key in counted:
                self.lost = sent.lost
            # Progress since an exchange that the store did not let finish is in no part yet.
            return None if sent.own is own else own - sent.own
        if name in manifest.islands():
            self._say(f"round {number}: an earlier process of {name} has contributed already")
            return None
        share = self._rules.late_share
        what = f"carries {share:g} of its progress over" if share else "drops its progress"
        self._say(f"round {number} closed without {name}, which {what}")
        return own * np.float32(share) if share else None

    # From anchor to anchor.

    def _step_or_jump(self, manifest: Manifest) -> tuple[Anchor, set[str] | None]:
        """Return the anchor after a round, or a later one if the round's parts are gone."""
        try:
            return self._stepped(self.anchor, manifest, is_live=True)
        except _GoneError:
            return self._newest(), None

    def _replayed(self, anchor: Anchor, until: int | None = None) -> Anchor:
        """Return the anchor after all rounds that are decided."""
        while until is None or anchor.round < until:
            manifest = self._manifest(anchor.round)
            if manifest is None:
                return anchor
            anchor, _ = self._stepped(anchor, manifest)
        return anchor

    def _stepped(
        self, anchor: Anchor, manifest: Manifest, *, is_live: bool = False
    ) -> tuple[Anchor, set[str]]:
        """Return the anchor after one round, and the keys of the parts that counted.

        Every island decides by the same rules, from the same objects, in the same order.

        Args:
          anchor: the anchor before the round.
          manifest: the round's manifest.
          is_live: whether `anchor` was kept in memory; else it was just computed from the store.
        """
        first_of: dict[str, str] = {}
        for key in manifest.parts:
            first_of.setdefault(island_of(key) or key, key)
        received = [self._read_part(key, anchor.round) for key in first_of.values()]
        anchor = self._agreed_anchor(anchor, manifest, received, is_live)
        counting = [x for x in received if x.why is None]
        norms = [_norm(self._wire.decode(x.sent)) for x in counting if x.sent is not None]
        usual = statistics.median([x for x in norms if math.isfinite(x)] or [0.0])
        for part, norm in zip(counting, norms, strict=True):
            if not math.isfinite(norm):
                part.why = "holds values that are not finite"
            elif usual > 0 and norm > self._rules.max_norm_ratio * usual:
                part.why = (
                    f"has norm {norm:.3g}, above {self._rules.max_norm_ratio:g} times {usual:.3g}, "
                    "the median"
                )
        for part in received:
            if part.why is not None:
                who = island_of(part.key) or part.key
                self._say(f"round {anchor.round}: the part of {who} is left out: it {part.why}")
        counting = [x for x in counting if x.why is None]
        if not counting:
            return Anchor(anchor.round + 1, anchor.values, anchor.outer), set()
        mean = divided(self._mean(counting), anchor.values)
        values, outer = self._optimizer.step(mean, anchor.outer, anchor.values)
        return Anchor(anchor.round + 1, values, outer), {x.key for x in counting}

    def _mean(self, parts: list[_Received]) -> np.ndarray:
        """Return the weighted mean, summed in order, in float32."""
        weights = [x.header.weight for x in parts if x.header is not None]
        whole, mean = math.fsum(weights), None
        for part, weight in zip(parts, weights, strict=True):
            assert part.sent is not None
            term = self._wire.decode(part.sent) * np.float32(weight / whole)
            mean = term if mean is None else np.add(mean, term, out=mean)
        assert mean is not None
        return mean

    def _read_part(self, key: str, number: int) -> _Received:
        """Return a part, or why it is left out.

        Raises:
          _GoneError: it was removed since a newer snapshot holds its result.
        """
        waiting, part = self._waiting, _Received(key)
        try:
            if waiting is not None and waiting.key == key:
                data: bytes | None = waiting.data
            else:
                data = self._store.get(key, limit_of(self._wire.num_bytes))
            if data is None:
                raise _GoneError(key)
            part.header = head_of(data, Part)
            (part.sent,) = arrays_of(data, self._wire.shapes)
        except (TooLargeError, FormatError) as error:
            part.why = f"is unreadable: {error}"
            return part
        head = part.header
        if (head.run, head.round, head.island) != (self.run.run, number, island_of(key)):
            part.why = "belongs to another run, round or island"
        elif head.sha256 != sha256(part.sent):
            part.why = "has another SHA-256 than its header says"
        elif head.weight <= 0:
            part.why = f"has weight {head.weight:g}"
        return part

    def _agreed_anchor(
        self, anchor: Anchor, manifest: Manifest, received: list[_Received], is_live: bool
    ) -> Anchor:
        """Return the anchor from which most parts are measured, and leave out the others."""
        votes = Counter(x.header.anchor for x in received if x.header and x.why is None)
        if not votes:
            return anchor
        right = min(votes, key=lambda digest: (-votes[digest], digest))
        if right != anchor.digest:
            anchor = self._healed(anchor, manifest, right, is_live)
        for part in received:
            if part.why is None and part.header and part.header.anchor != anchor.digest:
                part.why = f"is measured from another anchor, {part.header.anchor[:16]}"
        if len(votes) > 1 and anchor.digest == right:
            self._write_snapshot(anchor, self.run.run)  # for those who have another one
        return anchor

    def _healed(self, anchor: Anchor, manifest: Manifest, right: str, is_live: bool) -> Anchor:
        """Return the anchor of the majority; the computed one if nobody shows theirs.

        An anchor differs after an error of this machine's memory, which computing it again heals,
        or if its NumPy computes in another way: then a snapshot of the others does.
        """
        number, clock = anchor.round, self._clock
        self._say(
            f"round {number}: this island's anchor is {anchor.digest[:16]}, and that of most parts "
            f"{right[:16]}; it adopts theirs"
        )
        shown = self._read_snapshot(snapshot_of(number, right))
        if shown is None and is_live:
            computed = self._newest(number)
            anchor = computed if computed.round == number else anchor
            # The others see this island's part, so they show their anchor.
            started, is_seen = clock.now(), self._rules.name in manifest.islands()
            while anchor.digest != right and shown is None and is_seen:
                if clock.now() - started >= self._rules.deadline_seconds:
                    break
                clock.sleep(_POLL_SECONDS[1])
                shown = self._read_snapshot(snapshot_of(number, right))
        return anchor if shown is None else shown

    # Snapshots.

    def _newest(self, until: int | None = None) -> Anchor:
        """Return the newest anchor, or that of a round, from a snapshot and the rounds since."""
        for _ in range(_ATTEMPTS):
            found = self._snapshots()
            known = [x for x in found if until is None or x[0] <= until]
            if not known:
                break
            number, key = max(known)
            if number == 0:
                key = snapshot_of(0, self.run.digest)
            anchor = self._read_snapshot(key)
            if anchor is None:
                continue
            self._newest_snapshot = max(self._newest_snapshot, number)
            try:
                return self._replayed(anchor, until)
            except _GoneError:
                continue
        if until is not None:
            return self.anchor
        raise IslandsError(
            f"{self._store.url}/snapshots: the run has no snapshot from which its newest anchor "
            "can be computed; were objects removed by hand?"
        )

    def _snapshots(self) -> list[tuple[int, str]]:
        found = [(number_of(x.key), x.key) for x in self._store.list("snapshots")]
        return [(number, key) for number, key in found if number is not None]

    def _read_snapshot(self, key: str) -> Anchor | None:
        """Return the anchor of a snapshot; None if there is none, or none that is whole."""
        shapes = self._snapshot_shapes()
        size = sum(math.prod(s) * np.dtype(d).itemsize for s, d in shapes.values())
        try:
            data = self._store.get(key, limit_of(size))
            if data is None:
                return None
            head = head_of(data, Snapshot)
            arrays = arrays_of(data, shapes)
        except (TooLargeError, FormatError) as error:
            self._say(f"{self._store.url}/{key} is unreadable: {error}")
            return None
        count = len(self._agreed.leaves)
        anchor = Anchor(head.round, arrays[:count], arrays[count:])
        if anchor.digest != head.digest or not key.endswith(head.digest[:16]):
            self._say(f"{self._store.url}/{key} has another digest than it says")
            return None
        return anchor

    def _write_snapshot(self, anchor: Anchor, run: str) -> None:
        header = Snapshot(run, anchor.round, anchor.digest)
        names = self._snapshot_shapes()
        arrays = dict(zip(names, [*anchor.values, *anchor.outer], strict=True))
        self._store.put(snapshot_of(anchor.round, anchor.digest), dump(header, arrays))

    def _snapshot_shapes(self) -> dict[str, tuple[tuple[int, ...], type]]:
        names = [x.rpartition("[")[0] for x in self._agreed.leaves]
        values = zip(names, self._optimizer.shapes, strict=True)
        return {
            **{f"anchor/{name}": (shape, np.float32) for name, shape in values},
            **{f"outer/{i}": x for i, x in enumerate(self._optimizer.state)},
        }  # type: ignore[dict-item]

    def _keep_snapshots(self, anchor: Anchor) -> None:
        """Write a snapshot if the last one is old, and remove what a newer one makes needless.

        Manifests stay: a round that was decided once can never be decided again.
        """
        every = self._rules.snapshot_every
        if anchor.round - self._newest_snapshot < every:
            return
        numbers = [number for number, _ in self._snapshots()]  # others write some, too
        self._newest_snapshot = max(numbers, default=0)
        if anchor.round - self._newest_snapshot < every:
            return
        self._write_snapshot(anchor, self.run.run)
        self._newest_snapshot = anchor.round
        keep, found = self._rules.keep, self._snapshots()
        numbers = sorted({number for number, _ in found})
        if keep is None or len(numbers) <= keep:
            return
        oldest = numbers[-keep]
        for number in range(numbers[0], oldest):
            for entry in self._store.list(folder_of(number)):
                if island_of(entry.key) is not None:
                    self._store.delete(entry.key)
        for number, key in found:
            if number < oldest:
                self._store.delete(key)

    # Reading small objects.

    def _manifest(self, number: int) -> Manifest | None:
        data = self._store.get(manifest_of(number), MAX_JSON)
        if data is None:
            return None
        where = f"{self._store.url}/{manifest_of(number)}"
        try:
            manifest = Manifest.loads(data)
        except FormatError as error:
            raise IslandsError(f"{where} is unreadable: {error}") from error
        if (manifest.run, manifest.round) != (self.run.run, number):
            raise IslandsError(f"{where} belongs to another run or round.")
        return manifest

    def _check_name(self) -> None:
        """Raise `IslandsError` if another process has this island's name."""
        key = note_of(self._rules.name)
        note = read_note(self._store, key)
        if note is not None and note.process != self._process:
            raise IslandsError(
                f"{self._store.url}/{key}: another process has joined as {self._rules.name!r}; "
                "this one stops. Give each island a name of its own."
            )

    def _note(self, updates: int, sent: int, received: int, requests: int = 0) -> None:
        traffic, name = self._store.traffic, self._rules.name
        note = Note(
            self.run.run, name, self._process, self.anchor.round, updates,
            traffic.sent - sent, traffic.received - received,
            traffic.requests.total() - requests,
        )  # fmt: skip
        self._store.put(note_of(name), note.dumps().encode())


def read_run(store: Store) -> Run | None:
    """Return the run in a store; None if there is none.

    Raises:
      IslandsError: something else.
    """
    try:
        data = store.get(RUN, MAX_JSON)
        return None if data is None else Run.loads(data)
    except (FormatError, TooLargeError) as error:
        raise IslandsError(f"{store.url}/{RUN} is unreadable: {error}") from error


def note_of(name: str) -> str:
    """Return the key of an island's note."""
    return f"islands/{name}.json"


def read_note(store: Store, key: str) -> Note | None:
    """Return what an island last did; None if nothing readable says so."""
    try:
        data = store.get(key, MAX_JSON)
        return None if data is None else Note.loads(data)
    except (FormatError, TooLargeError):
        return None


def compare(url: str, run: Run, agreed: Run) -> None:
    """Raise `IslandsError` naming what differs from the run; "" and [] are not known yet."""
    for name, what in _AGREED.items():
        theirs, mine = getattr(run, name), getattr(agreed, name)
        if mine and theirs != mine:
            if name == "leaves":
                theirs, mine = (sorted({*x} - {*y}) or x for x, y in ((theirs, mine), (mine, theirs)))
                theirs, mine = (", ".join(x[:3]) for x in (theirs, mine))
            raise IslandsError(
                f"{url}/{RUN}: {what} of this run is {theirs}, and this island has {mine}."
            )


_AGREED = {
    "leaves": "the model",
    "sync_every": "`sync_every`",
    "codec": "`codec`",
    "optimizer": "`outer_optimizer` (its program)",
}


def _norm(x: np.ndarray) -> float:
    """Return the norm of a vector, to the same bits whatever the width of a machine's SIMD."""
    columns = np.zeros(_COLUMNS)
    with np.errstate(all="ignore"):
        for start in range(0, x.size, _COLUMNS * _ROWS):
            block = x[start : start + _COLUMNS * _ROWS].astype(np.float64)
            block = np.pad(block * block, (0, -block.size % _COLUMNS)).reshape(-1, _COLUMNS)
            columns += np.add.reduce(block, axis=0)  # column by column, row after row
    return math.sqrt(math.fsum(columns)) if np.isfinite(columns).all() else math.inf


_COLUMNS, _ROWS = 1 << 10, 1 << 10
