"""A step beside which the tables are asked for the next batch of a pipeline."""

from collections import deque
from collections.abc import Callable
from typing import Any

from ..._typing import PyTree
from ..step import count_here
from ._stages import Prepared

_KEPT = 32  # counts of so many steps are left on the devices


class Beside:
    """Calls a step and hands it the batch that comes next; has the step's attributes.

    Args:
      ahead: `step.ahead(...)`.
      step: of `js.make_train_step`, with tables.
      upcoming: returns the batch after the one that is used, None where there is none.
    """

    def __init__(self, ahead: Any, step: Any, upcoming: Callable[[], Prepared | None]) -> None:
        self._ahead, self._step, self._upcoming = ahead, step, upcoming
        self._asked: Any = None
        self._asked_for: PyTree = None
        self._counts: deque[dict[str, Any]] = deque()
        self._resent = self._needed = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_step" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._step, name)

    def __call__(
        self, state: PyTree, batch: PyTree, weight: Any = None, *, window: Any = None
    ) -> tuple[PyTree, Any]:
        """`step`, and beside it what the next batch asks for."""
        return self._run(state, batch, weight, window)

    def collect(
        self,
        state: PyTree,
        batch: PyTree,
        weight: Any = None,
        window: Any = None,
        *,
        num_batches: int = 0,
    ) -> tuple[PyTree, Any]:
        """`step.collect`, likewise."""
        return self._run(state, batch, weight, window, collect=True, num_batches=num_batches)

    @property
    def resent_share(self) -> float | None:
        """Of the rows that were asked for, the part that was sent again; None where none can be."""
        self._read(0)
        if self._ahead.mode != "patched" or not self._needed:
            return None
        return self._resent / self._needed

    def _run(
        self, state: PyTree, batch: PyTree, weight: Any, window: Any, **collecting: Any
    ) -> tuple[PyTree, Any]:
        asked = self._asked if self._asked_for is batch else self._ahead.prime(state, batch)
        found = self._upcoming()
        upcoming = None if found is None else found.batch
        done, metrics, self._asked = self._ahead(
            state, batch, asked, upcoming, weight, window, **collecting
        )
        self._asked_for = upcoming
        self._counts.append({n: x for n, x in metrics.items() if n.startswith("embeddings/")})
        self._read(_KEPT)
        return done, metrics

    def _read(self, kept: int) -> None:
        """Add up the counts of the oldest steps, which have ended or are waited for."""
        while len(self._counts) > kept:
            for name, count in self._counts.popleft().items():
                if name.endswith("/resent"):
                    self._resent += count_here(count)
                elif name.endswith("/asked"):
                    self._needed += count_here(count)
