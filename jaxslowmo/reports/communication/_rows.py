"""The rows of a communication report."""

from dataclasses import dataclass

LEVELS = ("emitted", "compiled")


@dataclass(frozen=True)
class CommRow:
    """Collectives of one sort that one kind of step executes.

    Attributes:
      kind: kind of step; kinds overlap, see `comm_report`.
      axis: mesh axis, or axes in mesh order joined by ","; "?" if the device groups are those of no
        set of axes.
      collective: "all-reduce", "reduce-scatter", "all-gather", "collective-permute", "all-to-all",
        "ragged-all-to-all", "collective-broadcast"; between TPU slices "send" and "recv".
      level: "emitted" (StableHLO, what the program asks for) or "compiled" (optimised HLO, what
        runs).
      count: number of executions in one step; a combined one (several arrays) counts once.
      bytes: payload of one participating device, the whole logical buffer: the operands of an
        all-reduce, permute, all-to-all, broadcast, send; the full operand of a reduce-scatter; the
        full result of an all-gather, of a recv. Times `count`, as `wire_bytes`.
      wire_bytes: what one device sends when the collective runs as a ring over n = `group_size`
        devices: 2 (n-1)/n of `bytes` for an all-reduce, (n-1)/n for reduce-scatter, all-gather and
        all-to-all, all of them for a broadcast, or for a permute in which every device sends (the
        mean over devices where some do not); 0 for a recv.
      group_size: devices that take part together; 0 if unknown. For a permute the size of the axis.
      dtypes: element types on the wire, by their jax names.
      conditional: stands in a branch of a conditional.
      in_loop: stands in a loop.
      trip_count: how often the loops around it run it (already in `count`); 1 outside loops; None
        if the program does not tell, then it is counted once.
    """

    kind: str
    axis: str
    collective: str
    level: str
    count: int
    bytes: int
    wire_bytes: int
    group_size: int
    dtypes: tuple[str, ...]
    conditional: bool = False
    in_loop: bool = False
    trip_count: int | None = 1
