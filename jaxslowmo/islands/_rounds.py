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
from typing import NamedTuple

import numpy as np

from ..algorithms import NormWeighted
from ._format import (
    MAX_JSON,
    RUN_KEY,
    FormatError,
    Manifest,
    Heartbeat,
    PartHeader,
    RunSettings,
    Shapes,
    SnapshotHeader,
    PartCodec,
    check_settings,
    concatenate,
    dump,
    manifest_key,
    max_num_bytes,
    missing_key,
    heartbeat_key,
    parse_arrays,
    parse_header,
    parse_island,
    parse_round,
    part_key,
    read_heartbeat,
    read_run,
    round_folder,
    sha256,
    snapshot_key,
    split_like,
)
from ._optimizer import HostOptimizer
from ._store import IslandsError, RetryingStore, StoreError, TooLargeError

_POLL_SECONDS = 0.05, 2.0  # the first and the longest pause between two looks at a round
_PROGRESS_SECONDS = 30.0


class _PartNotFoundError(Exception):
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
      norm: that of its displacement.
      rejection: why it is left out; None if it counts.
    """

    key: str
    header: PartHeader | None = None
    payload: np.ndarray | None = None
    norm: float = 0.0
    rejection: str | None = None


class _PendingPart(NamedTuple):
    """The part of this island in a round that is not decided yet, whether or not it is there."""

    key: str
    header: PartHeader
    payload: np.ndarray
    displacement: np.ndarray
    residual: np.ndarray | None  # what the codec will not have sent


class Outcome(NamedTuple):
    """The parameters from which an island goes on.

    Attributes:
      anchor: the newest anchor.
      remainder: displacement from it that the island keeps; None: none, it starts at the anchor.
      is_counted: whether the round counted this island's progress.
    """

    anchor: Anchor
    remainder: np.ndarray | None = None
    is_counted: bool = False


class Rounds:
    """The rounds of a run.

    Args:
      store: the store that holds the run.
      rules: how this island takes part.
      optimizer: the outer optimizer.
      wire: how displacements travel.
      settings: what all islands must agree on; `run` and `digest` are those of the store's run.
      log: function that shows one line to the user.

    Attributes:
      anchor: the anchor from which this island's displacement is measured.
      run: the run.
      residual: what the codec has not sent yet, with error feedback.
    """

    anchor: Anchor
    run: RunSettings

    def __init__(
        self,
        store: RetryingStore,
        rules: Rules,
        optimizer: HostOptimizer,
        wire: PartCodec,
        settings: RunSettings,
        log: Callable[[str], None],
    ) -> None:
        self._store, self._rules, self._optimizer, self._part_codec = store, rules, optimizer, wire
        self._settings, self._clock, self._log = settings, store.clock, log
        self._process = secrets.token_hex(8)
        self._pending_part: _PendingPart | None = None
        self._missed_last_round = False  # whether the last round was decided without this island
        self._counted: dict[int, set[str]] = {}  # by round that was replayed: islands that counted
        self._part_limit = max_num_bytes(wire.shapes)
        self._snapshot_limit = max_num_bytes(self._snapshot_shapes())
        self.residual: np.ndarray | None = None

    # Joining.

    @np.errstate(all="ignore")  # what is not finite is looked for where it matters
    def join(self, start: Sequence[np.ndarray], known: int = 0) -> None:
        """Join the run in the store, or begin it.

        Args:
          start: the values with which it would begin.
          known: the `RunSettings.short_id` of the run to which they belong; 0: none, so they may begin one.

        Raises:
          ValueError: it would begin the run with values that are not finite.
          IslandsError: another run's bucket, or a run whose anchor can't be read.
          StoreError: the store does not answer.
        """
        self._store.restart_patience()
        run = read_run(self._store)
        if known and (run is None or run.short_id() != known):
            found = "holds no run" if run is None else f"holds {run.run}"
            raise IslandsError(
                f"{self._store.url}: the state of this island is of the run {known:08x}..., and "
                f"this bucket {found}. Give the bucket of its run, or new parameters."
            )
        if run is None and self._store.list("rounds"):
            run = read_run(self._store)  # another island may just have begun it
            if run is None:
                raise IslandsError(
                    f"{self._store.url} holds rounds of a run and no {RUN_KEY}: put it back, or take "
                    "an empty folder."
                )
        if run is None:
            if not _are_finite(start):
                raise ValueError("islands: `state` has parameters that are not finite.")
            first = Anchor(0, list(start), self._optimizer.init(start))
            name = secrets.token_hex(8)
            self._write_snapshot(first, name)
            mine = RunSettings(**{**vars(self._settings), "run": name, "digest": first.digest})
            self._store.create(RUN_KEY, mine.dumps().encode())
            run = read_run(self._store)
            if run is None:
                raise StoreError(f"get {self._store.url}/{RUN_KEY}: it was written and is not there.")
        check_settings(self._store.url, run, self._settings)
        self.run, self._settings = run, run
        self.anchor, _ = self._wait_for_anchor()
        self._announce()
        self._write_heartbeat(0, self._store.traffic.sent, self._store.traffic.received)

    @np.errstate(all="ignore")
    def resume(
        self, number: int, values: Sequence[np.ndarray], residual: np.ndarray | None = None
    ) -> Outcome | None:
        """Return where an island goes on that was saved; None: where it is.

        Args:
          number: the round from whose anchor `values` were trained.
          values: the island's parameters.
          residual: what the codec had not sent yet, with error feedback.
        """
        if number > self.anchor.round:
            raise IslandsError(
                f"{self._store.url}: the state of this island is of round {number}, and the run "
                f"has come to {self.anchor.round} only: was the bucket put back to an older state?"
            )
        self.residual = self._zero_if_not_finite(residual)
        if number == self.anchor.round:
            return None
        share, name = self._rules.late_share, self._rules.name
        last = self.anchor.round if share or self.residual is not None else number + 1
        manifests = map(self._read_manifest, range(number, last))
        listed = [x.round for x in manifests if x is not None and name in x.islands()]
        # Of a round that was cleaned up nobody knows whether it left the part out.
        if any(name in self._counted.get(x, {name}) for x in listed):
            self._log(
                f"an earlier process has contributed since round {number}: progress that was "
                "saved is not sent again"
            )
            is_counted = listed[0] == number and _are_finite(values)  # as if this one had sent it
            self._reset_residual()
            return Outcome(self.anchor, None, is_counted)
        start = self._find_anchor(number) if share else None
        if start is None:
            self._log(
                f"the run has come to round {self.anchor.round}; progress since round {number} is "
                "dropped"
            )
            return Outcome(self.anchor)
        rest = (concatenate(start.values) - concatenate(values)) * np.float32(share)
        return Outcome(self.anchor, self._drop_if_not_finite(rest, number))

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
        self._store.restart_patience()
        displacement = concatenate([x - y for x, y in zip(self.anchor.values, values, strict=True)])
        try:
            self._check_name()
            manifest = self._read_manifest(self.anchor.round)
            if manifest is None:
                self._send_part(displacement, weight, updates)
                manifest = self._wait_for_manifest()
            anchor, counted = self._wait_for_anchor(manifest)
        except StoreError as error:
            self._log(f"{error}. Training goes on; the next exchange sends this progress, too.")
            return None
        pending = self._pending_part
        # What was removed before this island could read it was listed, so the others counted it.
        counted_keys = manifest.parts if counted is None else counted
        is_counted = pending is not None and pending.key in counted_keys
        is_counted = is_counted and _are_finite([displacement])
        remainder = self._remaining_displacement(displacement, manifest, counted)
        remainder = self._drop_if_not_finite(remainder, manifest.round)
        closed, self.anchor, self._pending_part = self.anchor, anchor, None
        try:
            self.anchor = self._replay(anchor)
            is_out = self._rules.name not in manifest.islands()
            if self.anchor.round > closed.round + 1 or is_out:
                self._announce()
            if is_out and self._missed_last_round and remainder is not None:
                # The others wait for it, but not for so long as it takes.
                self._send_part(remainder, weight, updates)
            self._missed_last_round = is_out
            if manifest.author == self._rules.name:
                self._rotate_snapshots(anchor)
            self._check_name()
            self._write_heartbeat(updates, *before)
        except (StoreError, _PartNotFoundError) as error:
            self._log(f"after round {closed.round}: {error}")
        return Outcome(self.anchor, remainder, is_counted)

    @np.errstate(all="ignore")
    def add_local_progress(
        self, outcome: Outcome, start_values: Sequence[np.ndarray], values: Sequence[np.ndarray]
    ) -> Outcome:
        """Return an outcome whose `remainder` has progress since the exchange began, too.

        Args:
          outcome: the outcome of the exchange of `start_values`.
          start_values: the island's parameters when the exchange began.
          values: the island's parameters now.
        """
        if outcome.remainder is None or outcome.is_counted:
            return outcome
        since = (concatenate(start_values) - concatenate(values)) * np.float32(
            self._rules.late_share
        )
        remainder = self._drop_if_not_finite(outcome.remainder + since, outcome.anchor.round)
        return outcome._replace(remainder=remainder)

    def _announce(self) -> None:
        """Let the others wait for this island in the open round: it was not in the last one.

        Else it would never meet them: it begins later than they do, so it would arrive later,
        again and again.
        """
        key = part_key(self.anchor.round, self._rules.name, self._process, "joins")
        self._store.put(key, b"{}")

    def _send_part(self, displacement: np.ndarray, weight: float, updates: int) -> None:
        """Put this island's part into the open round.

        An exchange that failed may have put it there already, so it stays the same.
        """
        if self._pending_part is None:
            # Before the request, which may take effect and have no answer.
            self._pending_part = self._make_part(displacement, weight, updates)
        self._write_part(self._pending_part)

    def _write_part(self, part: _PendingPart) -> None:
        data = dump(part.header, dict.fromkeys(self._part_codec.shapes, part.payload))
        self._store.put(part.key, data)

    def _make_part(self, displacement: np.ndarray, weight: float, updates: int) -> _PendingPart:
        number, name, part = self.anchor.round, self._rules.name, displacement
        if self._part_codec.error_feedback and self.residual is not None:
            part = displacement + self.residual
        payload = self._part_codec.encode(part)
        header = PartHeader(
            self.run.run, number, name, self.anchor.digest, weight, updates, sha256(payload)
        )  # fmt: skip
        residual = part - self._part_codec.decode(payload) if self._part_codec.error_feedback else None
        return _PendingPart(
            part_key(number, name, self._process), header, payload, displacement, residual
        )

    def _wait_for_manifest(self) -> Manifest:
        """Wait until the open round is decided, and return its manifest; close it if it can be.

        It can be if all have contributed that took part in the last round or join in this one, or
        after the deadline, if there is a quorum.
        """
        assert self._pending_part is not None
        number, rules, clock = self.anchor.round, self._rules, self._clock
        done = said = clock.now()
        before = self._read_manifest(number - 1) if number else None
        expected = set(before.islands()) if before else set()
        pause, longest = _POLL_SECONDS
        while True:
            self._store.restart_patience()
            manifest = self._read_manifest(number)
            if manifest is not None:
                return manifest
            present, joining, is_listed = self._list_parts(number)
            missing, waited = (expected | joining) - present.keys(), clock.now() - done
            left = rules.deadline_seconds - waited
            if len(present) >= rules.quorum and (not missing or left <= 0):
                return self._close_round(present)
            if left <= 0 and not is_listed:  # the store lost it, and the others wait for it
                self._write_part(self._pending_part)
            if clock.now() - said >= _PROGRESS_SECONDS:
                said = clock.now()
                whom = ", ".join(sorted(missing)) or "other islands"
                until = f"for {left:.0f} s at most"
                if len(present) < rules.quorum:
                    until = f"{len(present)} of quorum={rules.quorum} parts are there"
                self._log(f"round {number}: waiting for {whom}, {until}")
            clock.sleep(max(0.01, min(pause, left)) if left > 0 else pause)
            pause = min(1.5 * pause, longest)

    def _list_parts(self, number: int) -> tuple[dict[str, list[str]], set[str], bool]:
        """Return who is there in the open round.

        Returns:
          present: maps an island to the keys of its parts, from old to new; an island that was
            started again may have several.
          joining: islands that join in this round.
          is_listed: whether the store lists the part of this process.
        """
        assert self._pending_part is not None
        entries, mine = self._store.list(round_folder(number)), self._pending_part.key
        keys = [x.key for x in sorted(entries, key=lambda x: (x.modified, x.key))]
        present: dict[str, list[str]] = {}
        for key in [*(x for x in keys if x != mine), mine]:  # listings may lag behind
            if island := parse_island(key):
                present.setdefault(island, []).append(key)
        joining = {island for key in keys if (island := parse_island(key, "joins"))}
        return present, joining, mine in keys

    def _newest_valid_part(self, keys: Sequence[str]) -> str:
        """Return the newest part that is not left out for itself; of a single one nobody asks."""
        for key in reversed(keys if len(keys) > 1 else ()):
            try:
                if self._read_part(key, self.anchor.round).rejection is None:
                    return key
            except _PartNotFoundError:
                continue
        return keys[-1]

    def _close_round(self, present: dict[str, list[str]]) -> Manifest:
        """Create the manifest of the open round; return the one that was created first."""
        number = self.anchor.round
        parts = [self._newest_valid_part(present[island]) for island in sorted(present)]
        mine = Manifest(self.run.run, number, self._rules.name, parts)
        if self._store.create(manifest_key(number), mine.dumps().encode()):
            return mine
        manifest = self._read_manifest(number)
        if manifest is None:
            raise StoreError(
                f"get {self._store.url}/{manifest_key(number)}: it is there and is not"
            )
        return manifest

    def _remaining_displacement(
        self, displacement: np.ndarray, manifest: Manifest, counted: set[str] | None
    ) -> np.ndarray | None:
        """Return the displacement that this island keeps, after a round was decided."""
        pending, name, number = self._pending_part, self._rules.name, manifest.round
        if pending is not None and pending.key in manifest.parts:
            if counted is None or pending.key in counted:
                self.residual = self._zero_if_not_finite(pending.residual)
            # Progress since an exchange that the store did not let finish is in no part yet.
            sent = pending.displacement
            return None if sent is displacement else displacement - sent
        earlier = next((key for key in manifest.parts if parse_island(key) == name), None)
        if earlier is not None and (counted is None or earlier in counted):
            self._log(f"round {number}: an earlier process of {name} has contributed already")
            self._reset_residual()
            return None
        share = self._rules.late_share
        what = f"carries {share:g} of its progress over" if share else "drops its progress"
        self._log(f"round {number} closed without {name}, which {what}")
        return displacement * np.float32(share) if share else None

    def _reset_residual(self) -> None:
        """Forget what an earlier process of this island has sent, maybe; nothing counts twice."""
        if self.residual is not None:
            self.residual = np.zeros_like(self.residual)

    def _zero_if_not_finite(self, residual: np.ndarray | None) -> np.ndarray | None:
        """Return what a codec has not sent yet; zeros if it is not finite."""
        if residual is None or _are_finite([residual]):
            return residual
        self._log("what the codec had not sent is not finite, and starts anew")
        return np.zeros_like(residual)

    def _drop_if_not_finite(self, rest: np.ndarray | None, number: int) -> np.ndarray | None:
        """Return progress that an island keeps; None if it is not finite."""
        if rest is None or _are_finite([rest]):
            return rest
        self._log(f"round {number}: progress that is not finite is dropped")
        return None

    # From anchor to anchor.

    def _wait_for_anchor(self, manifest: Manifest | None = None) -> tuple[Anchor, set[str] | None]:
        """Return the anchor after a round and the keys of its parts that counted, or the newest.

        Parts and snapshots may be removed meanwhile, and a listing may lag behind. So it looks
        again for a while. A part that is still not there after the deadline was lost: one object,
        which the store creates once, tells all islands to leave it out.

        Args:
          manifest: that of the round of this island's anchor; None: the newest anchor.
        """
        start_time = self._clock.now()
        while True:
            gone = None
            try:
                if manifest is not None:
                    return self._step_anchor(self.anchor, manifest, is_live=True)
                anchor = self._compute_anchor()
                if anchor is not None:
                    return anchor, None
            except _PartNotFoundError as error:
                gone = error.key
            waited = self._clock.now() - start_time
            if gone is None and waited >= self._store.patience:
                raise StoreError(
                    f"{self._store.url}/snapshots: no snapshot leads to the newest anchor; were "
                    "objects removed by hand?"
                )
            if gone is None:
                self._clock.sleep(_POLL_SECONDS[1])
            elif self._wait_for_part(gone, start_time):
                manifest = None  # the newest snapshot is after this round

    def _wait_for_part(self, part: str, start_time: float) -> bool:
        """Wait until a listed part is there, or will never be; return whether it was cleaned up."""
        number, longest = parse_round(part) or 0, _POLL_SECONDS[1]
        while True:
            # A part is removed after a newer snapshot was written.
            if any((parse_round(x.key) or 0) > number for x in self._store.list("snapshots")):
                return True
            keys = (missing_key(part), MAX_JSON), (part, self._part_limit)
            if any(self._store.get(key, limit) is not None for key, limit in keys):
                return False
            if self._clock.now() - start_time >= max(self._rules.deadline_seconds, longest):
                self._store.create(missing_key(part), b"{}")
                return False
            self._clock.sleep(longest)

    def _replay(self, anchor: Anchor, until: int | None = None) -> Anchor:
        """Return the anchor after all rounds that are decided."""
        while until is None or anchor.round < until:
            manifest = self._read_manifest(anchor.round)
            if manifest is None:
                return anchor
            anchor, _ = self._step_anchor(anchor, manifest)
        return anchor

    def _step_anchor(
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
        anchor = self._reject_other_anchors(anchor, manifest, received, is_live)
        counting = [x for x in received if x.rejection is None]
        norms, most = np.array([x.norm for x in counting]), self.run.max_norm_ratio
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
            if not _are_finite([*values, *outer]):
                self._log(f"round {anchor.round}: an outer step that is not finite is not taken")
                values, outer, counting = anchor.values, anchor.outer, []
        if not is_live:
            self._counted[anchor.round] = {parse_island(x.key) or "" for x in counting}
        return Anchor(anchor.round + 1, values, outer), {x.key for x in counting}

    def _weighted_mean(self, parts: list[_ReceivedPart]) -> np.ndarray:
        """Return the weighted mean, summed in order, in float32."""
        weights = [x.header.weight for x in parts if x.header is not None]
        if math.isinf(sum(weights)):
            weights = [math.ldexp(x, -64) for x in weights]  # exact, and so are their shares
        whole, mean = sum(weights), None
        for part, weight in zip(parts, weights, strict=True):
            assert part.payload is not None
            term = self._part_codec.decode(part.payload) * np.float32(weight / whole)
            mean = term if mean is None else np.add(mean, term, out=mean)
        assert mean is not None
        return mean

    def _read_part(self, key: str, number: int) -> _ReceivedPart:
        """Return a part, or why it is left out.

        This island's own is read, too: what the store holds decides, for all alike.

        Raises:
          _PartNotFoundError: it is not there.
        """
        part = _ReceivedPart(key)
        try:
            data = self._store.get(key, self._part_limit)
            if data is None and self._store.get(missing_key(key), MAX_JSON) is not None:
                part.rejection = "is missing in the store"
                return part
            if data is None:
                raise _PartNotFoundError(key)
            part.header = head = parse_header(data, PartHeader)
            (part.payload,) = parse_arrays(data, self._part_codec.shapes)
        except (TooLargeError, FormatError) as error:
            part.rejection = f"is unreadable: {error}"
            return part
        if (head.run, head.round, head.island) != (self.run.run, number, parse_island(key)):
            part.rejection = "belongs to another run, round or island"
        elif head.sha256 != sha256(part.payload):
            part.rejection = "has another SHA-256 than its header says"
        elif head.weight <= 0:
            part.rejection = f"has weight {head.weight:g}"
        else:
            pending = self._pending_part
            if pending is not None and pending.key == key and head.sha256 == pending.header.sha256:
                part.payload = pending.payload  # the same bytes, once in memory
            part.norm = _norm(self._part_codec.decode(part.payload))
            if not math.isfinite(part.norm):
                part.rejection = "holds values that are not finite"
        return part

    def _reject_other_anchors(
        self, anchor: Anchor, manifest: Manifest, received: list[_ReceivedPart], is_live: bool
    ) -> Anchor:
        """Return the anchor from which most parts are measured, and leave out the others.

        Of equally many, islands that took part in the last round decide: one that has joined since
        may have read damaged parts.
        """
        cast = {
            parse_island(x.key): x.header.anchor
            for x in received
            if x.header and x.rejection is None
        }
        if not cast:
            return anchor
        votes, before = Counter(cast.values()), None
        if len(votes) > 1 and anchor.round:
            before = self._read_manifest(anchor.round - 1)
        old = Counter(cast.get(x) for x in (before.islands() if before else ()))
        right = min(votes, key=lambda digest: (-votes[digest], -old[digest], digest))
        if right != anchor.digest:
            anchor = self._recover_anchor(anchor, manifest, right, is_live)
        for part in received:
            if part.rejection is None and part.header and part.header.anchor != anchor.digest:
                part.rejection = f"is measured from another anchor, {part.header.anchor[:16]}"
        if len(votes) > 1 and anchor.digest == right and is_live:
            self._write_snapshot(anchor, self.run.run)  # for those who have another one
        return anchor

    def _recover_anchor(
        self, anchor: Anchor, manifest: Manifest, right: str, is_live: bool
    ) -> Anchor:
        """Return the anchor of the majority; the computed one if nobody shows theirs.

        An anchor differs after an error of this machine's memory, which computing it again heals,
        or if its NumPy computes in another way: then a snapshot of the others does.
        """
        number, clock = anchor.round, self._clock
        self._log(
            f"round {number}: this island's anchor is {anchor.digest[:16]}, and that of most parts "
            f"{right[:16]}; it adopts theirs"
        )
        shown = self._read_snapshot(snapshot_key(number, right))
        if shown is None and is_live:
            anchor = self._find_anchor(number) or anchor
            # The others see this island's part, so they show their anchor.
            start_time, is_seen = clock.now(), self._rules.name in manifest.islands()
            while anchor.digest != right and shown is None and is_seen:
                if clock.now() - start_time >= self._rules.deadline_seconds:
                    break
                clock.sleep(_POLL_SECONDS[1])
                shown = self._read_snapshot(snapshot_key(number, right))
        return anchor if shown is None else shown

    # Snapshots.

    def _find_anchor(self, number: int) -> Anchor | None:
        """Return the anchor of a round; None if nothing in the store leads there."""
        try:
            return self._compute_anchor(number)
        except _PartNotFoundError:
            return None

    def _compute_anchor(self, until: int | None = None) -> Anchor | None:
        """Return the newest anchor, or that of a round; None if there is no snapshot before it.

        Raises:
          _PartNotFoundError: a part since the newest snapshot is not there.
        """
        first = snapshot_key(0, self.run.digest)
        for key in sorted({first, *(x.key for x in self._store.list("snapshots"))}, reverse=True):
            number = parse_round(key)
            if number is None or (until is not None and number > until):
                continue
            if number == 0 and key != first:  # of another island that would have begun the run
                continue
            anchor = self._read_snapshot(key)
            if anchor is not None:
                return self._replay(anchor, until)
        return None

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
        count = len(self._settings.leaves)
        anchor = Anchor(head.round, arrays[:count], arrays[count:])
        # Two islands that would begin a run with the same values write the same first snapshot.
        is_of_run = anchor.round == 0 or head.run == self.run.run
        if not is_of_run or key != snapshot_key(anchor.round, anchor.digest):
            self._log(f"{self._store.url}/{key} is of another run, round or digest")
            return None
        return anchor

    def _write_snapshot(self, anchor: Anchor, run: str) -> None:
        header = SnapshotHeader(run, anchor.round, anchor.digest)
        names = self._snapshot_shapes()
        arrays = dict(zip(names, [*anchor.values, *anchor.outer], strict=True))
        self._store.put(snapshot_key(anchor.round, anchor.digest), dump(header, arrays))

    def _snapshot_shapes(self) -> Shapes:
        names = [x.rpartition("[")[0] for x in self._settings.leaves]
        values = zip(names, self._optimizer.shapes, strict=True)
        return {
            **{f"anchor/{name}": (shape, np.float32) for name, shape in values},
            **{f"outer/{i}": x for i, x in enumerate(self._optimizer.state)},
        }

    def _rotate_snapshots(self, anchor: Anchor) -> None:
        """Write a snapshot if it is time, and remove what newer ones make needless.

        Manifests stay: a round that was decided once can never be decided again.
        """
        if anchor.round % self._rules.snapshot_every:
            return
        self._write_snapshot(anchor, self.run.run)
        if (keep := self._rules.keep) is None:
            return
        found = {x.key: parse_round(x.key) or 0 for x in self._store.list("snapshots")}
        numbers = sorted({*found.values()})
        if len(numbers) <= keep:
            return
        oldest = numbers[-keep]
        for number in range(numbers[0], oldest):
            for entry in self._store.list(round_folder(number)):
                if entry.key != manifest_key(number):
                    self._store.delete(entry.key)
        for key, number in found.items():
            if number < oldest:
                self._store.delete(key)

    # Reading small objects.

    def _read_manifest(self, number: int) -> Manifest | None:
        where = f"{self._store.url}/{manifest_key(number)}"
        try:
            data = self._store.get(manifest_key(number), MAX_JSON)
            if data is None:
                return None
            manifest = Manifest.loads(data)
        except (FormatError, TooLargeError) as error:
            raise IslandsError(f"{where} is unreadable: {error}") from error
        if (manifest.run, manifest.round) != (self.run.run, number):
            raise IslandsError(f"{where} belongs to another run or round.")
        islands = {parse_island(key) for key in manifest.parts if parse_round(key) == number}
        if None in islands or len(islands) != len(manifest.parts):
            raise IslandsError(f"{where} lists other things than one part of each island.")
        return manifest

    def _check_name(self) -> None:
        """Raise `IslandsError` if another process has this island's name, or the run is gone."""
        key = heartbeat_key(self._rules.name)
        note = read_heartbeat(self._store, key)
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
                    f"{self._store.url}/{RUN_KEY}: the run {self.run.run} of this island is not here "
                    f"any more{found}. Was the bucket emptied?"
                )

    def _write_heartbeat(self, updates: int, sent: int, received: int) -> None:
        traffic, name = self._store.traffic, self._rules.name
        note = Heartbeat(
            self.run.run, name, self._process, self.anchor.round, updates,
            traffic.sent - sent, traffic.received - received,
        )  # fmt: skip
        self._store.put(heartbeat_key(name), note.dumps().encode())


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
