"""What a scenario came to, and how two outcomes differ."""

import re
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

Arrays = dict[str, np.ndarray]


class Outcome(TypedDict):
    """Of one scenario in one spelling.

    `error` is empty, or the type, what the message names first, and the message itself; `at` is
    where it was raised, `warned` the warnings in the same form as `error`; `file` has the arrays.
    """

    error: list[str]
    at: str
    warned: list[list[str]]
    file: str


def _named(message: str) -> str:
    """What is wrong, as messages of this package say it first: `argument`, or a 'name'."""
    quoted = re.search(r"`[^`]+`", message) or re.search(r"'[^']+'", message)
    return re.sub(r"\d+", "N", quoted[0]) if quoted else ""


def outcome_of(run: Callable[[], Arrays], file: Path) -> Outcome:
    """Runs, and writes the arrays that it returns into the file."""
    result: Outcome = {"error": [], "at": "", "warned": [], "file": ""}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            arrays = run()
        except Exception as error:
            result["error"] = [type(error).__name__, _named(str(error)), str(error)]
            result["at"] = traceback.format_exc(limit=-1)
        else:
            save(file, arrays)
            result["file"] = str(file)
    warned = {
        (one.category.__name__, _named(str(one.message)), str(one.message).splitlines()[0])
        for one in caught
        if "jaxslowmo" in str(one.message) or issubclass(one.category, UserWarning)
    }
    result["warned"] = sorted(map(list, warned))
    return result


def save(file: Path, arrays: Arrays) -> None:
    """With dtypes that NumPy's files do not know, such as bfloat16, as bytes beside their names."""
    file.parent.mkdir(parents=True, exist_ok=True)
    flat = {name: np.frombuffer(x.tobytes(), np.uint8) for name, x in arrays.items()}
    kinds = np.array([f"{x.dtype}|{list(x.shape)}" for x in arrays.values()])
    with file.open("wb") as out:  # by its name it would become another file
        np.savez(out, names=np.array(list(arrays)), kinds=kinds, **_numbered(flat))


def _numbered(arrays: Arrays) -> dict[str, Any]:
    return {f"array{i}": x for i, x in enumerate(arrays.values())}


def load(file: Path) -> dict[str, tuple[str, bytes]]:
    """Dtype and shape in words, and bytes, of each array."""
    with np.load(file) as stored:
        return {
            str(name): (str(kind), stored[f"array{i}"].tobytes())
            for i, (name, kind) in enumerate(zip(stored["names"], stored["kinds"], strict=True))
        }


def _largest(kind: str, one: bytes, other: bytes) -> float:
    """The largest difference of two arrays; infinite where one has a NaN that the other has not."""
    import ml_dtypes

    name = kind.split("|")[0]
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    a, b = (np.frombuffer(x, dtype).astype(np.float64) for x in (one, other))
    return float(
        np.nan_to_num(np.abs(a - b)[~(np.isnan(a) & np.isnan(b))], nan=np.inf).max(initial=0)
    )


def differences(
    before: Outcome,
    now: Outcome,
    only: tuple[str, ...] = (),
    labels: tuple[str, str] = ("before", "now"),
) -> tuple[list[str], str]:
    """What differs, in lines, and a note on what could not be compared.

    With `only` (names of trees, such as "params") other trees and warnings are not compared.
    `labels` are what lines call the two outcomes.
    """
    if before["error"] or now["error"]:
        if before["error"][:2] == now["error"][:2]:
            return [], ""
        said = [
            f"{label}: {': '.join([one['error'][0], one['error'][2]]) if one['error'] else 'runs'}"
            for label, one in zip(labels, (before, now), strict=True)
        ]
        return said, ""
    lines = []
    if before["warned"] != now["warned"] and not only:
        lines = [
            f"{label} warns: {warning[0]}: {warning[2]}"
            for label, one, other in (("before", before, now), ("now", now, before))
            for warning in one["warned"]
            if warning[:2] not in [w[:2] for w in other["warned"]]
        ]
    old, new = load(Path(before["file"])), load(Path(now["file"]))
    note = []
    for tree in dict.fromkeys(name.split("/")[0] for name in (*old, *new)):
        if only and tree not in only:
            continue
        one, other = (
            {name: x for name, x in both.items() if name.split("/")[0] == tree}
            for both in (old, new)
        )
        if {n: x[0] for n, x in one.items()} != {n: x[0] for n, x in other.items()}:
            gone, come = sorted(set(one) - set(other)), sorted(set(other) - set(one))
            what = f"{tree} has another structure"
            if tree == "opt_state":
                note.append(f"{what} ({len(gone)} leaves gone, {len(come)} new): not compared")
            else:
                lines.append(f"{what}: {gone or 'nothing'} gone, {come or 'nothing'} new")
            continue
        changed = {n: _largest(*one[n], other[n][1]) for n in one if one[n][1] != other[n][1]}
        if changed:
            worst = max(changed, key=lambda name: changed[name])
            lines.append(
                f"{tree}: {len(changed)} of {len(one)} leaves differ, most {worst} by "
                f"{changed[worst]:.3g}"
            )
    return lines, "; ".join(note)
