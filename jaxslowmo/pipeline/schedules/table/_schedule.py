"""A table of operations: which stage of a pipeline computes what, in which order."""

from dataclasses import dataclass
from functools import cached_property

from ._check import check_cells, check_sizes
from ._costs import Costs, as_time, cost_table
from ._order import in_order
from ._rows import Cell, Operation, Table, in_torch_letters
from ._simulate import Simulation, free_running, in_lockstep
from ._ticks import Tick, check_columns, ticks_of


@dataclass(frozen=True)
class Schedule(Table):
    """A schedule as data: per device stage its operations in order.

    Made by the functions beside it, such as `js.schedules.one_f_one_b`, and checked when it is
    made: every operation is there once, on the stage that holds it, and no stage waits for ever.

    Attributes:
      name: what made it, such as "one_f_one_b".
      num_stages: device stages of the pipeline.
      num_microbatches: microbatches of a step.
      num_chunks: stages of the model that a device stage holds.
      placement: of each stage of the model, in its order, the device stage that holds it.
      cells: per device stage what it does in each column of the table: no operation (idle), one,
        or an F and a backward operation that share the column.
      lockstep: whether the table is made for lockstep, so that its columns are ticks, and a
        column of F alone with the column of B (or BW) alone after it is one; else only the order
        counts.
      rows: per device stage its operations in order; None is idle.
      model_stages: per device stage the stages of the model that it holds, by chunk.
      num_model_stages: `num_stages * num_chunks`.
      forward_only: whether the table holds no backward operation.
      splits: whether B and W of some microbatch stand apart from each other.
      in_order: all operations, none before one that it needs: an order for a single dispatcher.
      stash: per device stage, the most that it holds at once of what F leaves for the way back,
        in microbatches of one chunk: each from the start of its F until the end of its W (or BW).
        A forward-only table holds none.
      sends: per device stage, the messages that it sends to another one in a step.
    """

    def __post_init__(self) -> None:
        check_sizes(self)
        check_cells(self)
        _ = self.in_order  # raises where a stage waits for ever
        if self.lockstep:
            check_columns(self)

    @cached_property
    def in_order(self) -> tuple[Operation, ...]:
        """All operations, none before one that it needs: an order for a single dispatcher."""
        return tuple(in_order(self))

    def orders(self) -> list[str]:
        """The table in torch's notation: per device stage a string such as "0F0,0F1,,3I0,3W0".

        Between commas: stage of the model, operation (F forward, I gradient of the input, W
        gradient of the weights, B both), microbatch. Nothing is idle, and
        "(0F3;3B1)OVERLAP_F_B" is an F and a backward operation that share a column.
        """
        return [",".join(map(self._in_letters, row)) for row in self.cells]

    def _in_letters(self, cell: Cell) -> str:
        words = [in_torch_letters(operation, self.model_stage(operation)) for operation in cell]
        return f"({';'.join(words)})OVERLAP_F_B" if len(words) > 1 else "".join(words)

    def ticks(self) -> tuple[Tick, ...]:
        """What each stage does in each tick, where all stages begin every tick together.

        What an operation makes is with other stages in the tick after. Ticks are the columns of
        a table that is made for lockstep. In others every operation comes as early as its row
        allows, or in its column where all columns keep the dependencies and take no longer (with
        F = B = W). Ticks in which nobody does anything are left out.

        Returns:
          Per tick and device stage a tuple of 0, 1 or 2 operations; of two, F is the first.
        """
        return self._ticks

    @cached_property
    def _ticks(self) -> tuple[Tick, ...]:
        return ticks_of(self)

    def simulate(
        self,
        *,
        forward: Costs = 1.0,
        backward_input: Costs = 1.0,
        backward_weight: Costs = 1.0,
        send: float = 0.0,
        lockstep: bool = False,
    ) -> Simulation:
        """Time, bubble and stash of one step under given times.

        Args:
          forward: time of F; one number for a whole device stage, whose chunks divide it, one
            number per device stage, or one per stage of the model (which are not divided).
          backward_input: time of B, likewise.
          backward_weight: time of W, likewise. BW takes B + W.
          send: time until what is sent has arrived. Free-running it blocks nobody; in lockstep
            every tick ends with it.
          lockstep: whether all stages begin each tick together, so that it lasts as long as the
            longest of them, as in one program with a permutation after each tick.

        Returns:
          A `Simulation`.

        Raises:
          ValueError: a time that is no finite number >= 0, times that are all 0, or a sequence
            of another length.
        """
        costs = cost_table(
            self.placement,
            self.num_stages,
            forward=forward,
            backward_input=backward_input,
            backward_weight=backward_weight,
        )
        send = as_time("send", send)
        if lockstep:
            return in_lockstep(self, self.ticks(), costs, send)
        return free_running(self, self.in_order, costs, send)
