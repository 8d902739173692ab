"""The interleaved schedule: several chunks per stage, alternating one F and one backward pass."""

from typing import Literal

from ..._support.checks import checks_flags
from ._basic import RowEntry, build, round_robin
from ._operations import as_sizes
from ._schedule import Schedule


@checks_flags("schedules.interleaved")
def interleaved(
    num_stages: int,
    num_microbatches: int,
    num_chunks: int = 1,
    *,
    warm_up: Literal["few", "all"] = "few",
    forward_only: bool = False,
) -> Schedule:
    """Make Megatron's interleaved schedule: v chunks per stage, p microbatches per turn.

    A turn is p microbatches of one chunk. The bubble is (p - 1) / (v m + p - 1), about 1 / v of
    that of `one_f_one_b`, for v times its messages. Idle columns are where torch has them.

    Args:
      num_stages: device stages, p >= 1.
      num_microbatches: microbatches of a step, m; a multiple of p.
      num_chunks: stages of the model per device stage, v >= 1; stage k of the model is placed
        on device stage k % p.
      warm_up: forward passes before the first backward pass: "few" is Megatron's number,
        2 (p - s - 1) + (v - 1) p on stage s; "all" is all of them, as in ColossalAI for m = p.
      forward_only: whether to leave out backward passes, as for evaluation.

    Returns:
      A `Schedule`.

    Raises:
      ValueError: a size below 1, m that p does not divide, or an unknown `warm_up`.

    Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters,
      arXiv 2104.04473, section 2.2.
    """
    num_stages, num_microbatches, num_chunks = as_sizes(num_stages, num_microbatches, num_chunks)
    if num_microbatches % num_stages:
        raise ValueError(
            "interleaved: `num_microbatches` must be a multiple of `num_stages` "
            f"({num_stages}), got {num_microbatches}."
        )
    if warm_up not in ("few", "all"):
        raise ValueError(f'`warm_up` must be "few" or "all", got {warm_up!r}.')
    # (chunk, microbatch) in order: `num_stages` microbatches of a chunk, then of the next chunk.
    per_turn = num_stages * num_chunks
    turns = [
        (k % per_turn // num_stages, k // per_turn * num_stages + k % num_stages)
        for k in range(num_microbatches * num_chunks)
    ]
    forward = [RowEntry("F", chunk, i) for chunk, i in turns]
    backward = [RowEntry("BW", num_chunks - 1 - chunk, i) for chunk, i in turns]
    if forward_only:
        rows = [forward] * num_stages
    elif warm_up == "all":
        rows = [forward + backward] * num_stages
    else:
        rows = [
            _interleaved_row(stage, num_stages, num_chunks, forward, backward) for stage in range(num_stages)
        ]
    return build("interleaved", rows, num_microbatches, round_robin(num_stages, num_chunks))


def _interleaved_row(
    stage: int, num_stages: int, num_chunks: int, forward: list[RowEntry], backward: list[RowEntry]
) -> list[RowEntry | None]:
    """Return the row of one stage: warm-up, F and B in turn, the remaining backward passes."""
    below = num_stages - 1 - stage
    warm = min(2 * below + (num_chunks - 1) * num_stages, len(forward))
    # The first gradient arrives no earlier than this column: p microbatches of all chunks, and
    # the way to the last stage and back. The idle columns are torch's.
    first_backward = num_chunks * num_stages + 2 * below
    row: list[RowEntry | None] = [None] * stage
    row += forward[:warm]
    row += [None] * (first_backward - warm - stage if warm else 0)
    for index, step in enumerate(backward):
        if warm + index < len(forward):
            row += [forward[warm + index], step]
        else:  # an idle column, in which other stages still run an F
            row += [None, step]
    return row
