"""An island: a program of its own that trains one model with others through an object store.

Its algorithm is that between its own replicas. After some updates `Island.exchange` takes the mean
of the replicas, the first process exchanges it in a round, and all replicas go on from the result.
"""

import functools
import json
import logging
import math
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from .._support.checks import ArgumentError, as_number, checked_int
from .._support.types import PyTree
from ..algorithms import published_outer_optimizer, shares_of_gossip
from ..collectives.codecs import Codec
from ..embedding import WithTables
from ..mesh import array_from_host, axis_names, consensus, put_on_all_devices, virtual_mesh
from ..transform import (
    Algorithm,
    Every,
    ParameterTransform,
    as_schedule,
    every,
    moving_states,
    shift_copies,
    wrap_algorithm,
)
from ..tree import Staged, leaf_names, parts_of
from ._anchors import Rules
from ._format import (
    PartCodec,
    RunSettings,
    check_settings,
    checked_name,
    concatenate,
    leaf_descriptions,
    parse_island,
    parse_round,
    read_heartbeat,
    read_run,
    round_folder,
    split_like,
)
from ._optimizer import HostOptimizer, checked_optimizer
from ._rounds import Outcome, Rounds
from ._store import Clock, IslandsError, ObstoreClient, RetryingStore, Traffic, parse_url

if TYPE_CHECKING:
    from ..train import StepResult, TrainState

_LOGGER = logging.getLogger("jaxslowmo.islands")
_JOIN_SECONDS = 10.0  # how long a store may not answer when a user waits to begin
_BROADCAST_BYTES = 4096  # of the JSON text that the first process sends the others


class IslandState(NamedTuple):
    """The `state.local["island"]` of `Island.transform`; equal on all replicas."""

    run: jax.Array  # () uint32, from the name of the run; 0 before the island has joined
    round: jax.Array  # () int32, the round from whose anchor the parameters come
    exchanged: jax.Array  # () int32, updates at the last exchange
    # Float32, like the parameters: the residual, which the codec has not sent yet; () without error
    # feedback. Checkpoints know it by this name.
    lost: PyTree


def transform(
    base: ParameterTransform | None = None, codec: Codec | None = None
) -> ParameterTransform:
    """Return `Island.transform(base)` of an island with this codec, without asking a store.

    A program that reads the checkpoints of an island, and joins nothing, makes its step with it.

    Args:
      base: the algorithm between the island's replicas; None: nothing.
      codec: the codec of parts, as in `js.islands.join`.

    Returns:
      The `sync` of `js.make_train_step`, with the state of `base` in `state.local["base"]`.

    Raises:
      ValueError: a base that keeps an anchor of its own.

    Communication: that of `base`.
    """
    if base is not None and not isinstance(base, ParameterTransform):
        raise ValueError(f"islands: `base` must be None or one such as js.sgp(...), got {base!r}.")
    inner = Algorithm() if base is None else base.algorithm
    if inner.has_anchor:
        raise ValueError(
            f"islands: `base` must not keep an anchor, got {inner.owner}; take js.local_sgd or "
            "js.sgp."
        )
    error_feedback = codec is not None and codec.error_feedback
    return ParameterTransform(_with_island_state(inner, error_feedback=error_feedback))


def _with_island_state(base: Algorithm, *, error_feedback: bool) -> Algorithm:
    """Return the algorithm between an island's replicas, whose state also holds an `IslandState`.

    Programs leave that alone: `Island.exchange` changes it between two updates.
    """

    def local(params: PyTree) -> dict[str, Any]:
        zero, run = jnp.zeros([], jnp.int32), jnp.zeros([], jnp.uint32)
        residual = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
        island = IslandState(run, zero, zero, residual if error_feedback else ())
        return {**wrap_algorithm(base).local(params), "island": island}

    def bind(axis_sizes: Any, params: PyTree | None) -> Algorithm:
        return _with_island_state(base.bound(axis_sizes, params), error_feedback=error_feedback)

    return replace(wrap_algorithm(base), local=local, owner="islands", bind=base.bind and bind)


