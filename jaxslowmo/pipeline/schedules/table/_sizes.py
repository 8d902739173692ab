"""Arguments of the kinds of schedules."""

import operator


def as_size(argument: str, value: object) -> int:
    """`value`, also one of NumPy's integers, as an int; raises unless it is one >= 1."""
    try:
        size = operator.index(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        size = 0
    if isinstance(value, bool) or size < 1:
        raise ValueError(f"`{argument}` must be an int >= 1, got {value!r}.")
    return size


def as_sizes(num_stages: int, num_microbatches: int, num_chunks: int) -> tuple[int, int, int]:
    """Sizes of a schedule, each an int >= 1."""
    return (
        as_size("num_stages", num_stages),
        as_size("num_microbatches", num_microbatches),
        as_size("num_chunks", num_chunks),
    )


def check_chunks(kind: str, num_chunks: int, rule: int, instead: str) -> None:
    """Raise unless a device stage holds as many stages of the model as `kind` is made for."""
    if num_chunks != rule:
        raise ValueError(f"{kind}: `num_chunks` must be {rule}, got {num_chunks}; {instead}.")
