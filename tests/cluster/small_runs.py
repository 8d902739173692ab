"""What keeps runs short: little text, a compiler that does little, programs compiled once."""

from importlib.metadata import version
from pathlib import Path

# Most of the time goes into compiling small programs that run a few times. jax 0.12 has no other
# emitters than its own.
QUICK_EMITTERS = " --xla_cpu_use_fusion_emitters=false" if version("jaxlib") < "0.11" else ""
QUICK_COMPILER = {
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    f"{QUICK_EMITTERS}"
}

# An optimizer that compiles in less time than the default one: options, and those of a file.
LIGHT = ("--optimizer", "sgd")
LIGHT_FILE = {"clip": 0.0}


def small_text(folder: Path) -> Path:
    """Makes `folder`, with text for the preset "tiny" and up to seven replicas."""
    folder.mkdir()
    for i in range(8):
        (folder / f"{i}.txt").write_text(f"File {i} says hello to the world.\n" * 60)
    return folder


def quick(programs: Path) -> dict[str, str]:
    """Environment in which a start takes less than half of its time: it compiles little.

    Args:
      programs: folder of what was compiled by earlier starts.
    """
    return {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(programs),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        **QUICK_COMPILER,
    }