# The status of a run, for everyone: who takes part, by what lies in the bucket.


class IslandStatus(NamedTuple):
    """The last actions of an island, as it wrote them into the store.

    Attributes:
      name: its name.
      round: the round towards which it trains, or of which it waits for the manifest.
      lag: rounds between that and the open round.
      has_part: whether the open round has a part of it.
      updates: its updates so far.
      sent, received: bytes of its last exchange, or of joining.
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
    """The state of a run: its open round, and who takes part.

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
        names = "island", "round", "lag", "part", "updates", "last sent", "last received"
        rows = [(*names, "last seen")]
        rows += [
            (
                x.name, str(x.round), str(x.lag), "yes" if x.has_part else "-", str(x.updates),
                f"{x.sent:,} B", f"{x.received:,} B", f"{x.last_seen:%Y-%m-%d %H:%M:%S} UTC",
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


# An island.


class Report(NamedTuple):
    """The requests and bytes of an island's exchanges, on average per round.

    Attributes:
      rounds: number of exchanges.
      requests: requests by kind.
      sent, received: bytes of objects.
      sent_to_join: bytes of objects that were sent before the first exchange.
    """

    rounds: int
    requests: Mapping[str, float]
    sent: float
    received: float
    sent_to_join: int

    def __str__(self) -> str:
        """Return one line for people."""
        kinds = ", ".join(f"{count:.1f} {kind}" for kind, count in sorted(self.requests.items()))
        return (
            f"since this program's start: {self.sent_to_join:,} bytes sent to join; {self.rounds} "
            f"rounds, on average {self.sent:,.0f} bytes to the store (parts, snapshots), "
            f"{self.received:,.0f} from it; requests: {kinds}"
        )


class Island:
    """A program that exchanges with others through a store; made by `js.islands.join`.

    Attributes:
      name: its name.
      every: the schedule of its calls: it is a hook of `js.train_loop`.
      round: the round towards which it trains.
      bytes_sent: bytes of the objects that it had written to the store after the last `exchange`;
        equal on all its processes.
    """

    def __init__(
        self,
        store: RetryingStore | None,
        rules: Rules,
        *,
        schedule: Every,
        delay: int,
        optimizer: optax.GradientTransformation,
        codec: Codec | None,
        merge: float,
        weight: float | None,
        agreed: RunSettings,
        log: Callable[[str], None],
    ) -> None:
        self.name, self._schedule, self._delay = rules.name, schedule, delay
        self.every = _DelayedEvery(**vars(schedule), delay=delay) if delay else schedule
        self._store, self._rules, self._optimizer = store, rules, optimizer
        self._codec, self._merge, self._weight = codec, merge, weight
        self._settings, self._log = agreed, log
        self._rounds: Rounds | None = None
        self._background: _BackgroundExchange | None = None
        self._joining = Traffic()  # what `report` leaves out
        self._exchanges = 0
        self._has_joined = False
        self.round = self.bytes_sent = 0

    def due(self, t: int) -> bool:
        """Return whether to call `exchange` after update t; after 0 updates the island joins."""
        return t == 0 or bool(self.every(t))

    def transform(self, base: ParameterTransform | None = None) -> ParameterTransform:
        """Return the `sync` of `js.make_train_step` with which checkpoints know the island's round.

        Without it an island that is restored starts again at the newest anchor, and forgets what a
        codec with error feedback has not sent yet. With it a run that was stopped goes on to the
        bit, if no other island has gone on meanwhile.

        Args:
          base: what the island's own replicas exchange between rounds, such as `js.local_sgd`;
            None: nothing.

        Raises:
          ValueError: a base that keeps an anchor of its own.

        Communication: that of `base`.
        """
        return transform(base, self._codec)

    def __call__(self, result: "StepResult") -> Mapping[str, Any]:
        """Exchange after a step of `js.train_loop`, which goes on with the new state."""
        result.state = self.exchange(result.state)
        return {"round": self.round}

    def exchange(self, state: "TrainState") -> "TrainState":
        """Exchange with the other islands, and return the state with which this one goes on.

        The first call joins: it replaces the parameters by the run's newest anchor, or begins the
        run with them, and contributes nothing. Call it before the first update; updates before it
        are not part of the run. A state that was saved with `transform` keeps its progress.

        Each further call contributes D = anchor - mean of the island's replicas to the open round,
        and waits until the round is decided. If the store does not answer, it says so and returns
        the state unchanged; the next call contributes all progress since the anchor.

        With a `delay` D is taken that many updates before, by a call that returns the state at
        once, and a thread exchanges it. The call of the exchange itself waits for what is left, or
        exchanges as without a delay if nothing was taken. Of a state that was saved between the two
        the call that joins changes nothing, if the run has gone on: the call of the exchange does.

        Args:
          state: a `js.TrainState`. All processes of the island call this alike.

        Returns:
          The state whose parameters are `merge * parameters + (1 - merge) * anchor`, in their
          dtypes; after joining, or in a round without this island, the anchor, moved on by what
          `late` keeps. Copies of parameters in the optimizer's state move
          along; model state and moments stay. The buffers of `state` stay valid.

        Raises:
          ValueError: parameters in stages, in tables or of 64 bits, or a `sync` of the step that
            keeps parameters of its own.
          IslandsError: a bucket of another run, model or outer optimizer, or a name that another
            process has taken.

        Communication: between replicas one all-reduce of the parameters. With the store, per round
          of I islands: one part of the codec's bytes there, I - 1 parts from there, and some small
          requests; see `report`.
        """
        _check_state(state)
        values = _replica_mean(state)
        island_state = next(iter(parts_of(state.exchange.local, IslandState)), None)
        if self._has_joined and self._starts_exchange(_replicated_int(state.step)):
            self._start_exchange(state, values)
            return state
        run = functools.partial(self._join_or_exchange, state, values, island_state)
        if jax.process_count() == 1:
            try:
                result = run()
            finally:  # also after a signal that ends a wait
                self.bytes_sent = self._count_sent()
        else:
            result, self.bytes_sent = _broadcast_result(run, self._count_sent, values)
        self._has_joined = True
        if result is None:
            if island_state is not None:
                self.round = _replicated_int(island_state.round)
            return state
        self.round = result.round
        state = _move_replicas(state, result.target, self._merge if result.is_counted else 0.0)
        return state if island_state is None else _update_island_state(state, island_state, result)

    def _join_or_exchange(
        self,
        state: "TrainState",
        values: list[np.ndarray],
        island_state: IslandState | None,
    ) -> "_ExchangeResult | None":
        """Join or exchange with the store, on the first process only.

        Returns:
          The result, which all processes then apply to `state`; None: they go on with `state`.
        """
        rounds, updates = self._rounds, _replicated_int(state.step)
        if rounds is not None:
            outcome = self._run_exchange(rounds, state, values)
        else:
            saved_run = 0 if island_state is None else _replicated_int(island_state.run)
            rounds = self._join_run(state.params, values, saved_run)
            if updates and not saved_run:
                self._log(f"joins after {updates} updates, which are not part of the run")
            outcome: Outcome | None = Outcome(rounds.anchor)
            last_exchange = updates
            if island_state is not None and saved_run:
                residual = [
                    np.asarray(x.addressable_data(0))[0] for x in jax.tree.leaves(island_state.lost)
                ]
                saved_round = _replicated_int(island_state.round)
                resumed = outcome = rounds.resume(
                    saved_round, values, concatenate(residual) if residual else None
                )
                last_exchange = _replicated_int(island_state.exchanged)
                if resumed is not None and self._lands_after(updates):
                    # It lands where it would have without the stop. If it landed here, the call
                    # there would find nothing taken, and send a part of its own.
                    self._background = _BackgroundExchange(values, lambda: resumed)
                    outcome = None
            self._rounds = rounds
            if outcome is None and updates > last_exchange:
                if self._starts_exchange(updates):
                    self._start_exchange(state, values)
                elif self.due(updates):
                    outcome = self._run_exchange(rounds, state, values)
        if outcome is None:
            return None
        target = outcome.anchor.values
        if outcome.remainder is not None:
            target = split_like(concatenate(target) - outcome.remainder, target)
        residual = None if rounds.residual is None else split_like(rounds.residual, target)
        return _ExchangeResult(
            target, rounds.settings.short_id(), outcome.anchor.round, outcome.is_counted, residual
        )

    def _count_sent(self) -> int:
        """Return the bytes written to the store so far, which the first process knows."""
        return self._joining.sent + self._required_store.traffic.sent

    def _starts_exchange(self, t: int) -> bool:
        return self._delay > 0 and bool(self._schedule(t + self._delay))

    def _lands_after(self, t: int) -> bool:
        """Return whether update t or one before it takes what lands after it."""
        return any(map(self._schedule, range(t + 1, t + self._delay + 1)))

    def _start_exchange(self, state: "TrainState", values: list[np.ndarray]) -> None:
        """Let a thread exchange this state, unless an exchange is under way."""
        if self._rounds is not None and self._background is None:
            exchange = self._make_exchange(self._rounds, state, values)
            self._background = _BackgroundExchange(values, exchange)

    def _run_exchange(
        self, rounds: Rounds, state: "TrainState", values: list[np.ndarray]
    ) -> Outcome | None:
        """Exchange, or wait for the exchange under way; a signal that ends the wait leaves it."""
        background = self._background
        if background is None:
            return self._make_exchange(rounds, state, values)()
        wait([background.outcome])
        self._background = None
        outcome = background.outcome.result()
        if outcome is None:
            return None
        return rounds.add_local_progress(outcome, background.start_values, values)

    def _make_exchange(
        self, rounds: Rounds, state: "TrainState", values: list[np.ndarray]
    ) -> Callable[[], Outcome | None]:
        """Return the exchange of this state, which needs none of its buffers any more."""
        self._exchanges += 1
        weight = float(len(state.step) if self._weight is None else self._weight)
        leaves = leaf_descriptions(leaf_names(state.params), [x.shape for x in values])
        url, updates = self._required_store.url, _replicated_int(state.step)

        def exchange() -> Outcome | None:
            check_settings(url, rounds.settings, replace(self._settings, leaves=leaves))
            return rounds.exchange(values, weight, updates)

        return exchange

    def _join_run(self, params: Any, values: list[np.ndarray], saved_run: int) -> Rounds:
        """Join the run in the store, or begin one unless `saved_run` says which it must be."""
        store, deadline = self._required_store, self._rules.deadline_seconds
        tree = jax.tree.structure(params)
        optimizer = HostOptimizer(self._optimizer, jax.tree.unflatten(tree, values))
        leaves = leaf_descriptions(leaf_names(params), [x.shape for x in values])
        settings = replace(self._settings, optimizer=optimizer.fingerprint, leaves=leaves)
        part_codec = PartCodec(self._codec, sum(x.size for x in values))
        rounds = Rounds(store, self._rules, optimizer, part_codec, settings, self._log)
        store.patience = min(deadline, _JOIN_SECONDS)
        rounds.join(values, saved_run)
        store.patience = deadline
        self._joining, store.traffic = store.traffic, Traffic()
        return rounds

    @property
    def _required_store(self) -> RetryingStore:
        if self._store is None:
            raise IslandsError("islands: of the processes of an island only 0 talks to the store.")
        return self._store

    def status(self) -> Status:
        """Return the `Status` of the run, as `js.islands.status(url)` does."""
        return status(self._required_store.url)

    def report(self) -> Report:
        """Return what the exchanges so far asked of the store, on average per round.

        `js.comm_report` counts what the island's own replicas send each other.
        """
        traffic, count = self._required_store.traffic, max(self._exchanges, 1)
        requests = {kind: n / count for kind, n in sorted(traffic.requests.items())}
        sent, received = traffic.sent / count, traffic.received / count
        return Report(self._exchanges, requests, sent, received, self._joining.sent)


def join(
    url: str,
    *,
    name: str,
    outer_optimizer: optax.GradientTransformation | None = None,
    sync_every: int | Every = 500,
    delay: int = 0,
    quorum: int = 1,
    deadline_seconds: float = 600.0,
    codec: Codec | None = None,
    late: str = "drop",
    merge: float = 0.0,
    weight: float | None = None,
    snapshot_every: int = 10,
    keep: int | None = 2,
    max_norm_ratio: float = 10.0,
) -> Island:
    """Join a run of several islands that exchange through an object store, or begin it.

    Every island is a program of its own mesh, accelerators and release of jax. An exchange is the
    outer step of `js.diloco` over all replicas of all islands of a round. Lines about it go to
    the logger "jaxslowmo.islands". More: docs/islands.md.

    Args:
      url: the run: `s3://bucket/run`, `gs://...`, `az://...`, `file:///folder` or a folder's path.
        Credentials come from the environment, as obstore reads them.
      name: the island's name, which no other one has; a restarted island keeps it.
      outer_optimizer: an element-wise optax optimizer that steps the anchor, run by NumPy: SGD with
        or without Nesterov, AdamW, `js.slow_momentum(...)`; None: that of `js.diloco`,
        `optax.sgd(0.7, momentum=0.9, nesterov=True)`.
      sync_every: updates between exchanges, or `js.every(...)`; equal on all islands.
      delay: updates beside which an exchange runs, < `sync_every`, as in `js.diloco`; 0: it waits.
      quorum: number of parts that a round needs at least.
      deadline_seconds: how long an island that has sent its part waits for those of the last round
        and those that joined since. Then a round that has a quorum closes without them.
      codec: the format of parts, of `js.codecs`; None: float32. Equal on all islands.
      late: what an island does with its progress if a round closed without it: "drop", or
        "carry" or "carry:0.5", which keep it, or this share of it, for the next round.
      merge: share in [0, 1] of its own parameters that a replica keeps.
      weight: the island's weight in means, > 0; None: its number of replicas.
      snapshot_every: number of rounds between snapshots of the anchor.
      keep: number of snapshots that are kept, with the parts of rounds since; None removes nothing
        and needs no right to delete.
      max_norm_ratio: a part whose norm is above this many times the round's median is left out;
        equal on all islands.

    Returns:
      An `Island`.

    Raises:
      ValueError: an argument that breaks its rule, named.
      IslandsError: no access, or a run with another `sync_every`, `codec` or `max_norm_ratio`.
      ModuleNotFoundError: obstore is missing; the extra `islands` has it.

    Communication: one small request to the store.

    Source: Douillard et al., "DiLoCo", 2023; Sarfi et al., "SparseLoCo", 2025 (buckets).
    """
    owner = "islands.join"
    parse_url(url)  # raises on all processes alike
    if outer_optimizer is None:
        optimizer = published_outer_optimizer(owner)
    else:
        optimizer = checked_optimizer(outer_optimizer)
    if codec is not None and not isinstance(codec, Codec):
        raise ArgumentError(
            "codec", f"{owner}: `codec` must be one of js.codecs, or None, got {codec!r}."
        )
    schedule = as_schedule(sync_every)
    rules = Rules(
        checked_name(name),
        quorum=checked_int(f"{owner}: `quorum`", quorum, 1),
        deadline_seconds=_checked_number(owner, "deadline_seconds", deadline_seconds),
        late_share=late_share(late),
        snapshot_every=checked_int(f"{owner}: `snapshot_every`", snapshot_every, 1),
        keep=None if keep is None else checked_int(f"{owner}: `keep`", keep, 1),
    )
    max_norm_ratio = _checked_number(owner, "max_norm_ratio", max_norm_ratio, least=1)
    if weight is not None and _checked_number(owner, "weight", weight) == 0:
        raise ValueError(f"{owner}: `weight` must be above 0, got {weight!r}.")
    merge = _checked_number(owner, "merge", merge, most=1)
    delay = checked_int(f"{owner}: `delay` counts updates and", delay, 0)
    if delay and (delay >= schedule.k or schedule.before == "all"):
        raise ArgumentError(
            "delay",
            f"{owner}: `delay` must be less than the updates between two exchanges, got {delay} "
            f"with sync_every={sync_every!r}.",
        )
    log = functools.partial(_LOGGER.warning, "island %s: %s", name)
    period = str(schedule.k) if schedule == every(schedule.k) else repr(schedule)
    settings = RunSettings("", "", period, repr(codec), "", max_norm_ratio=max_norm_ratio)
    store = None
    if jax.process_index() == 0:
        store = RetryingStore(
            ObstoreClient(url), url, min(deadline_seconds, _JOIN_SECONDS), Clock(), log
        )
        run = read_run(store)
        if run is not None:
            check_settings(store.url, run, settings)
    return Island(
        store, rules, schedule=schedule, delay=delay, optimizer=optimizer, codec=codec, merge=merge,
        weight=weight, agreed=settings, log=log,
    )  # fmt: skip


def late_share(late: Any) -> float:
    """Return the share of late progress that is kept: that of "drop", "carry" or "carry:0.5"."""
    if late in ("drop", "carry"):
        return float(late == "carry")
    match = re.fullmatch(r"carry:([0-9]*\.?[0-9]+)", str(late))
    share = float(match[1]) if match else 0.0
    if not 0 < share <= 1:
        raise ArgumentError(
            "late",
            'islands.join: `late` must be "drop", "carry" or "carry:SHARE" with a share in (0, 1], '
            f"got {late!r}.",
        )
    return share


def _checked_number(
    owner: str, argument: str, value: Any, *, least: float = 0, most: float = math.inf
) -> float:
    number = as_number(value)
    if number is None or not least <= number <= most:
        rule = f"in [{least:g}, {most:g}]" if math.isfinite(most) else f">= {least:g} and finite"
        raise ArgumentError(
            argument, f"{owner}: `{argument}` must be a number {rule}, got {value!r}."
        )
    return number


@dataclass(frozen=True)
class _DelayedEvery(Every):
    """A schedule of exchanges, and of the updates that take what they send.

    Attributes:
      delay: number of updates from taking to exchanging.
    """

    delay: int = 0

    def __call__(self, t: Any) -> Any:
        return super().__call__(t) | super().__call__(t + self.delay)


class _BackgroundExchange:
    """An exchange under way, on a thread that does not outlive the program.

    Args:
      start_values: the island's parameters when it began.
      exchange: the exchange.

    Attributes:
      outcome: future of its outcome.
    """

    def __init__(
        self, start_values: list[np.ndarray], exchange: Callable[[], Outcome | None]
    ) -> None:
        self.start_values, self.outcome = start_values, Future[Outcome | None]()

        def run() -> None:
            try:
                self.outcome.set_result(exchange())
            except BaseException as error:  # the island raises it when it waits
                self.outcome.set_exception(error)

        threading.Thread(target=run, name="islands", daemon=True).start()


# From the state on devices to the exchange, and back.


class _ExchangeResult(NamedTuple):
    """The changes that an exchange makes to the state, on all processes of the island.

    Attributes:
      target: the parameters to which replicas go, as leaves.
      run, round: the new `run` and `round` of the `IslandState`.
      is_counted: whether the round counted this island's progress; `merge` may keep a share.
      residual: what a codec with error feedback has not sent yet, as leaves; None: unchanged.
    """

    target: list[np.ndarray]
    run: int
    round: int
    is_counted: bool
    residual: list[np.ndarray] | None


def _broadcast_result(
    run: Callable[[], _ExchangeResult | None],
    count_sent: Callable[[], int],
    like: list[np.ndarray],
) -> tuple[_ExchangeResult | None, int]:
    """Return the first process's result and bytes on all processes; raise its error on all.

    Args:
      run: function that returns the result; only the first process calls it.
      count_sent: function that returns the bytes sent so far; only the first process calls it.
      like: arrays of the shapes of `target`, which the other processes pass to the broadcast.
    """
    result: _ExchangeResult | None = None
    message: dict[str, Any] = {"error": "", "numbers": None, "has_residual": False}
    if jax.process_index() == 0:
        try:
            result = run()
            message["sent"] = count_sent()
        except Exception as error:  # the others would wait for it forever
            message["error"] = f"{type(error).__name__}: {error}"[: _BROADCAST_BYTES // 16]
    if result is not None:
        message["numbers"] = result.run, result.round, result.is_counted
        message["has_residual"] = result.residual is not None
    send = multihost_utils.broadcast_one_to_all
    text = np.frombuffer(json.dumps(message).encode().ljust(_BROADCAST_BYTES), np.uint8)
    message = json.loads(bytes(np.asarray(send(text)).tolist()))
    if message["error"]:
        raise IslandsError(message["error"])
    if message["numbers"] is None:
        return None, message["sent"]
    run_id, number, is_counted = message["numbers"]
    arrays = [like if result is None else result.target]
    if message["has_residual"]:
        arrays.append(like if result is None or result.residual is None else result.residual)
    target, *rest = jax.tree.map(np.asarray, send(arrays))
    result = _ExchangeResult(target, run_id, number, is_counted, rest[0] if rest else None)
    return result, message["sent"]


def _check_state(state: "TrainState") -> None:
    """Raise `ValueError` for a state that islands can't exchange yet, by name."""
    if not hasattr(state, "opt_state"):
        raise ValueError(f"islands: `state` must be a js.TrainState, got {type(state).__name__}.")
    if isinstance(state.params, WithTables) or parts_of(state.params, Staged):
        what = "tables" if isinstance(state.params, WithTables) else "parameters in stages"
        raise ValueError(
            f"islands: `state` has {what}, which islands do not exchange: train it as one program, "
            "with a `sync` such as js.diloco, or without them."
        )
    names, leaves = leaf_names(state.params), jax.tree.leaves(state.params)
    if not sum(x.size for x in leaves):
        raise ValueError("islands: `state` has no parameters, or none with an element.")
    if _keeps_parameters(state):
        raise ValueError(
            "islands: `sync` of the step of `state` keeps an anchor, or parameters under way, and "
            "an exchange would leave it behind: use js.local_sgd, js.sgp or nothing."
        )
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"islands: parameters must have names of their own: {', '.join(twice)}.")
    wide = [name for name, x in zip(names, leaves, strict=True) if x.dtype.itemsize > 4]
    if wide:
        raise ValueError(
            f"islands: parameters must have at most 32 bits, not so: {', '.join(wide)}."
        )


def _keeps_parameters(state: "TrainState") -> bool:
    """Return whether an exchange's state holds more than numbers, such as weights of gossip.

    What all replicas have together is an anchor, and arrays of a replica are parameters under way,
    a codec's error, or an anchor of its own. The island's own state moves along.
    """
    is_island = lambda x: isinstance(x, IslandState)  # noqa: E731
    local = jax.tree.leaves(state.exchange.local, is_leaf=is_island)
    return bool(jax.tree.leaves(state.exchange.shared)) or any(
        jnp.issubdtype(x.dtype, jnp.floating) and x.ndim > 1 for x in local if not is_island(x)
    )


def _replicated_int(x: jax.Array) -> int:
    """Return a number that is equal on all replicas."""
    return int(np.asarray(x.addressable_data(0)).flat[0])


def _replica_mean(state: "TrainState") -> list[np.ndarray]:
    """Return the mean of the replicas as leaves of float32, on the host of each process."""
    mesh, axis_name = _mesh_and_axis(jax.tree.leaves(state.params)[0])
    shares = shares_of_gossip((state.opt_state, state.exchange.local))
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), state.params)
    mean = consensus(wide, mesh=mesh, axis_name=axis_name, shares=shares)
    return [_on_host(x) for x in jax.tree.leaves(mean)]


