"""Fills in the API pages: a table of names and an entry each, where a page names a package."""

import re

from names import PublicName, public_names

# `<!-- names of jaxslowmo.algorithms -->`
MARK = re.compile(r"^<!-- names of ([\w.]+) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, **kwargs: object) -> str:
    """Called by mkdocs for every page before it is rendered."""
    # Under a heading per package where the page has several.
    level = 3 if len(MARK.findall(markdown)) > 1 else 2
    return MARK.sub(lambda match: _entries(public_names()[match[1]], level), markdown)


def _entries(names: list[PublicName], level: int) -> str:
    lines = ["| name | what it is |", "|---|---|"]
    lines += [f"| [`{name.short}`][{name.path}] | {_cell(name.summary)} |" for name in names]
    for name in names:
        lines += ["", f"::: {name.path}", "    options:", f"      heading_level: {level}"]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", r"\|")
