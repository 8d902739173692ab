"""Eight CPU devices for every test, set up before anything asks jax for one."""

import ctypes
import gc
import math
import os
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from support.quick import QUICK_CODE, QUICK_COMPILER

# These suites have a configuration of their own: `make test-torch` and `make test-torchax`, in
# environments of their own, and `make test-cluster`, which needs root.
collect_ignore = ["torch_compat", "on_jax", "cluster", "maxtext"]
# So have these, whose compilers must not be loaded beside other tests, nor beside each other.
AOT = ("tpu_aot", "gpu_aot")
NUM_DEVICES = 8
# Set it (for example to "cuda") to run the tests marked `hardware` on that backend.
PLATFORM = os.environ.get("JAXSLOWMO_TEST_PLATFORM", "cpu")

# In the environment, not only in jax's configuration: commands that tests start inherit it.
os.environ["JAX_PLATFORMS"] = "cpu" if PLATFORM == "cpu" else f"{PLATFORM},cpu"
# Users may ask for jax's strictest arithmetic, so ours must be. Also in commands that tests start.
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
# libtpu compiles for TPU topologies here; without this it first asks a metadata server for a TPU.
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
# It locks the machine for one process, to guard a TPU; several workers may compile at a time.
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
os.environ["TPU_LOG_DIR"] = "disabled"
# Eight device threads of each worker share few cores, so one may arrive late at a collective; the
# defaults (20 s to complain, 40 s to abort the process) are for machines with a core per device.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds=60",
        "--xla_cpu_collective_call_terminate_timeout_seconds=300",
        QUICK_COMPILER,
    ]
).strip()

# NumPy's threads of one worker would wait for those of another: small products take far longer.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import hypothesis  # noqa: E402
import jax  # noqa: E402
import jax.monitoring  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
import pytest  # noqa: E402

from support.promotion import standard  # noqa: E402

# Tracing allocates much and frees it by counting; looking for cycles took a tenth of the time.
gc.set_threshold(100_000, 20, 20)

jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
# Not in the environment: commands start with optax's Adam, see `bias_correction` below.
jax.config.update("jax_numpy_dtype_promotion", "strict")
# A cache on disk would hide what a change does to compilation.
jax.config.update("jax_enable_compilation_cache", False)

_bias_correction = optax.tree.bias_correction


def bias_correction(*args: Any) -> Any:
    """Do what optax 0.2.8 does for Adam: raise a float to an int32, against strict promotion."""
    with jax.numpy_dtype_promotion("standard"):
        return _bias_correction(*args)


optax.tree.bias_correction = bias_correction

