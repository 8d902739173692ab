"""Eight CPU devices of jax in a process that has torch, too; nothing here needs torch_xla."""

import os
from collections.abc import Iterator
from pathlib import Path

from support.quick import QUICK_CODE, QUICK_COMPILER

NUM_DEVICES = 8
os.environ["JAX_PLATFORMS"] = "cpu"
# libtpu compiles for TPU topologies here; without these it asks for a TPU, and locks the machine.
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
os.environ["TPU_LOG_DIR"] = "disabled"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_COMPILER}".strip()

import jax  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
jax.config.update("jax_enable_compilation_cache", False)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the sweep out unless it is asked for: torch's samples change flags of the process."""
    is_asked_for = any("sweep" in argument for argument in config.args)
    return True if collection_path.name == "sweep" and not is_asked_for else None


@pytest.fixture(scope="session", autouse=True)
def require_devices() -> None:
    """Fail every test, rather than skip some, where the devices are missing."""
    found = len(jax.devices())
    if found < NUM_DEVICES:
        pytest.fail(f"the tests need {NUM_DEVICES} CPU devices and jax found {found}")
    # The flags are read once. libtpu reads them, too, and ends the process at one that it lacks.
    jax.jit(lambda: 0)()
    os.environ["XLA_FLAGS"] = os.environ["XLA_FLAGS"].replace(QUICK_CODE, "")


@pytest.fixture(autouse=True)
def the_same_numbers() -> Iterator[None]:
    """Modules start from the same weights in every run, whatever ran before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
