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
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..algorithms import NormWeighted
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
    missing_of,
    number_of,
    part_of,
    sha256,
    snapshot_of,
)
from ._optimizer import HostOptimizer
from ._run import compare, note_of, read_note, read_run
from ._store import Clock, IslandsError, Store, StoreError, TooLargeError
from ._wire import Wire, divided, joined

_POLL_SECONDS = 0.05, 2.0  # the first and the longest pause between two looks at a round
_PROGRESS_SECONDS = 30.0


class _GoneError(Exception):
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
class _Received:
    """A part as an island has read it.

    Attributes:
      norm: that of its displacement.
      why: why it is left out; None if it counts.
    """

    key: str
    header: Part | None = None
    sent: np.ndarray | None = None
    norm: float = 0.0
    why: str | None = None


class _Sent(NamedTuple):
    """The part of this island in a round that is not decided yet, whether or not it is there."""

    key: str
    header: Part
    sent: np.ndarray  # the payload
    own: np.ndarray  # the displacement
    lost: np.ndarray | None  # what the codec will have lost


class Outcome(NamedTuple):
    """The parameters from which an island goes on.

    Attributes:
      anchor: the newest anchor.
      rest: displacement from it that the island keeps; None: none, it starts at the anchor.
      is_in: whether the round counted this island's progress.
    """

    anchor: Anchor
    rest: np.ndarray | None = None
    is_in: bool = False


