"""Waiting for a collective of `torch.distributed` that says who is awaited, or gone."""

import logging
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ...errors import PeerLostError

_log = logging.getLogger("torch_compat.slowmo")

NOTICE_SECONDS = 30.0
_POLL_SECONDS = 1.0
# How long the living have to say so once a connection has broken.
_ANSWER_SECONDS = 3.0
# By the names of groups, of which every process of a group has the same.
_of_groups: dict[tuple[str, int], "Waiting"] = {}


def backend_on(group: Any, device: torch.device) -> str:
    """The name of what a group uses for tensors of a device, such as "gloo"."""
    config = dist.get_backend_config(group)  # such as "cpu:gloo,cuda:nccl"
    return dict(part.split(":", 1) for part in config.split(",")).get(device.type, "")


class Waiting:
    """Waits for the collectives of one group; with gloo it knows who is missing.

    A collective that is done within a second costs no more than its own wait. Then processes tell
    each other through the store of `torch.distributed` that they wait, and in which collective. A
    connection that breaks is told as well: all who wait answer, and who does not is gone. Other
    backends wait on the device, with time limits and messages of their own.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._store = dist.PrefixStore(  # pyright: ignore[reportPrivateImportUsage]
            f"torch_compat.slowmo/{group.group_name}", distributed_c10d._get_default_store()
        )
        self._number = 0

    @classmethod
    def of(cls, group: Any) -> "Waiting":
        """That of a group, which all wrappers of the group share: they count together."""
        # torch has no public name for the store of the default group.
        key = group.group_name, id(distributed_c10d._get_default_store())
        if key not in _of_groups or _of_groups[key]._group is not group:
            _of_groups[key] = cls(group)
        return _of_groups[key]

    def until_done(
        self, begin: Callable[[], Any], device: torch.device, ranks: Sequence[int] | None = None
    ) -> None:
        """Begin a collective and wait for it.

        Args:
          begin: starts it, and returns its `Work`.
          device: of its tensors.
          ranks: who takes part; None for all.

        Raises:
          PeerLostError: a process is gone; it is named.
          RuntimeError: what the backend itself refuses.
        """
        self._number += 1
        if backend_on(self._group, device) != "gloo":
            begin().wait()
            return
        work = begin()
        since = time.monotonic()
        try:
            while not self._is_done(work):
                self._wait_on(time.monotonic() - since, ranks or range(self._size))
        except PeerLostError:
            raise
        except RuntimeError as error:
            gone = self._gone(str(error))
            if gone is None:
                raise
            raise PeerLostError(gone) from error

    def _is_done(self, work: Any) -> bool:
        try:
            work.wait(timedelta(seconds=_POLL_SECONDS))
        except RuntimeError:
            if work.is_completed():
                raise
            return False
        return True

    def _wait_on(self, seconds: float, ranks: Sequence[int]) -> None:
        """What a process does that waits: tell others, look for news, say who is awaited."""
        self._store.set(f"waits/{self._rank}", str(self._number))
        if self._store.check(["broken"]):
            gone = self._gone("another process has lost its connection")
            raise PeerLostError(gone or "The exchange has failed in another process.")
        polls, per_notice = round(seconds / _POLL_SECONDS), round(NOTICE_SECONDS / _POLL_SECONDS)
        if polls and polls % max(per_notice, 1) == 0:
            missing = [rank for rank in ranks if self._last(rank) < self._number]
            _log.warning(
                "process %d has waited %.0f s for process %s of %d to exchange; it may evaluate, "
                "save or compile",
                *(self._rank, seconds, ", ".join(map(str, missing)), self._size),
            )

    def _last(self, rank: int) -> int:
        """The last collective in which a process has said that it waits."""
        key = f"waits/{rank}"
        return int(self._store.get(key)) if self._store.check([key]) else 0

    def _gone(self, reason: str) -> str | None:
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
                f"in most programs process 0 of {self._size}, has ended ({reason})."
            )
        if not silent:
            return None
        return (
            f"Process {', '.join(map(str, silent))} of {self._size} has ended, or is stuck: it "
            f"does not answer, and a connection has broken ({reason})."
        )