def _mesh_and_axis(x: jax.Array) -> tuple[Any, Any]:
    """Return a mesh and the replica axis of a stacked array."""
    where, count = x.sharding, x.shape[0]
    if isinstance(where, NamedSharding):
        mesh = where.mesh
        # jax may leave out an axis of size 1.
        ones = tuple(name for name, size in mesh.shape.items() if size == 1)
        first = axis_names((*where.spec, None)[0] or ones)
        if first and math.prod(mesh.shape[name] for name in first) == count:
            return mesh, first
    devices = sorted(where.device_set, key=lambda device: device.id)
    parts = count // where.shard_shape(x.shape)[0]
    return virtual_mesh({"replica": count}, devices[:parts]), "replica"


def _on_host(x: jax.Array) -> np.ndarray:
    """Return an array of which this process may hold only a part, as float32."""
    if not (x.is_fully_addressable or x.is_fully_replicated):
        x = multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x, np.float32)


def _move_replicas(state: "TrainState", target: list[np.ndarray], merge: float) -> "TrainState":
    """Return the state with all replicas at the target, but for the share that they keep."""
    leaves, tree = jax.tree.flatten(state.params)
    target = put_on_all_devices(target, _mesh_and_axis(leaves[0])[0])
    moved = [_jitted_merge(x.sharding, merge)(x, to) for x, to in zip(leaves, target, strict=True)]
    params, opt_state = jax.tree.unflatten(tree, moved), state.opt_state
    if moving_states(opt_state):
        shift = jax.tree.map(jnp.subtract, params, state.params)
        opt_state = shift_copies(opt_state, shift)
    return state._replace(params=params, opt_state=opt_state)


