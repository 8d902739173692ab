"""Writes the names of optax that need care into a table of docs/recipes/optax.md.

    python tools/optimizers.py

What it says is measured by tests/recipes/test_optimizers.py (`-m exhaustive` for all names).
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from recipes.optax_measured import table  # noqa: E402

PAGE = ROOT / "docs" / "recipes" / "optax.md"
TABLE = re.compile(r"^\| Name \| With `sync=` .*?\n(?!\|)", re.DOTALL | re.MULTILINE)


def main() -> None:
    """Replace the table of the page."""
    text = PAGE.read_text(encoding="utf-8")
    new, count = TABLE.subn(lambda _: table() + "\n", text)
    if count != 1:
        sys.exit(f"{PAGE} must have one table with the head '| Name | With `sync=` |', has {count}")
    PAGE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
