"""Lists the public names on the API page, so that a re-export is all it takes to be documented."""

import ast
from pathlib import Path

INIT = Path(__file__).parents[2] / "jaxslowmo" / "__init__.py"
MARK = "<!-- public names -->"


def reexports(source: str) -> dict[str, list[str]]:
    """Names that `source` re-exports, by the package they come from, in order of appearance."""
    groups: dict[str, list[str]] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            for alias in node.names:
                group = node.module.split(".")[0] if node.module else alias.name
                groups.setdefault(group, []).append(alias.name)
    return groups


def on_page_markdown(markdown: str, **kwargs: object) -> str:
    """Called by mkdocs for every page before it is rendered."""
    if MARK not in markdown:
        return markdown
    lines = []
    for group, names in reexports(INIT.read_text(encoding="utf-8")).items():
        lines += [f"## jaxslowmo.{group}", "", f"::: jaxslowmo.{group}", "    options:"]
        lines += ["      show_root_heading: false", "      show_root_toc_entry: false"]
        lines += ["      members: false" if group not in names else "      members: true", ""]
        for name in names:
            if name != group:
                lines += [f"::: jaxslowmo.{name}", ""]
    return markdown.replace(MARK, "\n".join(lines))
