"""Forward passes and whole backward passes: GPipe, and one F one B."""

from ..table import Schedule, as_sizes, check_chunks
from ._build import Step, build, round_robin


def gpipe(
    num_stages: int, num_microbatches: int, num_chunks: int = 1, *, forward_only: bool = False
) -> Schedule:
    """All forward passes, then all backward passes.

    The bubble is (p - 1) / (v m + p - 1) for p stages, m microbatches and v chunks (m >= p), and
    every stage holds all m microbatches of all of its chunks.

    Args:
      num_stages: device stages, p >= 1.
      num_microbatches: microbatches of a step, m >= 1.
      num_chunks: stages of the model per device stage, v >= 1; stage k of the model lies on
        device stage k % p (a circular pipeline).
      forward_only: no backward passes, as for evaluation.

    Returns:
      A `Schedule`.

    Raises:
      ValueError: a size below 1.
    """
    num_stages, num_microbatches, num_chunks = as_sizes(num_stages, num_microbatches, num_chunks)
    forward = [Step("F", c, i) for c in range(num_chunks) for i in range(num_microbatches)]
    backward = [
        Step("BW", c, i) for c in reversed(range(num_chunks)) for i in range(num_microbatches)
    ]
    row = forward if forward_only else forward + backward
    return build("gpipe", [row] * num_stages, num_microbatches, round_robin(num_stages, num_chunks))


def one_f_one_b(
    num_stages: int, num_microbatches: int, num_chunks: int = 1, *, forward_only: bool = False
) -> Schedule:
    """Megatron's schedule: after a warm-up each stage alternates one F and one backward pass.

    The bubble is GPipe's, (p - 1) / (m + p - 1), but stage s holds min(p - s, m) microbatches. It
    is made for stages that run free; in lockstep see `lockstep`.

    Args:
      num_stages: device stages, p >= 1.
      num_microbatches: microbatches of a step, m >= 1.
      num_chunks: 1; with more, `interleaved`.
      forward_only: no backward passes, as for evaluation.

    Returns:
      A `Schedule`.

    Raises:
      ValueError: a size below 1, or several chunks.

    Source: Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, arXiv 2006.09503.
    """
    num_stages, num_microbatches, num_chunks = as_sizes(num_stages, num_microbatches, num_chunks)
    check_chunks("one_f_one_b", num_chunks, 1, "use 'interleaved' for more")
    rows = [
        _one_stage(num_microbatches, num_stages - 1 - stage, forward_only)
        for stage in range(num_stages)
    ]
    return build("one_f_one_b", rows, num_microbatches, round_robin(num_stages, 1))


def _one_stage(num_microbatches: int, warm_up: int, forward_only: bool) -> list[Step]:
    forward = [Step("F", 0, i) for i in range(num_microbatches)]
    if forward_only:
        return forward
    warm_up = min(warm_up, num_microbatches)
    row = forward[:warm_up]
    for index in range(num_microbatches):
        row += [*forward[warm_up + index : warm_up + index + 1], Step("BW", 0, index)]
    return row
