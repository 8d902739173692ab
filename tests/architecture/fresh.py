"""A Python in which nothing has been imported yet."""

import subprocess
import sys


def run_python(code: str) -> str:
    """What `code` prints; it fails the test if it raises."""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()