# One example compiles a program or two: few examples, no deadline, and the same ones every time.
# `HYPOTHESIS_PROFILE=explore make test` looks further.
hypothesis.settings.register_profile("default", max_examples=12, deadline=None, derandomize=True)
hypothesis.settings.register_profile("explore", max_examples=200, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run take a sample of the tests, as CI does under other versions of jax."""
    parser.addoption("--every", type=int, default=1, help="run every n-th test")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep every n-th test."""
    every = config.getoption("--every")
    config.hook.pytest_deselected(items=[x for i, x in enumerate(items) if i % every])
    items[:] = items[::every]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what compiles for TPUs and GPUs but where it is named: `make test-aot`."""
    name = collection_path.name
    return True if name in AOT and not any(name in arg for arg in config.args) else None


@pytest.fixture(scope="session", autouse=True)
def require_devices() -> None:
    """Fail every test, rather than skip some, where the devices are missing."""
    wanted = NUM_DEVICES if PLATFORM == "cpu" else 1
    found = jax.devices(PLATFORM)
    if len(found) < wanted:
        pytest.fail(
            f"the tests need {wanted} {PLATFORM} devices and jax found {len(found)}: something "
            "used a device before tests/conftest.py set their number",
            pytrace=False,
        )
    # The flags are read once, when something is compiled. libtpu reads them, too, and ends the
    # process where it does not know one.
    jax.jit(lambda: 0)()
    os.environ["XLA_FLAGS"] = os.environ["XLA_FLAGS"].replace(QUICK_CODE, "")


# A worker has grown by this much when programs that earlier files compiled are freed: most files
# grow by less, and what several of them share is seldom compiled anew.
FREE_AT_BYTES = 800 * 2**20
# Without that a worker of the whole suite came to 5.9 GB.
MOST_BYTES = 3 * 10**9


class Memory:
    """The memory of this process, and how much of it was left when programs were last freed."""

    def __init__(self) -> None:
        self.bytes_when_freed = self.resident_bytes()

    @staticmethod
    def resident_bytes() -> int:
        """Return what this process has in memory now; its peak where the system does not tell."""
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
        except FileNotFoundError:
            return Memory.peak_bytes()
        return pages * os.sysconf("SC_PAGE_SIZE")

    @staticmethod
    def peak_bytes() -> int:
        """Return the most that this process ever had in memory."""
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def free_programs(self) -> None:
        """Free what jax has traced and compiled, and give the memory back to the system."""
        jax.clear_caches()
        # Programs are part of cycles, and those of earlier files are frozen.
        gc.unfreeze()
        gc.collect()
        if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
            libc.malloc_trim(0)
        self.bytes_when_freed = self.resident_bytes()


@pytest.fixture(scope="session")
def memory() -> Iterator[Memory]:
    """This process's memory; the last test fails where it has grown too large."""
    memory = Memory()
    yield memory
    # Libraries of an accelerator take several GB by themselves.
    if PLATFORM == "cpu" and (peak := memory.peak_bytes()) > MOST_BYTES:
        pytest.fail(
            f"the memory of this process came to {peak / 1e9:.1f} GB, more than "
            f"{MOST_BYTES / 1e9:g} GB: a file compiles too much, or holds what others compiled",
            pytrace=False,
        )


@pytest.fixture(scope="module", autouse=True)
def memory_of_earlier_files(memory: Memory) -> None:
    """Free programs of earlier files now and then; look for cycles in newer objects alone.

    Late in a run the older ones would be millions of objects: a second for every `gc.collect()`.
    """
    if memory.resident_bytes() > memory.bytes_when_freed + FREE_AT_BYTES:
        memory.free_programs()
    else:
        gc.collect()
    gc.freeze()


@pytest.fixture
def quick_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test starts compiles as quickly as the test itself; it must not load libtpu."""
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ['XLA_FLAGS']} {QUICK_CODE}".strip())


@pytest.fixture(scope="session")
def mesh_of() -> Callable[..., jax.sharding.Mesh]:
    """`mesh_of({"replica": 4, "device": 2})`: a mesh with Auto or, on request, Explicit axes."""

    def build(sizes: Mapping[str, int], *, explicit: bool = False) -> jax.sharding.Mesh:
        count = math.prod(sizes.values())
        devices = jax.devices()
        if len(devices) < count:
            pytest.fail(f"this test needs {count} devices, found {len(devices)}", pytrace=False)
        kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
        return jax.sharding.Mesh(
            np.array(devices[:count]).reshape(tuple(sizes.values())),
            tuple(sizes),
            axis_types=(kind,) * len(sizes),
        )

    return build


class Compilations:
    """Counts what was compiled since it was made: `count`."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, event: str, duration: float, **kwargs: object) -> None:
        self.count += event.endswith("backend_compile_duration")


@pytest.fixture(scope="session")
def compilations() -> Compilations:
    """Its `count` grows by one for each program that is compiled."""
    counter = Compilations()
    jax.monitoring.register_event_duration_secs_listener(counter)
    return counter


@pytest.fixture
def standard_promotion() -> Iterator[None]:
    """Allow promotion of ranks and dtypes, for users' programs and libraries that rely on it."""
    with standard():
        yield
