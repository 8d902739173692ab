"""The rounds of a run, as one island sees them: who takes part is decided in the store.

A round begins with an anchor that all islands share. Each island puts a part into the store: how
far it has moved from the anchor. Whichever island first sees that the round can close creates its
manifest, which lists the parts; the store lets only one of them create it. Then every island reads
the listed parts, takes the outer optimizer's step along their weighted mean, and has the next
anchor, to the bit. So nothing but the store is asked who is there, and whoever reads it later gets
the same.
"""

import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ._anchors import POLL_SECONDS, Anchor, Anchors, PartNotFoundError, Rules, are_finite
from ._format import (
    MAX_JSON,
    RUN_KEY,
    Heartbeat,
    Manifest,
    PartCodec,
    PartHeader,
    RunSettings,
    check_settings,
    concatenate,
    dump,
    heartbeat_key,
    manifest_key,
    missing_key,
    parse_island,
    parse_round,
    part_key,
    read_heartbeat,
    read_run,
    round_folder,
    sha256,
)
from ._optimizer import HostOptimizer
from ._store import IslandsError, RetryingStore, StoreError

# Until an island says for whom it waits, and says it again. Below the quorum nothing but another
# island ends the wait, so the first line comes sooner.
_PROGRESS_SECONDS = 30.0
_LONELY_SECONDS = 3.0