class Rounds:
    """The rounds of a run.

    Args:
      store: the store that holds the run.
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
        self._was_out = False  # whether the last round was decided without this island
        self._counted: dict[int, set[str]] = {}  # by round that was replayed: islands that counted
        self._part_limit = limit_of(wire.shapes)
        self._snapshot_limit = limit_of(self._snapshot_shapes())
        self.lost: np.ndarray | None = None

    @property
    def url(self) -> str:
        """The URL of the run."""
        return self._store.url

    # Joining.

    @np.errstate(all="ignore")  # what is not finite is looked for where it matters
    def join(self, start: Sequence[np.ndarray], known: int = 0) -> None:
        """Join the run in the store, or begin it.

        Args:
          start: the values with which it would begin.
          known: the mark of the run to which they belong; 0: none, so they may begin one.

        Raises:
          ValueError: it would begin the run with values that are not finite.
          IslandsError: another run's bucket, or a run whose anchor can't be read.
          StoreError: the store does not answer.
        """
        self._store.begin()
        run = read_run(self._store)
        if known and (run is None or run.mark() != known):
            found = "holds no run" if run is None else f"holds {run.run}"
            raise IslandsError(
                f"{self._store.url}: the state of this island is of the run {known:08x}..., and "
                f"this bucket {found}. Give the bucket of its run, or new parameters."
            )
        if run is None and self._store.list("rounds"):
            run = read_run(self._store)  # another island may just have begun it
            if run is None:
                raise IslandsError(
                    f"{self._store.url} holds rounds of a run and no {RUN}: was it removed? Put it "
                    "back, or take an empty folder."
                )
        if run is None:
            if not _are_finite(start):
                raise ValueError("islands: `state` has parameters that are not finite.")
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
        self.anchor, _ = self._reach()
        self._announce()
        self._note(0, self._store.traffic.sent, self._store.traffic.received)

    @np.errstate(all="ignore")
    def resume(
        self, number: int, values: Sequence[np.ndarray], lost: np.ndarray | None = None
    ) -> Outcome | None:
        """Return where an island goes on that was saved; None: where it is.

        Args:
          number: the round from whose anchor `values` were trained.
          values: the island's parameters.
          lost: what the codec had not sent yet, with error feedback.
        """
        if number > self.anchor.round:
            raise IslandsError(
                f"{self._store.url}: the state of this island is of round {number}, and the run "
                f"has come to {self.anchor.round} only: was the bucket put back to an older state?"
            )
        self.lost = self._or_anew(lost)
        if number == self.anchor.round:
            return None
        share, name = self._rules.late_share, self._rules.name
        last = self.anchor.round if share or self.lost is not None else number + 1
        manifests = map(self._manifest, range(number, last))
        listed = [x.round for x in manifests if x is not None and name in x.islands()]
        # Of a round that was cleaned up nobody knows whether it left the part out.
        if any(name in self._counted.get(x, {name}) for x in listed):
            self._say(
                f"an earlier process has contributed since round {number}: progress that was "
                "saved is not sent again"
            )
            is_in = listed[0] == number and _are_finite(values)  # as if this one had sent it
            return Outcome(self.anchor, self._of_an_earlier_process(), is_in)
        start = self._anchor_of(number) if share else None
        if start is None:
            self._say(
                f"the run has come to round {self.anchor.round}; progress since round {number} is "
                "dropped"
            )
            return Outcome(self.anchor)
        rest = (joined(start.values) - joined(values)) * np.float32(share)
        return Outcome(self.anchor, self._or_dropped(rest, number))

    # One exchange.

    @np.errstate(all="ignore")
    def exchange(self, values: Sequence[np.ndarray], weight: float, updates: int) -> Outcome | None:
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
        self._store.begin()
        own = joined([x - y for x, y in zip(self.anchor.values, values, strict=True)])
        try:
            self._check_name()
            manifest = self._manifest(self.anchor.round)
            if manifest is None:
                self._send(own, weight, updates)
                manifest = self._decided()
            anchor, counted = self._reach(manifest)
        except StoreError as error:
            self._say(f"{error}. Training goes on; the next exchange sends this progress, too.")
            return None
        sent = self._waiting
        # What was removed before this island could read it was listed, so the others counted it.
        is_in = sent is not None and sent.key in (manifest.parts if counted is None else counted)
        is_in = is_in and _are_finite([own])
        rest = self._or_dropped(self._after(own, manifest, counted), manifest.round)
        closed, self.anchor, self._waiting = self.anchor, anchor, None
        try:
            self.anchor = self._replayed(anchor)
            is_out = self._rules.name not in manifest.islands()
            if self.anchor.round > closed.round + 1 or is_out:
                self._announce()
            if is_out and self._was_out and rest is not None:
                # The others wait for it, but not for so long as it takes.
                self._send(rest, weight, updates)
            self._was_out = is_out
            if manifest.author == self._rules.name:
                self._keep_snapshots(anchor)
            self._check_name()
            self._note(updates, *before)
        except (StoreError, _GoneError) as error:
            self._say(f"after round {closed.round}: {error}")
        return Outcome(self.anchor, rest, is_in)

    @np.errstate(all="ignore")
    def landed(
        self, outcome: Outcome, taken: Sequence[np.ndarray], values: Sequence[np.ndarray]
    ) -> Outcome:
        """Return an outcome beside which the island trained: what it keeps of that, as of the rest.

        Args:
          outcome: the outcome of the exchange of `taken`.
          taken: the island's parameters when the exchange began.
          values: the island's parameters now.
        """
        if outcome.rest is None or outcome.is_in:
            return outcome
        since = (joined(taken) - joined(values)) * np.float32(self._rules.late_share)
        rest = self._or_dropped(outcome.rest + since, outcome.anchor.round)
        return outcome._replace(rest=rest)

    def _announce(self) -> None:
        """Let the others wait for this island in the open round: it was not in the last one.

        Else it would never meet them: it begins later than they do, so it would arrive later,
        again and again.
        """
        key = part_of(self.anchor.round, self._rules.name, self._process, "joins")
        self._store.put(key, b"{}")

    def _send(self, own: np.ndarray, weight: float, updates: int) -> None:
        """Put this island's part into the open round.

        An exchange that failed may have put it there already, so it stays the same.
        """
        if self._waiting is None:
            # Before the request, which may take effect and have no answer.
            self._waiting = self._part(own, weight, updates)
        self._put(self._waiting)

    def _put(self, part: _Sent) -> None:
        data = dump(part.header, dict.fromkeys(self._wire.shapes, part.sent))
        self._store.put(part.key, data)

    def _part(self, own: np.ndarray, weight: float, updates: int) -> _Sent:
        keeps_lost, number, name = self._wire.keeps_lost, self.anchor.round, self._rules.name
        part = own if not keeps_lost or self.lost is None else own + self.lost
        sent = self._wire.encode(part)
        header = Part(
            self.run.run, number, name, self.anchor.digest, weight, updates, sha256(sent)
        )  # fmt: skip
        lost = part - self._wire.decode(sent) if keeps_lost else None
        return _Sent(part_of(number, name, self._process), header, sent, own, lost)

    def _decided(self) -> Manifest:
        """Wait until the open round is decided, and return its manifest; close it if it can be.

        It can be if all have contributed that took part in the last round or join in this one, or
        after the deadline, if there is a quorum.
        """
        assert self._waiting is not None
        number, rules, clock = self.anchor.round, self._rules, self._clock
        done = said = clock.now()
        before = self._manifest(number - 1) if number else None
        expected = set(before.islands()) if before else set()
        pause, longest = _POLL_SECONDS
        while True:
            self._store.begin()
            manifest = self._manifest(number)
            if manifest is not None:
                return manifest
            present, joining, is_listed = self._present(number)
            missing, waited = (expected | joining) - present.keys(), clock.now() - done
            left = rules.deadline_seconds - waited
            if len(present) >= rules.quorum and (not missing or left <= 0):
                return self._close(present)
            if left <= 0 and not is_listed:  # the store lost it, and the others wait for it
                self._put(self._waiting)
            if clock.now() - said >= _PROGRESS_SECONDS:
                said = clock.now()
                whom = ", ".join(sorted(missing)) or "other islands"
                until = f"for {left:.0f} s at most"
                if len(present) < rules.quorum:
                    until = f"{len(present)} of quorum={rules.quorum} parts are there"
                self._say(f"round {number}: waiting for {whom}, {until}")
            clock.sleep(max(0.01, min(pause, left)) if left > 0 else pause)
            pause = min(1.5 * pause, longest)

    def _present(self, number: int) -> tuple[dict[str, list[str]], set[str], bool]:
        """Return who is there in the open round.

        Returns:
          present: maps an island to the keys of its parts, from old to new; an island that was
            started again may have several.
          joining: islands that join in this round.
          is_listed: whether the store lists the part of this process.
        """
        assert self._waiting is not None
        entries, mine = self._store.list(folder_of(number)), self._waiting.key
        keys = [x.key for x in sorted(entries, key=lambda x: (x.modified, x.key))]
        present: dict[str, list[str]] = {}
        for key in [*(x for x in keys if x != mine), mine]:  # listings may lag behind
            if island := island_of(key):
                present.setdefault(island, []).append(key)
        joining = {island for key in keys if (island := island_of(key, "joins"))}
        return present, joining, mine in keys

    def _newest_readable(self, keys: Sequence[str]) -> str:
        """Return the newest part that is not left out for itself; of a single one nobody asks."""
        for key in reversed(keys if len(keys) > 1 else ()):
            try:
                if self._read_part(key, self.anchor.round).why is None:
                    return key
            except _GoneError:
                continue
        return keys[-1]

    def _close(self, present: dict[str, list[str]]) -> Manifest:
        """Create the manifest of the open round; return the one that was created first."""
        number = self.anchor.round
        parts = [self._newest_readable(present[island]) for island in sorted(present)]
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
        sent, name, number = self._waiting, self._rules.name, manifest.round
        if sent is not None and sent.key in manifest.parts:
            if counted is None or sent.key in counted:
                self.lost = self._or_anew(sent.lost)
            # Progress since an exchange that the store did not let finish is in no part yet.
            return None if sent.own is own else own - sent.own
        earlier = next((key for key in manifest.parts if island_of(key) == name), None)
        if earlier is not None and (counted is None or earlier in counted):
            self._say(f"round {number}: an earlier process of {name} has contributed already")
            return self._of_an_earlier_process()
        share = self._rules.late_share
        what = f"carries {share:g} of its progress over" if share else "drops its progress"
        self._say(f"round {number} closed without {name}, which {what}")
        return own * np.float32(share) if share else None

    def _of_an_earlier_process(self) -> None:
        """Forget what an earlier process of this island has sent, maybe; nothing counts twice."""
        if self.lost is not None:
            self.lost = np.zeros_like(self.lost)

    def _or_anew(self, lost: np.ndarray | None) -> np.ndarray | None:
        """Return what a codec has not sent yet; zeros if it is not finite."""
        if lost is None or _are_finite([lost]):
            return lost
        self._say("what the codec had not sent is not finite, and starts anew")
        return np.zeros_like(lost)

    def _or_dropped(self, rest: np.ndarray | None, number: int) -> np.ndarray | None:
        """Return progress that an island keeps; None if it is not finite."""
        if rest is None or _are_finite([rest]):
            return rest
        self._say(f"round {number}: progress that is not finite is dropped")
        return None

    # From anchor to anchor.

    def _reach(self, manifest: Manifest | None = None) -> tuple[Anchor, set[str] | None]:
        """Return the anchor after a round and the keys of its parts that counted, or the newest.

        Parts and snapshots may be removed meanwhile, and a listing may lag behind. So it looks
        again for a while. A part that is still not there after the deadline was lost: one object,
        which the store creates once, tells all islands to leave it out.

        Args:
          manifest: that of the round of this island's anchor; None: the newest anchor.
        """
        started = self._clock.now()
        while True:
            gone = None
            try:
                if manifest is not None:
                    return self._stepped(self.anchor, manifest, is_live=True)
                anchor = self._computed()
                if anchor is not None:
                    return anchor, None
            except _GoneError as error:
                gone = error.key
            waited = self._clock.now() - started
            if gone is None and waited >= self._store.patience:
                raise StoreError(
                    f"{self._store.url}/snapshots: no snapshot leads to the newest anchor; were "
                    "objects removed by hand?"
                )
            if gone is None:
                self._clock.sleep(_POLL_SECONDS[1])
            elif self._was_removed(gone, started):
                manifest = None  # the newest snapshot is after this round

    def _was_removed(self, part: str, started: float) -> bool:
        """Wait until a listed part is there, or will never be; return whether it was cleaned up."""
        number, longest = number_of(part) or 0, _POLL_SECONDS[1]
        while True:
            # A part is removed after a newer snapshot was written.
            if any((number_of(x.key) or 0) > number for x in self._store.list("snapshots")):
                return True
            keys = (missing_of(part), MAX_JSON), (part, self._part_limit)
            if any(self._store.get(key, limit) is not None for key, limit in keys):
                return False
            if self._clock.now() - started >= max(self._rules.deadline_seconds, longest):
                self._store.create(missing_of(part), b"{}")
                return False
            self._clock.sleep(longest)

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
        received = [self._read_part(key, anchor.round) for key in manifest.parts]
        anchor = self._agreed_anchor(anchor, manifest, received, is_live)
        counting = [x for x in received if x.why is None]
        norms, most = np.array([x.norm for x in counting]), self.run.max_norm_ratio
        factors = NormWeighted(most).factors(norms) if counting else ()
        for part, factor in zip(counting, factors, strict=True):
            if factor == 0:
                usual = np.median(norms)
                part.why = f"has norm {part.norm:.3g}, above {most:g} times {usual:.3g}, the median"
        for part in received:
            if part.why is not None:
                who = island_of(part.key)
                self._say(f"round {anchor.round}: the part of {who} is left out: it {part.why}")
        counting = [x for x in counting if x.why is None]
        values, outer = anchor.values, anchor.outer
        if counting:
            mean = divided(self._mean(counting), anchor.values)
            values, outer = self._optimizer.step(mean, anchor.outer, anchor.values)
            if not _are_finite([*values, *outer]):
                self._say(f"round {anchor.round}: an outer step that is not finite is not taken")
                values, outer, counting = anchor.values, anchor.outer, []
        if not is_live:
            self._counted[anchor.round] = {island_of(x.key) or "" for x in counting}
        return Anchor(anchor.round + 1, values, outer), {x.key for x in counting}

    def _mean(self, parts: list[_Received]) -> np.ndarray:
        """Return the weighted mean, summed in order, in float32."""
        weights = [x.header.weight for x in parts if x.header is not None]
        if math.isinf(sum(weights)):
            weights = [math.ldexp(x, -64) for x in weights]  # exact, and so are their shares
        whole, mean = sum(weights), None
        for part, weight in zip(parts, weights, strict=True):
            assert part.sent is not None
            term = self._wire.decode(part.sent) * np.float32(weight / whole)
            mean = term if mean is None else np.add(mean, term, out=mean)
        assert mean is not None
        return mean

    def _read_part(self, key: str, number: int) -> _Received:
        """Return a part, or why it is left out.

        This island's own is read, too: what the store holds decides, for all alike.

        Raises:
          _GoneError: it is not there.
        """
        part = _Received(key)
        try:
            data = self._store.get(key, self._part_limit)
            if data is None and self._store.get(missing_of(key), MAX_JSON) is not None:
                part.why = "is missing in the store"
                return part
            if data is None:
                raise _GoneError(key)
            part.header = head = head_of(data, Part)
            (part.sent,) = arrays_of(data, self._wire.shapes)
        except (TooLargeError, FormatError) as error:
            part.why = f"is unreadable: {error}"
            return part
        if (head.run, head.round, head.island) != (self.run.run, number, island_of(key)):
            part.why = "belongs to another run, round or island"
        elif head.sha256 != sha256(part.sent):
            part.why = "has another SHA-256 than its header says"
        elif head.weight <= 0:
            part.why = f"has weight {head.weight:g}"
        else:
            waiting = self._waiting
            if waiting is not None and waiting.key == key and head.sha256 == waiting.header.sha256:
                part.sent = waiting.sent  # the same bytes, once in memory
            part.norm = _norm(self._wire.decode(part.sent))
            if not math.isfinite(part.norm):
                part.why = "holds values that are not finite"
        return part

    def _agreed_anchor(
        self, anchor: Anchor, manifest: Manifest, received: list[_Received], is_live: bool
    ) -> Anchor:
        """Return the anchor from which most parts are measured, and leave out the others.

        Of equally many, islands that took part in the last round decide: one that has joined since
        may have read damaged parts.
        """
        cast = {island_of(x.key): x.header.anchor for x in received if x.header and x.why is None}
        if not cast:
            return anchor
        votes, before = Counter(cast.values()), None
        if len(votes) > 1 and anchor.round:
            before = self._manifest(anchor.round - 1)
        old = Counter(cast.get(x) for x in (before.islands() if before else ()))
        right = min(votes, key=lambda digest: (-votes[digest], -old[digest], digest))
        if right != anchor.digest:
            anchor = self._healed(anchor, manifest, right, is_live)
        for part in received:
            if part.why is None and part.header and part.header.anchor != anchor.digest:
                part.why = f"is measured from another anchor, {part.header.anchor[:16]}"
        if len(votes) > 1 and anchor.digest == right and is_live:
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
            anchor = self._anchor_of(number) or anchor
            # The others see this island's part, so they show their anchor.
            started, is_seen = clock.now(), self._rules.name in manifest.islands()
            while anchor.digest != right and shown is None and is_seen:
                if clock.now() - started >= self._rules.deadline_seconds:
                    break
                clock.sleep(_POLL_SECONDS[1])
                shown = self._read_snapshot(snapshot_of(number, right))
        return anchor if shown is None else shown

    # Snapshots.

    def _anchor_of(self, number: int) -> Anchor | None:
        """Return the anchor of a round; None if nothing in the store leads there."""
        try:
            return self._computed(number)
        except _GoneError:
            return None

    def _computed(self, until: int | None = None) -> Anchor | None:
        """Return the newest anchor, or that of a round; None if there is no snapshot before it.

        Raises:
          _GoneError: a part since the newest snapshot is not there.
        """
        first = snapshot_of(0, self.run.digest)
        for key in sorted({first, *(x.key for x in self._store.list("snapshots"))}, reverse=True):
            number = number_of(key)
            if number is None or (until is not None and number > until):
                continue
            if number == 0 and key != first:  # of another island that would have begun the run
                continue
            anchor = self._read_snapshot(key)
            if anchor is not None:
                return self._replayed(anchor, until)
        return None

    def _read_snapshot(self, key: str) -> Anchor | None:
        """Return the anchor of a snapshot; None if there is none, or none that is whole."""
        shapes = self._snapshot_shapes()
        try:
            data = self._store.get(key, self._snapshot_limit)
            if data is None:
                return None
            head = head_of(data, Snapshot)
            arrays = arrays_of(data, shapes)
        except (TooLargeError, FormatError) as error:
            self._say(f"{self._store.url}/{key} is unreadable: {error}")
            return None
        count = len(self._agreed.leaves)
        anchor = Anchor(head.round, arrays[:count], arrays[count:])
        # Two islands that would begin a run with the same values write the same first snapshot.
        is_of_run = anchor.round == 0 or head.run == self.run.run
        if not is_of_run or key != snapshot_of(anchor.round, anchor.digest):
            self._say(f"{self._store.url}/{key} is of another run, round or digest")
            return None
        return anchor

    def _write_snapshot(self, anchor: Anchor, run: str) -> None:
        header = Snapshot(run, anchor.round, anchor.digest)
        names = self._snapshot_shapes()
        arrays = dict(zip(names, [*anchor.values, *anchor.outer], strict=True))
        self._store.put(snapshot_of(anchor.round, anchor.digest), dump(header, arrays))

    def _snapshot_shapes(self) -> dict[str, tuple[tuple[int, ...], Any]]:
        names = [x.rpartition("[")[0] for x in self._agreed.leaves]
        values = zip(names, self._optimizer.shapes, strict=True)
        return {
            **{f"anchor/{name}": (shape, np.float32) for name, shape in values},
            **{f"outer/{i}": x for i, x in enumerate(self._optimizer.state)},
        }

    def _keep_snapshots(self, anchor: Anchor) -> None:
        """Write a snapshot if it is time, and remove what newer ones make needless.

        Manifests stay: a round that was decided once can never be decided again.
        """
        if anchor.round % self._rules.snapshot_every:
            return
        self._write_snapshot(anchor, self.run.run)
        if (keep := self._rules.keep) is None:
            return
        found = {x.key: number_of(x.key) or 0 for x in self._store.list("snapshots")}
        numbers = sorted({*found.values()})
        if len(numbers) <= keep:
            return
        oldest = numbers[-keep]
        for number in range(numbers[0], oldest):
            for entry in self._store.list(folder_of(number)):
                if entry.key != manifest_of(number):
                    self._store.delete(entry.key)
        for key, number in found.items():
            if number < oldest:
                self._store.delete(key)

    # Reading small objects.

    def _manifest(self, number: int) -> Manifest | None:
        where = f"{self._store.url}/{manifest_of(number)}"
        try:
            data = self._store.get(manifest_of(number), MAX_JSON)
            if data is None:
                return None
            manifest = Manifest.loads(data)
        except (FormatError, TooLargeError) as error:
            raise IslandsError(f"{where} is unreadable: {error}") from error
        if (manifest.run, manifest.round) != (self.run.run, number):
            raise IslandsError(f"{where} belongs to another run or round.")
        islands = {island_of(key) for key in manifest.parts if number_of(key) == number}
        if None in islands or len(islands) != len(manifest.parts):
            raise IslandsError(f"{where} lists other things than one part of each island.")
        return manifest

    def _check_name(self) -> None:
        """Raise `IslandsError` if another process has this island's name, or the run is gone."""
        key = note_of(self._rules.name)
        note = read_note(self._store, key)
        if note is not None and note.run == self.run.run and note.process != self._process:
            raise IslandsError(
                f"{self._store.url}/{key}: another process has joined as {self._rules.name!r}; "
                "this one stops. Give each island a name of its own."
            )
        if note is None or note.run != self.run.run:
            run = read_run(self._store)
            if run is None or run.run != self.run.run:
                found = "" if run is None else f", but {run.run}"
                raise IslandsError(
                    f"{self._store.url}/{RUN}: the run {self.run.run} of this island is not here "
                    f"any more{found}. Was the bucket emptied?"
                )

    def _note(self, updates: int, sent: int, received: int) -> None:
        traffic, name = self._store.traffic, self._rules.name
        note = Note(
            self.run.run, name, self._process, self.anchor.round, updates,
            traffic.sent - sent, traffic.received - received,
        )  # fmt: skip
        self._store.put(note_of(name), note.dumps().encode())


def _are_finite(arrays: Sequence[np.ndarray]) -> bool:
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


_COLUMNS, _ROWS = 1 << 10, 1 << 10
