"""torch's DataLoader in a pipeline: `docs/input-pipeline.md`."""

import subprocess
import sys

from recipes.doc_blocks import sections
from support.waiting import PATIENCE_SECONDS

TITLES = ("Setting", "A pipeline", "DataLoader of torch")
SAID = """
assert result.step == 2 * 40, result
params = js.consensus(pipeline.state.params, mesh=mesh)
np.testing.assert_allclose(params["w"], [1.0, -2.0, 3.0], atol=0.15)
"""


def test_it_trains_on_two_epochs(tmp_path):
    blocks = [block for title in TITLES for block in sections("input-pipeline")[title]]
    program = tmp_path / "program.py"
    program.write_text("\n".join(blocks) + SAID)
    command = [sys.executable, str(program)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
