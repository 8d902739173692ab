"""The README's Python example runs as it is, and prints what the README shows."""

import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text("utf-8")


def example() -> tuple[str, str]:
    """The Python block, and the output shown after it."""
    found = re.search(r"```python\n(.*?)```.*?```text\n(.*?)```", README, re.DOTALL)
    assert found, "no Python block with its output in the README"
    return found.group(1), found.group(2)


def test_example_runs_and_prints_what_is_shown():
    code, output = example()
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    shown, printed = output.splitlines(), done.stdout.splitlines()
    assert printed[:6] == shown[:6]
    assert [line.split()[0] for line in printed[6:]] == ["48", "96", "144", "192"]
    assert float(printed[-1].split()[-1].rstrip("}")) < 0.02
