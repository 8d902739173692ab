"""What share of the rows that a batch needs did the batch before it change?

    python benchmarks/embeddings/resent_rows.py --out benchmarks/results/resent_rows.md

In mode "patched" vectors are looked up one step ahead, and rows that the step beside it changes are
sent again. A row counts once for each device that asks for it, as it is sent once to each; it is
changed if any device asked for it in the batch before. Counted in NumPy.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "dlrm"))

import flights

DEVICES = 8
EXPONENTS = (0.0, 0.6, 0.8, 1.0, 1.2)
ROWS = (100_000, 10_000_000)
IDS = (256, 2048)  # of one table, per device and batch
BATCHES = 9


def share(batches: list[np.ndarray], devices: int = DEVICES) -> tuple[float, float]:
    """Share of requested rows that are sent again, and of ids that are not distinct on a device.

    Args:
      batches: ids (batch, ...) of one table, in the order of training; negative: none.
      devices: each gets an equal part of the batch.
    """
    asked = resent = ids = 0
    changed = np.zeros(0, np.int64)
    for number, batch in enumerate(batches):
        parts = [np.unique(part[part >= 0]) for part in np.split(batch, devices)]
        if number:
            asked += sum(part.size for part in parts)
            resent += sum(np.isin(part, changed).sum() for part in parts)
            ids += int((batch >= 0).sum())
        changed = np.unique(np.concatenate(parts))
    return resent / asked, 1 - asked / ids


def zipf(rng: np.random.Generator, exponent: float, rows: int, count: int) -> np.ndarray:
    """Ids in [0, rows) with probabilities (id + 1) ** -exponent, normalised."""
    total = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -exponent)
    return np.searchsorted(total, rng.random(count) * total[-1]).astype(np.int64)


def zipf_rows() -> Iterator[str]:
    rng = np.random.default_rng(0)
    yield "| rows | exponent | ids per device | repeated ids | resent |"
    yield "|---:|---:|---:|---:|---:|"
    for rows in ROWS:
        for exponent in EXPONENTS:
            drawn = zipf(rng, exponent, rows, BATCHES * DEVICES * max(IDS))
            for ids in IDS:
                batches = list(drawn[: BATCHES * DEVICES * ids].reshape(BATCHES, -1))
                resent, repeated = share(batches)
                yield f"| {rows:,} | {exponent} | {ids} | {repeated:.1%} | {resent:.1%} |"


def flight_rows() -> Iterator[str]:
    split = flights.split()
    order = np.random.default_rng(0).permutation(len(split.train.late))
    yield "| table | rows | 64 per device | 512 per device |"
    yield "|---|---:|---:|---:|"
    for name, rows in split.num_rows.items():
        ids = split.train.ids[name][:, None]
        if name == "dest":
            ids = np.concatenate([ids, split.train.ids["earlier"]], axis=1)
        cells = []
        for size in (64 * DEVICES, 512 * DEVICES):
            chosen = order[: BATCHES * size].reshape(BATCHES, size)
            cells.append(f"{share([ids[part] for part in chosen])[0]:.1%}")
        yield f"| {name} | {rows:,} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    lines = [
        f"NumPy {np.__version__}; `python benchmarks/embeddings/resent_rows.py`. "
        f"{DEVICES} devices, {BATCHES - 1} pairs of batches.",
        "",
        "Ids with Zipf's frequencies, one table:",
        "",
        *zipf_rows(),
        "",
        "Flights of `examples/dlrm` in random order (`dest` with `earlier`):",
        "",
        *flight_rows(),
    ]
    print("\n".join(lines))
    if out:
        out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
