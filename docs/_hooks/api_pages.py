"""Fills in the API pages: a table of names and an entry each, where a page names a package."""

import json
import re
from pathlib import Path
from typing import Any

from names import PublicName, public_names, search_boost

# `<!-- names of jaxslowmo.algorithms -->`
MARK = re.compile(r"^<!-- names of ([\w.]+) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, **kwargs: object) -> str:
    """Called by mkdocs for every page before it is rendered."""
    # Under a heading per package where the page has several.
    level = 3 if len(MARK.findall(markdown)) > 1 else 2
    return MARK.sub(lambda match: _entries(public_names()[match[1]], level), markdown)


def on_post_build(config: Any) -> None:
    """Called by mkdocs when the site is written: weighs the entries of the API in its search."""
    path = Path(config.site_dir, "search", "search_index.json")
    index = json.loads(path.read_text(encoding="utf-8"))
    for section in index["docs"]:
        page, _, anchor = section["location"].partition("#")
        if page.startswith("api/") and "." in anchor:
            section["boost"] = search_boost(anchor)
    path.write_text(json.dumps(index, separators=(",", ":")), encoding="utf-8")


def _entries(names: list[PublicName], level: int) -> str:
    # Of a module without names at the top level the name alone, which is narrow.
    has_top = any(name.path.count(".") == 1 for name in names)
    lines = ["| name | what it is |", "|---|---|"]
    for name in names:
        shown = name.short if has_top else name.path.rpartition(".")[2]
        lines.append(f"| [`{shown}`][{name.path}] | {_cell(name.summary)} |")
    for name in names:
        lines += ["", f"::: {name.path}", "    options:", f"      heading_level: {level}"]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", r"\|")
