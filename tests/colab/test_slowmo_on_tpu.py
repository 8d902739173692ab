"""The notebook runs from top to bottom on eight CPU devices, and does what it says."""

import json
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "colab" / "slowmo_on_tpu.ipynb"
STEPS = 48
AT_THE_END = """
import json
print(json.dumps({
    "replicas": REPLICAS, "first": first_loss, "exported": validation_loss(model),
    "points": {name: run["points"] for name, run in runs.items()},
    "losses": {name: len(run["losses"]) for name, run in runs.items()},
    "restored": found.step, "last": result.step, "identical": identical, "arrays": len(pairs),
    "bytes": sum(x.nbytes for x in jax.tree.leaves(params)),
}))
"""


@pytest.mark.usefixtures("quick_processes")
def test_it_learns_counts_bytes_and_resumes(monkeypatch):
    monkeypatch.setenv("SLOWMO_PRESET", "tiny")
    monkeypatch.setenv("SLOWMO_STEPS", str(STEPS))
    # The kernel chooses the backend that puts figures into the notebook.
    monkeypatch.delenv("MPLBACKEND", raising=False)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(AT_THE_END))
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()

    found = json.loads(notebook.cells[-1].outputs[-1]["text"])
    assert found["replicas"] == 8
    assert set(found["losses"].values()) == {STEPS}
    sent = {}
    for name, points in found["points"].items():
        assert [p["step"] for p in points] == list(range(0, STEPS + 1, 8))
        assert points[-1]["validation"] < 0.7 * found["first"]
        sent[name] = points[-1]["sent"]
    # An all-reduce between 8 sends 7/4 of its bytes; SlowMo's two slow steps replace averages.
    average = found["bytes"] * 7 // 4
    assert sent["all_reduce"] == STEPS * average
    assert sent["LocalSGD"] == sent["SlowMo"] == STEPS // 8 * average
    assert sent["SGP"] == STEPS * found["bytes"]
    # In the middle of both periods, after a slow step and before another.
    assert found["restored"] == 27
    assert found["last"] == STEPS
    assert found["identical"] == found["arrays"] > 50
    assert found["exported"] == found["points"]["SlowMo"][-1]["validation"]
    images = [o for c in notebook.cells for o in c.get("outputs", ()) if "image/png" in str(o)]
    assert len(images) == 1
