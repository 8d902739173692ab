"""The notebook, started twice: two kernels train one model through one folder."""

import asyncio
import json
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

from support.replay import header, objects

NOTEBOOK = Path(__file__).parents[2] / "colab" / "islands.ipynb"
STEPS, SYNC_EVERY, DELAY = 48, 24, 8
AT_THE_END = """
import json
print(json.dumps({
    "island": ISLAND, "round": island.round, "losses": losses,
    "digest": island._rounds.anchor.digest, "seen": [x.name for x in status.islands],
}))
"""


@pytest.mark.usefixtures("quick_processes", "standard_promotion")
def test_two_kernels_train_one_model(monkeypatch, tmp_path):
    run = tmp_path / "run"
    monkeypatch.setenv("ISLANDS_RUN", str(run))
    monkeypatch.setenv("ISLANDS_STEPS", str(STEPS))
    monkeypatch.delenv("MPLBACKEND", raising=False)

    async def execute() -> dict[str, Any]:
        notebook = nbformat.read(NOTEBOOK, as_version=4)
        notebook.cells.append(nbformat.v4.new_code_cell(AT_THE_END))
        await NotebookClient(notebook, timeout=300, kernel_name="python3").async_execute()
        outputs = notebook.cells[-1].outputs  # a kernel may send a line in two parts
        return json.loads("".join(x["text"] for x in outputs if x.get("name") == "stdout"))

    async def execute_two() -> tuple[dict[str, Any], dict[str, Any]]:
        return await asyncio.gather(execute(), execute())

    first, second = asyncio.run(execute_two())
    names = sorted([first["island"], second["island"]])
    assert names[0] != names[1]
    assert (first["round"], first["digest"]) == (second["round"], second["digest"])
    assert first["round"] == STEPS // SYNC_EVERY
    assert sorted(first["seen"]) == names
    for found in (first, second):
        assert np.mean(found["losses"][-8:]) < 0.9 * np.mean(found["losses"][:8])
    # On data of their own, and both in every round, with what they had taken `DELAY` before it.
    assert first["losses"] != second["losses"]
    parts = [header(x) for key, x in objects(str(run)).items() if "/part-" in key]
    assert sorted((x["round"], x["island"], x["updates"]) for x in parts) == [
        (k, name, (k + 1) * SYNC_EVERY - DELAY) for k in range(first["round"]) for name in names
    ]
