"""The table that `benchmarks/tpu_proofs.py` writes to `docs/tpu.md`: compiled programs."""

from collections.abc import Iterator

from support.tpu_bytes import bytes_sent
from support.tpu_steps import CASES, NUM_PARAMETERS, PLACES, Facts, Place, facts, kinds

COLUMNS = (
    "where",
    "algorithm",
    "step",
    "collectives",
    "inside a slice: bytes per chip",
    "computed",
    "across slices: bytes per chip",
    "computed",
    "beside a transfer",
    "memory per chip: arguments",
    "temporary",
)
HEADER = "| " + " | ".join(COLUMNS) + " |"
BEGIN = "<!-- table of benchmarks/tpu_proofs.py -->"
END = "<!-- end of table -->"


def formula_kind(kind: str) -> str:
    """Return the name of the kind in `tpu_bytes`, where all rounds of gossip are one kind."""
    return "round" if kind.startswith("round") else kind


def table() -> Iterator[str]:
    """Yield the lines of the table, header first; compile what was not compiled yet."""
    yield HEADER
    yield "|" + "---|" * len(COLUMNS)
    for place in PLACES:
        yield from rows(place)


def rows(place: Place) -> Iterator[str]:
    """Yield the lines of one place."""
    for algorithm in [algorithm for algorithm, where in CASES if where == place]:
        for kind in kinds(algorithm, place):
            yield _line(_cells(algorithm, place, kind))


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cells(algorithm: str, place: Place, kind: str) -> tuple[str, ...]:
    program_facts = facts(algorithm, place, kind)
    ideal = bytes_sent(
        formula_kind(kind), NUM_PARAMETERS, place.replicas, place.chips, with_padding=False
    )
    several = place.num_slices > 1
    inside = (program_facts.bytes_sent("device"), ideal.device) if several else None
    across = (program_facts.bytes_sent("replica"), ideal.replica)
    if not several:
        inside, across = across, None
    schedule = program_facts.schedule
    return (
        place.name,
        algorithm,
        kind,
        _collectives(program_facts),
        *_numbers(inside),
        *_numbers(across),
        f"{schedule.num_under_way} of {len(schedule.products)}",
        f"{program_facts.argument_bytes:,}",
        f"{program_facts.temporary_bytes:,}",
    )


def _numbers(pair: tuple[int, int] | None) -> tuple[str, str]:
    return ("", "") if pair is None else (f"{pair[0]:,}", f"{pair[1]:,}")


def _collectives(program_facts: Facts) -> str:
    listed = []
    for axis in ("replica", "device"):
        counts = program_facts.counts(axis)
        counts.pop("recv", None)  # every send has one
        if counts:
            listed.append(f"{axis}: " + ", ".join(f"{n} {name}" for name, n in counts.items()))
    return "; ".join(listed) or "none"
