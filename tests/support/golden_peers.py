"""Recorded runs of other libraries in `golden/peers`."""

import json
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parents[1] / "golden" / "peers"


def cases(name: str) -> dict[str, tuple[dict[str, Any], dict[str, np.ndarray]]]:
    """Return the settings and arrays of each case of an `.npz` file, by the name of the case."""
    with np.load(FOLDER / name) as file:
        arrays = dict(file)
    arrays_by_case: dict[str, dict[str, np.ndarray]] = {}
    for key, value in arrays.items():
        case, _, rest = key.partition("/")
        arrays_by_case.setdefault(case, {})[rest] = value
    return {
        case: (json.loads(str(part.pop("meta"))), part) for case, part in arrays_by_case.items()
    }


def parameters(arrays: dict[str, np.ndarray], what: str) -> dict[str, np.ndarray]:
    """Return `{"p0": ..., "p1": ...}` for `what`: "init", "G", "grad" or "param"."""
    return {
        key.partition("/")[0]: value
        for key, value in arrays.items()
        if key.startswith("p") and key.partition("/")[2] == what
    }
