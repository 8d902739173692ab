"""The names of the rows of results (`Cell`), and the recorded rows."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PARTS = ("classifier", "language")
STEPS = {"classifier": 960, "language": 1440}
REPLICAS = {"classifier": (4, 8, 16, 32), "language": (8, 16)}
PERIODS = (12, 48)
PARAMETERS = {"classifier": 2410, "language": 42_880}

ALL_REDUCE, SGP, LOCAL_SGD, DILOCO = "all_reduce", "sgp", "local_sgd", "diloco"
SLOWMO, SLOWMO_SGP, SLOWMO_48 = "slowmo", "slowmo_sgp", "slowmo_every_48"

Row = dict[str, Any]


@dataclass(frozen=True, order=True)
class Cell:
    """One row of the results.

    Attributes:
      part: "classifier" or "language".
      optimizer: "sgd" (momentum 0.9) or "adamw".
      replicas: number of virtual replicas.
      algorithm: one of the names above; `SLOWMO_48` is slow momentum every 48 updates over averages
        every `period`, the other two step every `period`.
      period: updates between exchanges; 1 where every update has one.
      steps: number of updates.
      codec: one of the names in `cells.CODECS`, in which exchanges are sent; "" for float32. Its
        settings are those of the cell without it.
    """

    part: str
    optimizer: str
    replicas: int
    algorithm: str
    period: int
    steps: int
    codec: str = ""

    @property
    def key(self) -> str:
        return " ".join(str(getattr(self, field.name)) for field in fields(self)).strip()


def cell_of(row: Row) -> Cell:
    return Cell(**{field.name: row[field.name] for field in fields(Cell) if field.name in row})


def recorded(part: str) -> list[Row]:
    """Return the rows of a part, in the order in which they ended."""
    path = RESULTS / f"{part}.jsonl"
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return list(map(json.loads, lines))


def by_cell() -> dict[Cell, Row]:
    """Return the rows of both parts."""
    return {cell_of(row): row for part in PARTS for row in recorded(part)}
