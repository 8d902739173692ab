"""Waiting for a collective of `torch.distributed`, with errors that name missing processes."""

import contextlib
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ...errors import PeerLostError, UnlikeCallsError, last_exchanges, unlike_calls
from ._header import Exchange, Headers, Kind, doze

_log = logging.getLogger("torch_compat.slowmo")

NOTICE_SECONDS = 30.0
_POLL_SECONDS = 1.0
# Time in which the other processes must answer once a connection has broken.
_ANSWER_SECONDS = 3.0
# An object ends with its group: it holds no reference to it.
_of_groups: WeakKeyDictionary[Any, "Waiting"] = WeakKeyDictionary()
# Number of groups made so far per name; equal in all of their processes.
_made: Counter[str] = Counter()


def backend_on(group: Any, device: torch.device) -> str:
    """Return the name of a group's backend for tensors of a device, such as "gloo"."""
    config = dist.get_backend_config(group)  # such as "cpu:gloo,cuda:nccl"
    return dict(part.split(":", 1) for part in config.split(",")).get(device.type, "")


class Waiting:
    """A wait for the processes of one group; with gloo it knows which ones are missing.

    Before an exchange processes send each other its header (`Headers`), so that all processes in a
    collective are in the same one. A process that waits for longer than a second reads the store of
    `torch.distributed`, in which others note that calls differ, or that a connection has broken.
    After a broken connection all that wait answer in the store; a process that does not answer is
    lost. Other backends wait on the device, with their own time limits and messages.
    """

    def __init__(self, group: Any) -> None:
        self._group_ref = ref(group)
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._store = dist.PrefixStore(  # pyright: ignore[reportPrivateImportUsage]
            f"torch_compat.slowmo/{group.group_name}/{_made[group.group_name]}",
            distributed_c10d._get_default_store(),  # torch has no public name for it
        )
        _made[group.group_name] += 1
        self._headers = Headers(group, self._size)
        self._last: dict[int, Exchange] = {}  # the last exchange of each process, as known here
        self.wrappers = itertools.count()  # the next number for a wrapper of the group
        self.node_groups: dict[tuple[int, ...], Any] = {}  # groups that cannot be made twice

    @classmethod
    def for_group(cls, group: Any) -> "Waiting":
        """Return the object of a group; all its wrappers share it: their calls have one order."""
        if group not in _of_groups:
            _of_groups[group] = cls(group)
        return _of_groups[group]

    @property
    def _group(self) -> Any:
        return self._group_ref()

    def meet(
        self, exchange: Exchange, targets: Sequence[int], sources: Sequence[int]
    ) -> dict[int, Exchange]:
        """Send the header of an exchange, and wait for those of others.

        Args:
          exchange: the exchange that this process makes.
          targets: other processes to notify.
          sources: other processes whose header must be equal, or of `Kind.NO_DATA`.

        Returns:
          The headers of this process and of `sources`.

        Raises:
          UnlikeCallsError: a process is in a different exchange.
          PeerLostError: a process is lost; the text names it.
        """
        self._last[self._rank] = exchange
        with self._naming_lost_processes():
            self._headers.send(exchange, targets, sources)
            since = time.monotonic()
            limit = _time_limit(self._group)
            polls = 0
            while missing := self._headers.missing(sources):
                seconds = time.monotonic() - since
                doze(seconds)
                if seconds > limit:
                    raise PeerLostError(
                        f"Process {', '.join(map(str, missing))} of {self._size} has not come to "
                        f"{exchange} within the time limit of the process group, {limit:g} s "
                        "(`timeout` of init_process_group)."
                    )
                if seconds > (polls + 1) * _POLL_SECONDS:
                    polls += 1
                    arrived = [rank for rank in sources if rank not in missing]
                    self._compare({self._rank: exchange, **self._headers.look(arrived)})
                    self._look_for_notes()
                    self._headers.probe(missing)
                    self._say(polls, seconds, missing)
            headers = {self._rank: exchange, **self._headers.take(sources)}
            self._last |= headers
            self._compare(headers)
            return headers

    def until_done(self, begin: Callable[[], Any], *tensors: torch.Tensor) -> None:
        """Begin a collective and wait for it.

        Args:
          begin: function that starts it and returns its `Work`.
          *tensors: tensors that it reads and writes.

        Raises:
          UnlikeCallsError: processes are in different exchanges.
          PeerLostError: a process is lost; the text names it.
          RuntimeError: an error of the backend itself.
        """
        if tensors and backend_on(self._group, tensors[0].device) != "gloo":
            begin().wait()
            return
        uses = _uses(tensors)
        with self._naming_lost_processes():
            work = begin()
            try:
                while not self._is_done(work):
                    self._look_for_notes()
            except (PeerLostError, UnlikeCallsError):
                self._close()
                raise
        # A thread of gloo releases the tensors a little later, for which it needs Python: if the
        # interpreter ends in the meantime, the process aborts.
        del work
        deadline = time.monotonic() + _POLL_SECONDS
        while any(count > initial for count, initial in zip(_uses(tensors), uses, strict=True)):
            time.sleep(0)
            if time.monotonic() > deadline:  # other code holds references to them
                break

    def _is_done(self, work: Any) -> bool:
        try:
            work.wait(timedelta(seconds=_POLL_SECONDS))
        except RuntimeError:
            if work.is_completed():
                raise
            return False
        return True

    def _compare(self, headers: Mapping[int, Exchange]) -> None:
        """Raise `UnlikeCallsError`, here and in all that wait, unless the headers are equal."""
        calls = {rank: call for rank, call in headers.items() if call.kind != Kind.NO_DATA}
        if len(set(calls.values())) > 1:
            sentence = unlike_calls({rank: str(call) for rank, call in calls.items()})
            with contextlib.suppress(RuntimeError, OSError):  # the store may have ended
                # All processes raise the sentence that was stored first.
                sentence = self._store.compare_set("unlike", "", sentence).decode()
            raise UnlikeCallsError(sentence)

    def _look_for_notes(self) -> None:
        """Raise the errors that other processes have noted in the store."""
        if self._store.check(["unlike"]):
            raise UnlikeCallsError(self._store.get("unlike").decode())
        if self._store.check(["broken"]):
            gone = self._describe_lost_processes()
            raise PeerLostError(gone or "The exchange has failed in another process.")

    def _say(self, polls: int, seconds: float, missing: Sequence[int]) -> None:
        if polls % max(round(NOTICE_SECONDS / _POLL_SECONDS), 1) == 0:
            _log.warning(
                "process %d has waited %.0f s for process %s of %d to exchange; it may evaluate, "
                "save or compile, or be in a collective of the program's own, such as "
                "torch.distributed.barrier(), after its data has ended: see join()",
                *(self._rank, seconds, ", ".join(map(str, missing)), self._size),
            )

    @contextlib.contextmanager
    def _naming_lost_processes(self) -> Iterator[None]:
        """Run the block; raise `PeerLostError` for errors of gloo if a process does not answer."""
        try:
            yield
        except (PeerLostError, UnlikeCallsError):
            raise
        except RuntimeError as error:
            unlike = None
            with contextlib.suppress(OSError, RuntimeError):  # the store may have ended
                if self._store.check(["unlike"]):
                    unlike = self._store.get("unlike").decode()
            if unlike is not None:  # the reason why another process has ended
                raise UnlikeCallsError(unlike) from error
            gone = self._describe_lost_processes()
            if gone is None:
                raise
            raise PeerLostError(gone) from error

    def _close(self) -> None:
        """Close all connections: a waiting collective would keep the process from ending."""
        other = (self._rank + 1) % self._size
        with contextlib.suppress(RuntimeError):  # gloo closes connections when a receive times out
            work: Any = dist.irecv(torch.empty(1), group=self._group, group_src=other, tag=0x510C)
            work.wait(timedelta(milliseconds=1))

    def _describe_lost_processes(self) -> str | None:
        """Return a sentence about processes that do not answer after a broken connection, or None.

        The others have `_ANSWER_SECONDS` to answer.
        """
        others = [rank for rank in range(self._size) if rank != self._rank]
        try:
            self._store.set("broken", str(self._rank))
            self._store.set(f"answers/{self._rank}", "")
            deadline = time.monotonic() + _ANSWER_SECONDS
            silent = others
            while silent and time.monotonic() < deadline:
                time.sleep(0.1)
                silent = [rank for rank in silent if not self._store.check([f"answers/{rank}"])]
        except (RuntimeError, OSError):
            return (
                "The store of torch.distributed cannot be reached, so the process that keeps it, "
                f"in most programs process 0 of {self._size}, has ended."
            )
        if not silent:
            return None
        own, hint = self._last.get(self._rank), ""
        if own is not None and own.kind == Kind.CONSOLIDATION:  # often called by process 0 alone
            hint = " Every process must call consolidated_state_dict()."
        return (
            f"Process {', '.join(map(str, silent))} of {self._size} has ended, or is stuck: it "
            f"does not answer, and a connection has broken.{hint}"
            + last_exchanges(
                {rank: str(self._last.get(rank, "")) for rank in silent},
                str(own or "an exchange"),
            )
        )


def _uses(tensors: Iterable[Any]) -> list[int]:
    """Return the number of references to each tensor, in Python or C++."""
    return [tensor._use_count() for tensor in tensors]


def _time_limit(group: Any) -> float:
    """Return the seconds after which operations of a gloo group fail."""
    # torch has no public function for it.
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