class _PendingPart(NamedTuple):
    """The part of this island in a round that is not decided yet, whether or not it is there."""

    key: str
    header: PartHeader
    payload: np.ndarray
    displacement: np.ndarray
    residual: np.ndarray | None  # what the codec leaves for the next part, with error feedback


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
      part_codec: how displacements are encoded.
      settings: what all islands must agree on; `run_id` and `digest` are not known yet.
      log: function that shows one line to the user.

    Attributes:
      anchor: the anchor from which this island's displacement is measured.
      residual: what the codec has not sent yet, with error feedback.
    """

    anchor: Anchor

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
        self._anchors = Anchors(store, rules, optimizer, part_codec, settings, log)
        self._process = secrets.token_hex(8)
        self._pending_part: _PendingPart | None = None
        self._missed_last_round = False  # whether the last round was decided without this island
        self.residual: np.ndarray | None = None

    @property
    def settings(self) -> RunSettings:
        """The settings of the run; before the island has joined, those that it was given."""
        return self._anchors.settings

    # Joining.

    @np.errstate(all="ignore")  # what is not finite is looked for where it matters
    def join(self, start: Sequence[np.ndarray], saved_run: int = 0) -> None:
        """Join the run in the store, or begin it.

        Args:
          start: the values with which it would begin.
          saved_run: the `RunSettings.short_id` of the run from which they were saved; 0: none, so
            they may begin one.

        Raises:
          ValueError: it would begin the run with values that are not finite.
          IslandsError: another run's bucket, or a run whose anchor can't be read.
          StoreError: the store does not answer.
        """
        before = self._store.traffic.sent, self._store.traffic.received
        self._store.restart_patience()
        run = read_run(self._store)
        if saved_run and (run is None or run.short_id() != saved_run):
            content = "holds no run" if run is None else f"holds {run.run_id}"
            raise IslandsError(
                f"{self._store.url}: the state of this island is of the run {saved_run:08x}..., "
                f"and this bucket {content}. Give the bucket of its run, or new parameters."
            )
        if run is None and self._store.list("rounds"):
            run = read_run(self._store)  # another island may just have begun it
            if run is None:
                raise IslandsError(
                    f"{self._store.url} holds rounds of a run and no {RUN_KEY}: put it back, or "
                    "take an empty folder."
                )
        if run is None:
            if not are_finite(start):
                raise ValueError("islands: `state` has parameters that are not finite.")
            first = Anchor(0, list(start), self._optimizer.init(start))
            run_id = secrets.token_hex(8)
            self._anchors.write_snapshot(first, run_id)
            first_settings = replace(self.settings, run_id=run_id, digest=first.digest)
            self._store.create(RUN_KEY, first_settings.dumps().encode())
            run = read_run(self._store)
            if run is None:
                raise StoreError(
                    f"get {self._store.url}/{RUN_KEY}: it was written and is not there."
                )
        check_settings(self._store.url, run, self.settings)
        self._anchors.settings = run
        self.anchor, _ = self._wait_for_anchor()
        self._announce()
        self._write_heartbeat(0, *before)

    @np.errstate(all="ignore")
    def resume(
        self, number: int, values: Sequence[np.ndarray], residual: np.ndarray | None = None
    ) -> Outcome | None:
        """Join an island that was restored from a checkpoint to the open round.

        Args:
          number: the round from whose anchor `values` were trained.
          values: the island's parameters.
          residual: what the codec had not sent yet, with error feedback.

        Returns:
          The parameters from which it goes on; None: `values`, as their round is the open one.

        Raises:
          IslandsError: the run in the store is at an earlier round.
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
        manifests = map(self._anchors.read_manifest, range(number, last))
        listed = [x.round for x in manifests if x is not None and name in x.islands()]
        # Of a round that was cleaned up nobody knows whether it left the part out.
        if any(name in self._anchors.replayed_islands.get(x, {name}) for x in listed):
            self._log(
                f"an earlier process has contributed since round {number}: progress that was "
                "saved is not sent again"
            )
            is_counted = listed[0] == number and are_finite(values)  # as if this one had sent it
            self._reset_residual()
            return Outcome(self.anchor, None, is_counted)
        start = self._anchors.find(number) if share else None
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
            self._check_still_joined()
            manifest = self._anchors.read_manifest(self.anchor.round)
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
        is_counted = is_counted and are_finite([displacement])
        remainder = self._remaining_displacement(displacement, manifest, counted)
        remainder = self._drop_if_not_finite(remainder, manifest.round)
        closed, self.anchor, self._pending_part = self.anchor, anchor, None
        self._anchors.payloads = {}
        try:
            self.anchor = self._anchors.replay(anchor)
            is_out = self._rules.name not in manifest.islands()
            if self.anchor.round > closed.round + 1 or is_out:
                self._announce()
            if is_out and self._missed_last_round and remainder is not None:
                # Else it would be late again: the others wait for it only until their deadline.
                self._send_part(remainder, weight, updates)
            self._missed_last_round = is_out
            if manifest.author == self._rules.name:
                self._anchors.rotate_snapshots(anchor)
            self._check_still_joined()
            self._write_heartbeat(updates, *before)
        except (StoreError, PartNotFoundError) as error:
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
            part = self._make_part(displacement, weight, updates)
            self._pending_part = part
            self._anchors.payloads = {part.header.sha256: part.payload}
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
            self.settings.run_id, number, name, self.anchor.digest, weight, updates, sha256(payload)
        )  # fmt: skip
        residual = (
            part - self._part_codec.decode(payload) if self._part_codec.error_feedback else None
        )
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
        start_time, last_line = clock.now(), None
        before = self._anchors.read_manifest(number - 1) if number else None
        expected = set(before.islands()) if before else set()
        pause, longest = POLL_SECONDS
        while True:
            self._store.restart_patience()
            manifest = self._anchors.read_manifest(number)
            if manifest is not None:
                return manifest
            present, joining, is_listed = self._list_parts(number)
            missing, waited = (expected | joining) - present.keys(), clock.now() - start_time
            left = rules.deadline_seconds - waited
            if len(present) >= rules.quorum and (not missing or left <= 0):
                return self._close_round(present)
            if left <= 0 and not is_listed:  # the store lost it, and the others wait for it
                self._write_part(self._pending_part)
            is_lonely = len(present) < rules.quorum
            most = _LONELY_SECONDS if is_lonely and last_line is None else _PROGRESS_SECONDS
            if clock.now() - (start_time if last_line is None else last_line) >= most:
                last_line = clock.now()
                self._log(f"round {number}: {self._describe_wait(present, missing, left)}")
            clock.sleep(max(0.01, min(pause, left)) if left > 0 else pause)
            pause = min(1.5 * pause, longest)

    def _describe_wait(
        self, present: Collection[str], missing: Collection[str], left: float
    ) -> str:
        """Return for whom this island waits, how many parts are there, and what ends the wait."""
        quorum, count = self._rules.quorum, len(present) + len(missing)
        whom = [*sorted(missing), *["other islands"] * (count < quorum)]
        until = (
            f"for {left:.0f} s at most"
            if len(present) >= quorum
            else f"without a limit: `deadline_seconds` ends no wait below quorum={quorum}"
        )
        parts = f"{len(present)} of {max(count, quorum)} parts"
        return f"{parts} are there; waiting for {', '.join(whom)} {until}"

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
        """Return the newest of an island's parts that is valid; the newest if none is.

        A single part is not read here: whether it counts is decided when the round is closed.
        """
        for key in reversed(keys if len(keys) > 1 else ()):
            try:
                if self._anchors.read_part(key, self.anchor.round).rejection is None:
                    return key
            except PartNotFoundError:
                continue
        return keys[-1]

    def _close_round(self, present: dict[str, list[str]]) -> Manifest:
        """Create the manifest of the open round; return the one that was created first."""
        number = self.anchor.round
        parts = [self._newest_valid_part(present[island]) for island in sorted(present)]
        mine = Manifest(self.settings.run_id, number, self._rules.name, parts)
        if self._store.create(manifest_key(number), mine.dumps().encode()):
            return mine
        manifest = self._anchors.read_manifest(number)
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
        """Zero the residual, which an earlier process of this island may have sent already."""
        if self.residual is not None:
            self.residual = np.zeros_like(self.residual)

    def _zero_if_not_finite(self, residual: np.ndarray | None) -> np.ndarray | None:
        """Return the residual; zeros if it is not finite."""
        if residual is None or are_finite([residual]):
            return residual
        self._log("what the codec had not sent is not finite, and starts anew")
        return np.zeros_like(residual)

    def _drop_if_not_finite(self, rest: np.ndarray | None, number: int) -> np.ndarray | None:
        """Return progress that an island keeps; None if it is not finite."""
        if rest is None or are_finite([rest]):
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
            missing = None
            try:
                if manifest is not None:
                    return self._anchors.step(self.anchor, manifest, is_live=True)
                anchor = self._anchors.compute()
                if anchor is not None:
                    return anchor, None
            except PartNotFoundError as error:
                missing = error.key
            waited = self._clock.now() - start_time
            if missing is None and waited >= self._store.patience:
                raise StoreError(
                    f"{self._store.url}/snapshots: no snapshot leads to the newest anchor; were "
                    "objects removed by hand?"
                )
            if missing is None:
                self._clock.sleep(POLL_SECONDS[1])
            elif self._wait_for_part(missing, start_time):
                manifest = None  # the newest snapshot is after this round

    def _wait_for_part(self, part: str, start_time: float) -> bool:
        """Wait for a listed part; return whether a newer snapshot holds its result instead.

        After the deadline it marks the part as missing, so all islands leave it out.
        """
        number, longest = parse_round(part) or 0, POLL_SECONDS[1]
        while True:
            # A part is removed after a newer snapshot was written.
            if any((parse_round(x.key) or 0) > number for x in self._store.list("snapshots")):
                return True
            keys = (missing_key(part), MAX_JSON), (part, self._anchors.part_limit)
            if any(self._store.get(key, limit) is not None for key, limit in keys):
                return False
            if self._clock.now() - start_time >= max(self._rules.deadline_seconds, longest):
                self._store.create(missing_key(part), b"{}")
                return False
            self._clock.sleep(longest)

    # The island's heartbeat.

    def _check_still_joined(self) -> None:
        """Raise `IslandsError` if another process has this island's name, or the run is gone."""
        key = heartbeat_key(self._rules.name)
        heartbeat, run_id = read_heartbeat(self._store, key), self.settings.run_id
        is_of_run = heartbeat is not None and heartbeat.run_id == run_id
        if heartbeat is not None and is_of_run and heartbeat.process != self._process:
            raise IslandsError(
                f"{self._store.url}/{key}: another process has joined as {self._rules.name!r}; "
                "this one stops. Give each island a name of its own."
            )
        if not is_of_run:
            run = read_run(self._store)
            if run is None or run.run_id != run_id:
                other = "" if run is None else f", but {run.run_id}"
                raise IslandsError(
                    f"{self._store.url}/{RUN_KEY}: the run {run_id} of this island is not here any "
                    f"more{other}. Was the bucket emptied?"
                )

    def _write_heartbeat(self, updates: int, sent_before: int, received_before: int) -> None:
        traffic, name = self._store.traffic, self._rules.name
        heartbeat = Heartbeat(
            self.settings.run_id, name, self._process, self.anchor.round, updates,
            traffic.sent - sent_before, traffic.received - received_before,
        )  # fmt: skip
        self._store.put(heartbeat_key(name), heartbeat.dumps().encode())