@functools.lru_cache(maxsize=256)
def _jitted_merge(sharding: Any, merge: float) -> Callable[[jax.Array, Any], jax.Array]:
    def merge_into(x: jax.Array, to: jax.Array) -> jax.Array:
        new = to if not merge else merge * x.astype(jnp.float32) + (1 - merge) * to[None]
        return jnp.broadcast_to(new, x.shape).astype(x.dtype)

    return jax.jit(merge_into, out_shardings=sharding)


def _update_island_state(
    state: "TrainState", island_state: IslandState, result: _ExchangeResult
) -> "TrainState":
    """Return the state with the `IslandState` after an exchange."""

    def full_like(x: jax.Array, value: Any) -> jax.Array:
        stacked = np.broadcast_to(np.asarray(value, x.dtype), x.shape)
        return array_from_host(x.shape, x.sharding, lambda index: stacked[index])

    new = island_state._replace(
        run=full_like(island_state.run, result.run),
        round=full_like(island_state.round, result.round),
        exchanged=full_like(island_state.exchanged, _replicated_int(state.step)),
    )
    if result.residual is not None:
        old, tree = jax.tree.flatten(island_state.lost)
        new = new._replace(lost=jax.tree.unflatten(tree, map(full_like, old, result.residual)))
    is_island = lambda x: isinstance(x, IslandState)  # noqa: E731
    local = jax.tree.map(
        lambda x: new if is_island(x) else x, state.exchange.local, is_leaf=is_island
    )
    return state._replace(exchange=state.exchange._replace(local=local))
