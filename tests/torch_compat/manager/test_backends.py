"""Which backend is taken, and what is said where there is none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from models import TRACED_ONCE, regressor, samples

from torch_compat import TPUManager
from torch_compat.manager import _backends

HERE = "torchax" if TRACED_ONCE else "torch_xla"


def manager_of(**kwargs) -> TPUManager:
    return TPUManager(regressor(width=32), samples(4), start=False, **kwargs)


def test_the_installed_one_is_taken():
    assert manager_of().backend == HERE
    assert manager_of(backend=HERE).backend == HERE


@pytest.mark.parametrize(
    ("backend", "absent"), [("torch_xla", "torch_xla"), ("torchax", "torchax"), ("torchax", "jax")]
)
def test_one_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, backend: str, absent: str):
    monkeypatch.setattr(_backends, "find_spec", lambda name: None if name == absent else name)
    needs = rf"backend='{backend}'\) needs {absent}, which is not installed; the extra"
    with pytest.raises(ModuleNotFoundError, match=needs) as caught:
        manager_of(backend=backend)
    assert caught.value.name == absent


def test_neither_is_installed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_backends, "find_spec", lambda name: None)
    with pytest.raises(
        ModuleNotFoundError, match="torch_xla, or torchax and jax, and neither is"
    ) as caught:
        manager_of()
    assert caught.value.name == "torch_xla"


def test_torch_xla_comes_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_backends, "find_spec", lambda name: name)
    monkeypatch.setitem(_backends.BACKENDS, "torch_xla", lambda: "xla")
    assert _backends.choose_backend(None) == ("torch_xla", "xla")


FRESH = """
import torch
from torch_compat import TPUManager

class Model(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).mean()

with TPUManager(Model(4, 1), [torch.ones(4)] * 2, nprocs=2, start=True) as manager:
    print(manager.step()[1])
"""


def test_a_fresh_program_on_a_machine_without_tpu_prints_what_it_prints():
    here = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    here |= {"PYTHONPATH": str(Path(__file__).parents[3]), "PJRT_DEVICE": "CPU"}
    ran = subprocess.run([sys.executable, "-c", FRESH], env=here, capture_output=True, text=True)
    assert (ran.stdout, ran.stderr) == ("2\n", "")


def test_an_unknown_name():
    with pytest.raises(ValueError, match="one of 'torch_xla', 'torchax', or None, got 'cuda'"):
        manager_of(backend="cuda")
