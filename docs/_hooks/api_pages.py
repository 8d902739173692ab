"""Adds an entry for each name in the tables of the API pages.

    python docs/_hooks/api_pages.py

writes into these tables what each name is: the first line of its docstring.
"""

import json
import re
from pathlib import Path
from typing import Any

from names import ROOT, public_names, search_boost, target, targets

TABLE = re.compile(r"^\| name \| what it is \|\n\|---\|---\|\n(?:\|.*\n?)+", re.MULTILINE)
ROW = re.compile(r"^\| `([\w.]+)` \|(.*)$", re.MULTILINE)


def on_page_markdown(markdown: str, **kwargs: object) -> str:
    """Called by mkdocs for every page before it is rendered."""
    # Under a heading per table where the page has several.
    level = 3 if len(TABLE.findall(markdown)) > 1 else 2
    return TABLE.sub(lambda table: f"{table[0]}\n{_entries(table[0], level)}\n", markdown)


def on_post_build(config: Any) -> None:
    """Called by mkdocs when the site is written: weighs the entries of the API in its search."""
    path = Path(config.site_dir, "search", "search_index.json")
    index = json.loads(path.read_text(encoding="utf-8"))
    for section in index["docs"]:
        page, _, anchor = section["location"].partition("#")
        if page.startswith("api/") and "." in anchor:
            section["boost"] = search_boost(anchor)
    path.write_text(json.dumps(index, separators=(",", ":")), encoding="utf-8")


def with_summaries(markdown: str) -> str:
    """Return the page with the first line of each name's docstring in its tables."""
    return TABLE.sub(lambda table: ROW.sub(_row, table[0]), markdown)


def _row(row: re.Match[str]) -> str:
    summary = public_names()[_path(row[1])].summary.replace("|", r"\|")
    return f"| `{row[1]}` | {summary} |"


def _entries(table: str, level: int) -> str:
    entry = "::: {}\n    options:\n      heading_level: {}\n"
    return "\n".join(entry.format(_path(name), level) for name, _ in ROW.findall(table))


def _path(name: str) -> str:
    path = target(name, targets())
    if path is None:
        raise ValueError(f"A table of the API must list public names, got {name!r}.")
    return path


def main() -> None:
    """Writes the tables."""
    for page in sorted((ROOT / "docs" / "api").glob("*.md")):
        page.write_text(with_summaries(page.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
