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


def test_other_exchanges_and_models_have_other_losses():
    """So equal losses say something."""
    losses = [runs["maxtext"][-1] for e in EXCHANGES for runs in RECORDED[e].values()]
    names = [name for e in EXCHANGES for name in RECORDED[e]]
    whole = {"fsdp", "data x fsdp", "tensor x fsdp"}  # one model, divided in other ways
    apart = {f"{x:.4f}" for x, name in zip(losses, names, strict=True) if name not in whole}
    assert len(apart) == 2 * (len(RECORDED["DiLoCo"]) - len(whole))
