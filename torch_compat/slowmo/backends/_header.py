"""Messages that processes send each other before an exchange: its kind and size."""

import time
from collections import deque
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.distributed as dist

# Tags of these messages; other messages of a program have small numbers.
_TAG, _UNUSED_TAG = 0x510A, 0x510B
_NOTHING = -1  # no kind of exchange
_LONGEST_SLEEP_SECONDS = 1e-3


class Kind(IntEnum):
    """The kinds of exchanges; `str` describes them for error messages."""

    description: str

    def __new__(cls, number: int, description: str) -> "Kind":
        """Make a member, which is its number."""
        self = int.__new__(cls, number)
        self._value_, self.description = number, description
        return self

    def __str__(self) -> str:
        return self.description

    HOSTS = 1, "the exchange of host names in the constructor"
    PARAMETERS = 2, "the broadcast of the parameters of process 0"
    START = 3, "the check that processes have equal parameters"
    BUFFERS = 4, "the broadcast of buffers before a forward pass"
    GRADIENTS = 5, "the average of gradients in the node after a backward pass"
    AVERAGE = 6, "the average of parameters in perform_slowmo()"
    GOSSIP = 7, "the exchange of parameters with peers in perform_slowmo()"
    SLOW_STEP = 8, "the slow step in perform_slowmo()"
    CONSOLIDATION = 9, "the exchange of consolidated_state_dict()"
    BUFFER_AVERAGE = 17, "the average of buffers in perform_slowmo()"
    REARRANGEMENT = 18, "the exchange of slow momentum of other parameters in perform_slowmo()"
    # Kinds in a join context.
    ROUND = 10, "the first exchange of a step in a join context"
    NO_DATA = 11, "the end of a join context"
    STEP = 12, "perform_slowmo() in a join context"
    ROUND_ENDS = 13, "the end of a join context"
    NODE = 14, "the broadcast of parameters in the node in a join context"
    RATES = 15, "the broadcast of learning rates in a join context"
    OPTIMIZER = 16, "the broadcast of the optimizer's state in the node at the end of join()"


class Exchange(NamedTuple):
    """One exchange; processes that take part in it have equal ones.

    Attributes:
      kind: what is exchanged.
      num_bytes: the bytes that one process contributes; for `Kind.NO_DATA` the number of updates
        that it has made with data, or -1 if it cannot make any without data.
      num_updates: number of calls of `perform_slowmo` so far.
      num_missed: optimizer steps that no call has followed so far, less calls without a step.
      wrapper: number of the wrapper, in the order in which this process has made them, from 0.
    """

    kind: Kind
    num_bytes: int
    num_updates: int
    num_missed: int = 0
    wrapper: int = 0

    def __str__(self) -> str:
        calls, steps = self.num_updates, self.num_updates + self.num_missed
        after = f"after {_count(calls, 'call')} of perform_slowmo() in {_count(steps, 'step')}"
        which = f" of wrapper {self.wrapper + 1}" if self.wrapper else ""
        return f"{self.kind} ({self.num_bytes:,} bytes, {after}{which})"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


class Headers:
    """The headers of exchanges between the processes of one gloo group, 40 bytes each.

    A process sends headers in the order of its calls: its next header says what it does next,
    whichever processes take part in that. A receive for the next header is posted before it is
    sent, so that a header takes one network latency and no round trip.
    """

    def __init__(self, group: Any, size: int) -> None:
        self._group_ref = ref(group)  # a group ends with its connections
        self._arriving = torch.full((size, len(Exchange._fields)), _NOTHING)
        self._view = self._arriving.numpy()
        self._receives: dict[int, Any] = {}
        # A send may end after the exchange: its buffer must stay alive until then.
        self._sends: dict[int, deque[Any]] = {}

    @property
    def _group(self) -> Any:
        return self._group_ref()

    def send(self, header: Exchange, targets: Sequence[int], sources: Sequence[int]) -> None:
        """Begin to send `header` to `targets`, and to receive the headers of `sources`.

        Raises:
          RuntimeError: a connection is broken.
        """
        for rank in sources:
            self._receive(rank)
        words = torch.tensor(header)
        for rank in targets:
            work = dist.isend(words, group=self._group, group_dst=rank, tag=_TAG)
            self._sends.setdefault(rank, deque(maxlen=8)).append((words, work))

    def missing(self, sources: Sequence[int]) -> list[int]:
        """Return the `sources` whose header has not arrived."""
        return [rank for rank in sources if self._view[rank, 0] == _NOTHING]

    def look(self, ranks: Sequence[int]) -> dict[int, Exchange]:
        """Return the headers of `ranks`, which have arrived."""
        for rank in ranks:
            if rank in self._receives:
                self._receives.pop(rank).wait()  # it is done, or nearly
        rows = {rank: self._view[rank].tolist() for rank in ranks}
        return {rank: Exchange(Kind(kind), *rest) for rank, (kind, *rest) in rows.items()}

    def take(self, ranks: Sequence[int]) -> dict[int, Exchange]:
        """Return the headers of `ranks`, and begin to receive their next ones."""
        headers = self.look(ranks)
        for rank in ranks:
            self._view[rank] = _NOTHING
            self._receive(rank)
        return headers

    def probe(self, ranks: Sequence[int]) -> None:
        """Raise the `RuntimeError` of a connection to `ranks` that is broken."""
        for rank in ranks:  # gloo refuses to begin anything on a broken connection
            dist.irecv(torch.empty(0), group=self._group, group_src=rank, tag=_UNUSED_TAG)

    def _receive(self, rank: int) -> None:
        if rank not in self._receives and self._view[rank, 0] == _NOTHING:
            self._receives[rank] = dist.irecv(
                self._arriving[rank], group=self._group, group_src=rank, tag=_TAG
            )


def doze(seconds: float) -> None:
    """Sleep a small part of `seconds`, the time that the wait has lasted.

    Waiting for a receive of gloo with a time limit is no alternative: at the limit gloo closes all
    connections, and a thread that waits when the interpreter ends aborts the process.
    """
    time.sleep(min(seconds / 8, _LONGEST_SLEEP_SECONDS))
