"""The recorded cases of slow momentum under changing learning rates, computed with NumPy.

    python tests/golden/slow_momentum.py

writes `slow_momentum.json`. In every case one replica has one number per optimizer group, which
begins at 0. Update t moves it by displacements[t] - rates[t] * curvature * (itself - optimum), and
every `slow_every` updates a slow step follows:

    D = anchor - parameter;  v = factor * v + D;  anchor = parameter = anchor - slow_lr * v

factor = momentum * gamma / gamma of the slow step before (1 in place of a ratio to 0), and for
`anchors` at most max(momentum, gamma / r), r the rate at which v was made: the largest since the
slow step before, or momentum * the r before, where that is more. `anchors_without_bound` have no
such limit.
"""

import json
import math
from pathlib import Path

import numpy as np

FILE = Path(__file__).with_suffix(".json")
SLOW_EVERY = 4


def anchors(case: dict, *, is_bounded: bool) -> list[list[float]]:
    """Return the anchor of every group after every slow step."""
    rates = np.maximum(np.array(case["rates"], np.float64), 0)
    moves = np.array(case["displacements"] or np.zeros_like(rates), np.float64)
    parameter, anchor, velocity = np.zeros((3, rates.shape[1]))
    last, made_at, largest = np.zeros((3, rates.shape[1]))
    result = []
    for t, rate in enumerate(rates):
        parameter = parameter + moves[t] - rate * case["curvature"] * (parameter - case["optimum"])
        largest = np.maximum(largest, rate)
        if (t + 1) % SLOW_EVERY:
            continue
        factor = case["momentum"] * ratio(rate, last)
        if is_bounded:
            factor = np.minimum(factor, np.maximum(case["momentum"], ratio(rate, made_at)))
        velocity = factor * velocity + anchor - parameter
        parameter = anchor = anchor - case["slow_lr"] * velocity
        made_at = np.maximum(case["momentum"] * made_at, largest)
        last, largest = rate, np.zeros_like(rate)
        result.append(anchor.tolist())
    return result


def ratio(now: np.ndarray, before: np.ndarray) -> np.ndarray:
    return np.divide(now, before, out=np.ones_like(now), where=before > 0)


def case(
    name: str,
    rates: list,
    displacements: list | None = None,
    *,
    momentum: float = 0.5,
    slow_lr: float = 1.0,
    curvature: float = 0.0,
) -> dict:
    made = {
        "name": name,
        "momentum": momentum,
        "slow_lr": slow_lr,
        "slow_every": SLOW_EVERY,
        "curvature": curvature,
        "optimum": 1.5,
        "rates": np.array(rates, float).reshape(len(rates), -1).tolist(),
        "displacements": np.array(displacements or [], float).reshape(-1, 1).tolist(),
    }
    for key, is_bounded in (("anchors", True), ("anchors_without_bound", False)):
        made[key] = anchors(made, is_bounded=is_bounded)
    return made


def cosine(peak: float, floor: float, period: int, updates: int) -> list[float]:
    through = [(t % period) / (period - 1) for t in range(updates)]
    return [round(floor + (peak - floor) * (1 + math.cos(math.pi * x)) / 2, 6) for x in through]


def cases() -> list[dict]:
    restarts = [round(0.1 * (1 - 0.99 * (t % 8) / 7), 6) for t in range(300)]
    steady = [1.0, -0.5, 0.25, 1.0]
    return [
        case("falls to 1 % and restarts", restarts, curvature=5.0),
        case(
            "a rate of 0, and one that misses it by rounding",
            [0.1] * 3 + [0.0] * 6 + [0.1] * 3 + [0.05, 0.02, 0.01, -1e-9] + [0.1] * 4,
            [1, 1, 1, 0, 0, 0, 0, 0, 0, -1, -1, -1, *steady[:3], 0, *steady],
        ),
        case(
            "restarts from almost 0",
            [0.1, 0.1, 0.1, 1e-6] * 2 + [0.1] * 8,
            [1, 1, 1, 0, -1, 1, 1, 0, *steady * 2],
        ),
        case(
            "restarts between slow steps",
            [0.1, 0.05, 0.01, 0.001, 0.0005, 0.1, 0.08, 0.06, 0.04, 0.02, 0.001, 0.1] * 2,
            steady * 6,
            momentum=0.9,
            slow_lr=0.7,
        ),
        case("only falls", [0.5 * 0.8**t for t in range(20)], steady * 5, momentum=0.9),
        case("only grows", [0.001 * 1.3**t for t in range(20)], steady * 5, slow_lr=0.9),
        case(
            "groups that restart at other times",
            list(
                zip(
                    cosine(0.1, 1e-3, 8, 96),
                    cosine(0.02, 1e-4, 12, 96),
                    [0.05] * 96,
                    strict=True,
                )
            ),
            momentum=0.8,
            curvature=4.0,
        ),
    ]


def text() -> str:
    return (
        json.dumps({"cases": cases()}, separators=(",", ":")).replace('{"name', '\n{"name') + "\n"
    )


if __name__ == "__main__":
    FILE.write_text(text())
