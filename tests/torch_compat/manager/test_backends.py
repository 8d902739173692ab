"""Which backend is taken, and what is said where there is none."""

import pytest
from models import regressor

from torch_compat import TPUManager
from torch_compat.manager import _backends


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
        TPUManager(regressor(width=32), [], backend=backend, start=False)
    assert caught.value.name == absent[0]
    extra = "torchax" if backend == "torchax" else "torch"
    assert f"jaxslowmo[{extra}]" in str(caught.value)
