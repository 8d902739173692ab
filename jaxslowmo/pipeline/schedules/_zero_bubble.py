"""The zero-bubble schedules: the gradient of the input first, that of the weights when idle."""

from ._basic import RowEntry, build, round_robin
from ._operations import as_sizes, check_chunks
from ._schedule import Schedule


def zero_bubble(
    num_stages: int, num_microbatches: int, num_chunks: int = 1, *, memory: int = 1
) -> Schedule:
    """Make the ZB-H1 or ZB-H2 schedule, in which gradients of weights fill the bubble.

    A stage passes the gradient of its input on before it computes that of its weights, which on
    stage s waits for s (H1) or 2 s (H2) more microbatches. The bubble is
    (p - 1) (F + B - W) long with H1 and (p - 1) (F + B - 2 W) with H2, if that is not negative and
    m is large enough. H1 holds p microbatches on every stage, like the first stage of 1F1B; H2
    holds 2 p - 1.

    Args:
      num_stages: device stages, p >= 1.
      num_microbatches: microbatches of a step, m >= 1.
      num_chunks: must be 1; for two use `zbv`.
      memory: 1 for H1, 2 for H2.

    Returns:
      A `Schedule`.

    Raises:
      ValueError: a size below 1, several chunks, or another `memory`.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2. Its automatic
      scheduler with twice the memory (ZB-2p) is not implemented.
    """
    num_stages, num_microbatches, num_chunks = as_sizes(num_stages, num_microbatches, num_chunks)
    check_chunks("zero_bubble", num_chunks, 1, "use 'zbv' for two")
    if isinstance(memory, bool) or memory not in (1, 2):
        raise ValueError(f"`memory` must be 1 (ZB-H1) or 2 (ZB-H2), got {memory!r}.")
    memory = int(memory)
    rows = [
        _zero_bubble_row(num_microbatches, memory * (num_stages - 1 - stage), memory * stage)
        for stage in range(num_stages)
    ]
    return build("zero_bubble", rows, num_microbatches, round_robin(num_stages, 1))


def _zero_bubble_row(num_microbatches: int, warm_up: int, delay: int) -> list[RowEntry | None]:
    row: list[RowEntry | None] = [
        RowEntry("F", 0, i) for i in range(min(warm_up, num_microbatches))
    ]
    for index in range(num_microbatches):
        if warm_up + index < num_microbatches:
            row.append(RowEntry("F", 0, warm_up + index))
        row.append(RowEntry("B", 0, index))
        if index >= delay:
            row.append(RowEntry("W", 0, index - delay))
    late = range(max(num_microbatches - delay, 0), num_microbatches)
    return row + [RowEntry("W", 0, index) for index in late]
