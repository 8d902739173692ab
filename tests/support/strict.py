"""Settings of jax under which users debug their programs, and under which ours must run unchanged.

Promotion of ranks and dtypes is strict in all tests; see `conftest.py`.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh


@contextlib.contextmanager
def checks() -> Iterator[None]:
    """Refuse implicit transfers, tracers that leak, and results that are NaN."""
    with jax.transfer_guard("disallow"), jax.checking_leaks(), jax.debug_nans(True):
        yield


SETTINGS: dict[str, Callable[[Any], AbstractContextManager[Any]]] = {
    "checks": lambda mesh: checks(),
    "set_mesh": lambda mesh: jax.set_mesh(mesh if isinstance(mesh, Mesh) else None),
}


def assert_equal_bits(tree: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((tree, expected)))
