"""torch's DataLoader feeds a step of jaxslowmo, in one process and in two: `docs/your-data.md`."""

import json
import subprocess
import sys

import numpy as np
import pytest

from recipes.doc_blocks import sections
from support.pairs import two_processes
from support.waiting import PATIENCE_SECONDS

FIRST, SETTING = sections("your-data")["Setting"]  # of one process, and of any number
(LOADER,) = sections("your-data")["DataLoader of torch"]
SAID = """
import json

params = {name: np.asarray(x.addressable_data(0)) for name, x in params.items()}
print(json.dumps([[*params["w"].tolist(), params["b"].item()], list(sampler)]))
"""
WANTED = [1.0, -2.0, 3.0, 0.5]


def of_one(folder):
    program = folder / "program.py"
    program.write_text(FIRST + SETTING + LOADER + SAID)
    command = [sys.executable, str(program)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    return [done.stdout]


def of_two(folder):
    return two_processes(SETTING + LOADER + SAID, folder, devices=2)


@pytest.mark.parametrize("run", [of_one, of_two])
def test_it_trains_on_examples_that_no_other_process_has(run, tmp_path):
    said = [json.loads(text.splitlines()[-1]) for text in run(tmp_path)]
    for params, _ in said:
        np.testing.assert_allclose(params, WANTED, atol=0.15)
        assert params == said[0][0]
    every = [i for _, examples in said for i in examples]
    assert sorted(every) == list(range(1000))
