"""A Python in which nothing has been imported yet."""

import subprocess
import sys

from support.waiting import PATIENCE_SECONDS


def run_python(code: str) -> str:
    """What `code` prints; it fails the test if it raises."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()
