"""What `TPUManager` and its parts refuse: the text names the argument, and what was given."""

import math
from functools import partial

import pytest
import torch
from models import regressor
from torch import nn

from support.refusals import Refusal, each
from torch_compat import TPUManager
from torch_compat.master import MasterModel
from torch_compat.reader import SampleReader


def made(**arguments) -> TPUManager:
    return TPUManager(**{"model": regressor(width=32), "dataset": [], "start": False, **arguments})


BAD = {
    "prefetch": 0,
    "batch_size": 0,
    "grad_accumulation_steps": 1.5,
    "nprocs": 0,
    "step_timeout": 0,
    "init_timeout": math.inf,
    "backend": "cuda",
}
ROWS = {
    **{k: Refusal(partial(made, **{k: value}), f"`{k}`", value) for k, value in BAD.items()},
    "a truth value as a number": Refusal(lambda: made(nprocs=True), "`nprocs`", True),
    "two batch sizes": Refusal(
        lambda: made(batch_size=4, batch_size_per_device=1), "`batch_size`", "4 and 1"
    ),
    "no data": Refusal(lambda: made(dataset=3), "`dataset`", "int"),
    "no module": Refusal(lambda: made(model="bert"), "`model`", "str"),
    "no parameters": Refusal(lambda: made(model=nn.ReLU()), "`model`"),
    "not on the host": Refusal(
        lambda: made(model=nn.Linear(2, 2, device="meta")), "`model`", "'weight' is on meta"
    ),
    "a reader for an unknown number": Refusal(lambda: SampleReader([]).device_queues, "`nprocs`"),
    "workers": Refusal(
        lambda: SampleReader([], nprocs=1).get_batches(0, num_workers=2), "`num_workers`", 2
    ),
    "a device after the last": Refusal(
        lambda: SampleReader([], nprocs=1).get_batches(1), "`index`", 1
    ),
}


@each(ROWS)
def test_refused(refusal):
    refusal.check()


MISFITS = {
    "one too few": (lambda new: new[:-1], 12),
    "a shape": (lambda new: [new[0], new[1][:-1], *new[2:]], "layers.0.weight"),
    "a dtype": (lambda new: [new[0].double(), *new[1:]], "'unused'"),
    "no tensor": (lambda new: [new[0].numpy(), *new[1:]], "ndarray"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_parameters_that_do_not_fit_change_nothing(case):
    change, value = MISFITS[case]
    model = regressor(width=32)
    master, before = MasterModel(model), [p.detach().clone() for p in model.parameters()]
    new = change([torch.zeros_like(p.detach()) for p in before])
    Refusal(lambda: master.set_host_parameters(new), "`new_host_parameters`", value).check()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
