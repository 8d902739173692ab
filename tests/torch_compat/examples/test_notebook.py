import json
from pathlib import Path

import nbformat
import pytest
from example_runs import XLA_FLAGS
from nbclient import NotebookClient

from support.waiting import PATIENCE_SECONDS

NOTEBOOK = Path(__file__).parents[3] / "colab" / "tpu_manager.ipynb"
AT_THE_END = """
import json
print(json.dumps({"first": first_loss, "last": mean_loss(model, validation), "losses": losses,
                  "error": str(caught), "devices": manager.nprocs, "alive": manager.is_alive()}))
"""


@pytest.fixture
def _small_run(monkeypatch):
    settings = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2", "TPU_MANAGER_STEPS": "25"}
    for name, value in (settings | {"MPLBACKEND": "agg", "XLA_FLAGS": XLA_FLAGS}).items():
        monkeypatch.setenv(name, value)


def test_it_is_committed_without_outputs():
    notebook = json.loads(NOTEBOOK.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)


@pytest.mark.usefixtures("_small_run")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_it_runs_on_two_cpu_devices_and_learns():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(AT_THE_END))
    NotebookClient(notebook, timeout=int(PATIENCE_SECONDS), kernel_name="python3").execute()
    found = json.loads(notebook.cells[-1].outputs[-1]["text"])
    assert found["last"] < 0.75 * found["first"]
    assert len(found["losses"]) == 25
    assert found["losses"][-1] < 0.8 * found["losses"][0]
    assert "the disk with the samples is gone" in found["error"]
    assert "defective" in found["error"]
    assert found["devices"] == 2
    assert not found["alive"]
