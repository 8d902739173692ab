"""Recorded runs of other libraries in `golden/peers`."""

import json
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parents[1] / "golden" / "peers"


def cases(name: str) -> dict[str, tuple[dict[str, Any], dict[str, np.ndarray]]]:
    """Settings and arrays of each case of an `.npz` file."""
    with np.load(FOLDER / name) as file:
        arrays = dict(file)
    found: dict[str, dict[str, np.ndarray]] = {}
    for key, value in arrays.items():
        case, _, rest = key.partition("/")
        found.setdefault(case, {})[rest] = value
    return {case: (json.loads(str(own.pop("meta"))), own) for case, own in found.items()}


def parameters(arrays: dict[str, np.ndarray], what: str) -> dict[str, np.ndarray]:
    """`{"p0": ..., "p1": ...}` of `init`, `G`, `grad` or `param`."""
    return {
        key.partition("/")[0]: value
        for key, value in arrays.items()
        if key.startswith("p") and key.partition("/")[2] == what
    }
