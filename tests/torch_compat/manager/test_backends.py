"""Which backend is taken, and what is said where there is none."""

import pytest
from models import TRACED_ONCE, regressor

from torch_compat import TPUManager
from torch_compat.manager import _backends


def manager_of(**kwargs) -> TPUManager:
    return TPUManager(regressor(width=32), [], start=False, **kwargs)


def test_the_installed_one_is_taken_and_torch_xla_of_both(monkeypatch: pytest.MonkeyPatch):
    here = "torchax" if TRACED_ONCE else "torch_xla"
    assert manager_of().backend == here
    assert manager_of(backend=here).backend == here
    monkeypatch.setattr(_backends, "find_spec", lambda name: name)
    monkeypatch.setattr(_backends.TorchXla, "__init__", lambda self: None)
    assert isinstance(_backends.choose_backend(None), _backends.TorchXla)


@pytest.mark.parametrize(
    ("backend", "absent"),
    [
        ("torch_xla", ["torch_xla"]),
        ("torchax", ["jax"]),
        (None, ["torch_xla", "jax"]),
    ],
)
def test_one_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, backend, absent):
    """torch_xla has a package torchax inside, so that jax alone may be missing."""
    monkeypatch.setattr(_backends, "find_spec", lambda name: None if name in absent else name)
    with pytest.raises(ModuleNotFoundError, match=f"needs .*{absent[-1]}") as caught:
        manager_of(backend=backend)
    assert caught.value.name == absent[0]
    extra = "torchax" if backend == "torchax" else "torch"
    assert f"jaxslowmo[{extra}]" in str(caught.value)
