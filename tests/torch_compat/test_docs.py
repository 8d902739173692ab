"""The programs on the documentation's pages run as they are, and learn."""

import contextlib
import json
import re
import socket
from pathlib import Path

import numpy as np
import pytest
from example_runs import started

from recipes.doc_blocks import sections
from support.pairs import two_processes


def run(text: str, folder: Path, processes: int = 1) -> list[list[str]]:
    """The lines that each of so many processes of the program prints."""
    script = folder / "program.py"
    script.write_text(text)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    of_torchrun = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(processes)}
    with contextlib.ExitStack() as stack:
        programs = []
        for rank in range(processes):
            how = {"folder": folder, "RANK": str(rank), **of_torchrun}
            programs.append(stack.enter_context(started(script, **how)))
        return [program.end().lines for program in programs]


def test_manager_and_its_padded_batches_that_compile_no_more(tmp_path: Path):
    program, padded = sections("torch")["TPUManager"]
    steps = [line.split() for line in run(program, tmp_path)[0]]
    assert [step[:2] for step in steps] == [["50", "64"], ["100", "64"], ["150", "64"]]
    assert float(steps[-1][2]) < 0.05
    ((line,),) = run(padded, tmp_path)
    assert re.fullmatch("compiled in steps 1 to 20: [45], after that: 0", line)


@pytest.mark.parametrize("index", range(3))
def test_ddp_before_and_slowmo_after_learn_and_resume(tmp_path: Path, index: int):
    program = sections("torch")["DDP before, SlowMo after"][index]
    lines = [run(program, tmp_path, processes=2)[0][-1] for _ in range(2)]
    assert float(lines[0].removeprefix("loss ")) < 0.2
    assert lines[1] == lines[0]  # from the checkpoints
    assert len(list(tmp_path.glob("checkpoint*.pt"))) == (1 if index == 0 else 2)


def test_slowmo_under_spawn(tmp_path: Path):
    (program,) = sections("torch")["xmp.spawn"]
    line = run(program, tmp_path)[0][-1]
    assert line.startswith("loss of process 0 of 2: ")
    assert float(line.split()[-1]) < 0.1


OF_TORCH = """
import torch
from torch.utils.data import DataLoader, TensorDataset

dataset = TensorDataset(torch.from_numpy(x.reshape(-1, 3)), torch.from_numpy(y.reshape(-1)))
loader = DataLoader(dataset, batch_size=64, shuffle=True, drop_last=True)
pipeline = js.TrainPipeline(step, start(), loader)
for _ in range(2):  # two epochs
    epoch = iter(loader)
    while True:
        try:
            result = pipeline.progress(epoch)
        except StopIteration:
            break
assert result.step == 2 * 40, result
params = js.consensus(pipeline.state.params, mesh=mesh)
np.testing.assert_allclose(params["w"], [1.0, -2.0, 3.0], atol=0.15)
"""


def test_an_input_pipeline_of_torchs_loader_trains_on_two_epochs(tmp_path: Path):
    run("\n".join(sections("input-pipeline")["Setting"]) + OF_TORCH, tmp_path)


FIRST, SETTING = sections("your-data")["Setting"]  # of one process, and of any number
(LOADER,) = sections("your-data")["DataLoader of torch"]
SAID = """
import json

params = {name: np.asarray(x.addressable_data(0)) for name, x in params.items()}
print(json.dumps([[*params["w"].tolist(), params["b"].item()], list(sampler)]))
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_torchs_loader_gives_a_process_examples_that_no_other_has(processes: int, tmp_path: Path):
    if processes == 1:
        lines = [run(FIRST + SETTING + LOADER + SAID, tmp_path)[0][-1]]
    else:
        texts = two_processes(SETTING + LOADER + SAID, tmp_path, devices=2)
        lines = [text.splitlines()[-1] for text in texts]
    said = [json.loads(line) for line in lines]
    for params, _ in said:
        np.testing.assert_allclose(params, [1.0, -2.0, 3.0, 0.5], atol=0.15)
        assert params == said[0][0]
    every = [i for _, examples in said for i in examples]
    assert sorted(every) == list(range(1000))
