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
# Of other papers: averages of the moments, too, always, in periods, or both in every third average;
# outer steps in pairs; random elements in every update, half a percent or as many bytes as averages
# every 48, and the former under slow momentum; other merges of outer steps; fast components of
# momenta.
LOCAL_ADAM, DES_LOC, DES_LOC_BOTH = "local_adam", "des_loc", "des_loc_both_3"
NOLOCO = "noloco"
SPARTA, SPARTA_48, SLOWMO_SPARTA = "sparta", "sparta_of_48", "slowmo_sparta"
DILOCO_RDA, DILOCO_NORMS, DEMO = "diloco_rda", "diloco_norm_weighted", "demo"
INNER_STATES = {"diloco_reset": "reset", "diloco_average": "average"}

Row = dict[str, Any]


@dataclass(frozen=True, order=True)
class Cell:
    """One row of the results.

    Attributes:
      part: "classifier" or "language".
      optimizer: "sgd" (momentum 0.9), "adamw", "muon", "sign" (of `DEMO`), or
        "adamw_eps" (eps 1e-4, of `DES_LOC`).
      replicas: number of virtual replicas.
      algorithm: one of the names above; `SLOWMO_48` is slow momentum every 48 updates over averages
        every `period`, the other two step every `period`. Names in `INNER_STATES` are diloco that
        resets or averages the optimizer's moments in its slow steps.
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


def path_of(part: str) -> Path:
    """Return the file of a part's rows."""
    return RESULTS / f"{part}.jsonl"


def recorded(part: str) -> list[Row]:
    """Return the rows of a part, in the order in which they ended."""
    path = path_of(part)
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return list(map(json.loads, lines))


def by_cell() -> dict[Cell, Row]:
    """Return the rows of both parts."""
    return {cell_of(row): row for part in PARTS for row in recorded(part)}
