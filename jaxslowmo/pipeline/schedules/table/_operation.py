"""One operation of a table, and how torch writes it."""

from typing import Literal, NamedTuple

Kind = Literal["F", "B", "W", "BW"]
KINDS_OF_OPERATION: tuple[Kind, ...] = ("F", "B", "W", "BW")
TORCH_LETTERS: dict[Kind, str] = {"F": "F", "B": "I", "W": "W", "BW": "B"}
"""torch's letters: I is the gradient of the input, W that of the weights, B is both at once."""


class Operation(NamedTuple):
    """What a device stage does at one time: one operation of one microbatch.

    `kind` is "F", the forward pass; "B", the gradient of the stage's input; "W", the gradient of
    its weights; or "BW", both in one. `chunk` counts the stages of the model that the device
    stage holds, in the order of the model.
    """

    kind: Kind
    stage: int
    chunk: int
    microbatch: int


class Needs(NamedTuple):
    """What others wait for: that `kind` of a microbatch is done on a stage of the model.

    "B" is here the gradient of the input, whether "B" or "BW" computes it.
    """

    kind: Literal["F", "B", "W"]
    model_stage: int
    microbatch: int


def gives(operation: Operation, model_stage: int) -> Needs:
    """What is there once `operation` is done."""
    kind = "B" if operation.kind == "BW" else operation.kind
    return Needs(kind, model_stage, operation.microbatch)


def needs(operation: Operation, model_stage: int, num_model_stages: int) -> list[Needs]:
    """What must be there before `operation` begins.

    F waits for F of the stage of the model before, B for its own F and for B of the stage after,
    W for its own B.
    """
    microbatch = operation.microbatch
    if operation.kind == "F":
        return [Needs("F", model_stage - 1, microbatch)] if model_stage else []
    if operation.kind == "W":
        return [Needs("B", model_stage, microbatch)]
    own = [Needs("F", model_stage, microbatch)]
    if model_stage + 1 < num_model_stages:
        own.append(Needs("B", model_stage + 1, microbatch))
    return own


def in_torch_letters(operation: Operation, model_stage: int) -> str:
    """`operation` as torch writes it, such as "3I0": stage of the model, letter, microbatch."""
    return f"{model_stage}{TORCH_LETTERS[operation.kind]}{operation.microbatch}"
