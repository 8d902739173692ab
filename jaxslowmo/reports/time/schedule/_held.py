"""Bytes that stages hold and send, by the table of a schedule."""

from collections.abc import Sequence
from itertools import pairwise

import jax

from ....pipeline import Schedule
from ._stages import Stage, activations, is_floating, num_bytes


def held_bytes(schedule: Schedule, stages: Sequence[Stage]) -> tuple[int, ...]:
    """Per device stage, the most bytes that it holds at once of what F and B leave.

    What F leaves is held until its W (or BW) is done, what B leaves for W from B to W.
    """
    if schedule.forward_only:
        return (0,) * schedule.num_stages
    left = [num_bytes(stage.program.stash) for stage in stages]
    kept = [num_bytes(stage.program.kept) for stage in stages]
    most = []
    for row in schedule.rows:
        now = peak = 0
        for operation in filter(None, row):
            k = schedule.model_stage(operation)
            now += {"F": left[k], "B": kept[k]}.get(operation.kind, 0)
            peak = max(peak, now)
            now -= {"W": left[k] + kept[k], "BW": left[k]}.get(operation.kind, 0)
        most.append(peak)
    return tuple(most)


def sent_bytes(schedule: Schedule, stages: Sequence[Stage]) -> tuple[int, ...]:
    """Per device stage, the bytes of activations and cotangents that it sends in a step."""
    sent = [0] * schedule.num_stages
    for row in schedule.rows:
        for operation in filter(None, row):
            if schedule.is_sent(operation):
                model_stage = schedule.model_stage(operation)
                sent[operation.stage] += message_bytes(stages, model_stage, operation.kind)
    return tuple(sent)


def message_bytes(stages: Sequence[Stage], model_stage: int, kind: str) -> int:
    """What a stage of the model sends after F, an activation, or after B, a cotangent of one."""
    if kind == "F":
        return num_bytes(activations(stages[model_stage].program.y))
    return num_bytes(
        [x for x in jax.tree.leaves(activations(stages[model_stage].x)) if is_floating(x)]
    )


def permuted_bytes(schedule: Schedule, stages: Sequence[Stage]) -> int:
    """What one device hands to collective permutes in a step of one program.

    In every tick an activation and a cotangent for each distance between neighbouring stages,
    whether or not there is one to send.
    """
    if len(stages) == 1:
        return 0
    placement = schedule.placement
    distances = {(b - a) % schedule.num_stages for a, b in pairwise(placement)} - {0}
    each = message_bytes(stages, 0, "F")
    if not schedule.forward_only:
        each += message_bytes(stages, 1, "B")
    return len(schedule.ticks()) * len(distances) * each
