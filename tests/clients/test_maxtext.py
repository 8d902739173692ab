"""The losses in examples/maxtext/README.md are the recorded ones, and equal those of MaxText.

`make test-maxtext` runs the program; this needs no MaxText.
"""

import json
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
RECORDED = json.loads((ROOT / "tests/golden/maxtext/losses.json").read_text())
EXCHANGES = [name for name in RECORDED if name != "versions"]


def row(exchange, model):
    own, ours = (RECORDED[exchange][model][who] for who in ("maxtext", "jaxslowmo"))
    apart = np.abs(np.subtract(own, ours)).max()
    last = f"{own[-1]:.6f} | {ours[-1]:.6f}"
    return f"| {exchange}, {len(own)} updates | {model} | {own[0]:.6f} | {last} | {apart:.0e} |"


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_losses(exchange):
    page = (ROOT / "examples/maxtext/README.md").read_text()
    for model, runs in RECORDED[exchange].items():
        np.testing.assert_allclose(runs["jaxslowmo"], runs["maxtext"], rtol=0, atol=2e-6)
        assert row(exchange, model) in page, row(exchange, model)
