"""Waiting for a collective of `torch.distributed` that says who is awaited, or gone."""

import contextlib
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ...errors import PeerLostError, UnlikeCallsError, unlike_calls
from ._header import Exchange, Headers, Kind, doze

_log = logging.getLogger("torch_compat.slowmo")

NOTICE_SECONDS = 30.0
_POLL_SECONDS = 1.0
# How long the living have to say so once a connection has broken.
_ANSWER_SECONDS = 3.0
# By the names of groups, of which every process of a group has the same.
_of_groups: dict[tuple[str, int], "Waiting"] = {}
# How many groups of a name there have been, in all of their processes alike.
_made: Counter[str] = Counter()


def backend_on(group: Any, device: torch.device) -> str:
    """The name of what a group uses for tensors of a device, such as "gloo"."""
    config = dist.get_backend_config(group)  # such as "cpu:gloo,cuda:nccl"
    return dict(part.split(":", 1) for part in config.split(",")).get(device.type, "")


class Waiting:
    """Waits for the processes of one group; with gloo it knows who is missing.

    Before an exchange processes send each other its header (`Headers`), so that all who then take
    part in a collective have come to the same one. Whoever waits for longer than a second looks
    into the store of `torch.distributed`, in which the others note that they make different calls,
    or that a connection has broken: then all who wait answer, and who does not is gone. Other
    backends wait on the device, with time limits and messages of their own.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._store = dist.PrefixStore(  # pyright: ignore[reportPrivateImportUsage]
            f"torch_compat.slowmo/{group.group_name}/{_made[group.group_name]}",
            distributed_c10d._get_default_store(),
        )
        _made[group.group_name] += 1
        self._headers = Headers(group, self._size)
        self.wrappers = itertools.count()  # numbers for those of the group

    @classmethod
    def of(cls, group: Any) -> "Waiting":
        """That of a group, which all wrappers of the group share: their calls have one order."""
        # torch has no public name for the store of the default group.
        key = group.group_name, id(distributed_c10d._get_default_store())
        if key not in _of_groups or _of_groups[key]._group is not group:
            _of_groups[key] = cls(group)
        return _of_groups[key]

    def meet(
        self, exchange: Exchange, targets: Sequence[int], sources: Sequence[int]
    ) -> dict[int, Exchange]:
        """Send the header of an exchange, and wait for those of others.

        Args:
          exchange: to which this process has come.
          targets: other processes that shall know.
          sources: other processes whose header must be the same, or of `Kind.NO_DATA`.

        Returns:
          The headers of this process and of `sources`.

        Raises:
          UnlikeCallsError: a process has come to another exchange.
          PeerLostError: a process is gone; it is named.
        """
        with self._telling_who_is_gone():
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
            self._compare(headers)
            return headers

    def until_done(self, begin: Callable[[], Any], *tensors: torch.Tensor) -> None:
        """Begin a collective and wait for it.

        Args:
          begin: starts it, and returns its `Work`.
          *tensors: that it reads and writes.

        Raises:
          UnlikeCallsError: processes have come to different exchanges.
          PeerLostError: a process is gone; it is named.
          RuntimeError: what the backend itself refuses.
        """
        if tensors and backend_on(self._group, tensors[0].device) != "gloo":
            begin().wait()
            return
        uses = _uses(tensors)
        with self._telling_who_is_gone():
            work = begin()
            try:
                while not self._is_done(work):
                    self._look_for_notes()
            except (PeerLostError, UnlikeCallsError):
                self._close()
                raise
        # A thread of gloo lets go of the tensors a little later, for which it needs Python: where
        # the interpreter ends meanwhile, it would be aborted.
        del work
        deadline = time.monotonic() + _POLL_SECONDS
        while any(now > before for now, before in zip(_uses(tensors), uses, strict=True)):
            time.sleep(0)
            if time.monotonic() > deadline:  # something else has kept them
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
        """Raise `UnlikeCallsError`, here and in all who wait, unless the headers are equal."""
        calls = {rank: call for rank, call in headers.items() if call.kind != Kind.NO_DATA}
        if len(set(calls.values())) > 1:
            sentence = unlike_calls({rank: str(call) for rank, call in calls.items()})
            with contextlib.suppress(RuntimeError, OSError):  # the store may have ended
                # The first sentence is that of all.
                sentence = self._store.compare_set("unlike", "", sentence).decode()
            raise UnlikeCallsError(sentence)

    def _look_for_notes(self) -> None:
        """Raise what other processes have noted."""
        if self._store.check(["unlike"]):
            raise UnlikeCallsError(self._store.get("unlike").decode())
        if self._store.check(["broken"]):
            gone = self._gone()
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
    def _telling_who_is_gone(self) -> Iterator[None]:
        """Whatever gloo raises becomes a `PeerLostError` where a process does not answer."""
        try:
            yield
        except (PeerLostError, UnlikeCallsError):
            raise
        except RuntimeError as error:
            with contextlib.suppress(OSError, RuntimeError):
                if self._store.check(["unlike"]):  # why another process has ended
                    raise UnlikeCallsError(self._store.get("unlike").decode()) from error
            gone = self._gone()
            if gone is None:
                raise
            raise PeerLostError(gone) from error

    def _close(self) -> None:
        """Close all connections: a collective that waits would keep the process from ending."""
        other = (self._rank + 1) % self._size
        with contextlib.suppress(RuntimeError):  # gloo's answer to a receive that takes too long
            work: Any = dist.irecv(torch.empty(1), group=self._group, group_src=other, tag=0x510C)
            work.wait(timedelta(milliseconds=1))

    def _gone(self) -> str | None:
        """Who is gone: whoever does not answer while the others say that a connection broke.

        Returns:
          A sentence; None where all have answered.
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
        return (
            f"Process {', '.join(map(str, silent))} of {self._size} has ended, or is stuck: it "
            "does not answer, and a connection has broken."
        )


def _uses(tensors: Iterable[Any]) -> list[int]:
    """How many hold each of the tensors, in Python or beneath it."""
    return [tensor._use_count() for tensor in tensors]


def _time_limit(group: Any) -> float:
    """The seconds after which operations of a gloo group fail."""
    # A public way to ask for it is missing.
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
