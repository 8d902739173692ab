"""Runs a tool of this checkout with the package of another."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))  # behind the tests of the checkout that is compared

from support.quick import QUICK_COMPILER  # noqa: E402


def run_in(checkout: Path, tool: str, *arguments: str) -> str:
    """Standard output of `python tools/<tool> <arguments>`, in a process of its own.

    `jaxslowmo` and `support` (of its tests) are those of the checkout, the tool is this one. It has
    eight CPU devices.
    """
    paths = [str(checkout.resolve() / part) for part in ("", "tests")]
    flags = "--xla_force_host_platform_device_count=8"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags} {QUICK_COMPILER}".strip(),
    }
    command = [sys.executable, str(ROOT / "tools" / tool), *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        sys.exit(f"{checkout}: {tool} ended with {result.returncode}:\n{result.stderr[-4000:]}")
    return result.stdout
