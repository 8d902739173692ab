"""Lists the public names on the API page, so that a re-export is all it takes to be documented."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "jaxslowmo"
# Packages whose own names are public too, as `jaxslowmo.<topic>.<name>`, and where they lie.
TOPICS = {"topology": "topology", "hooks": "reducer/hooks", "checkpoint": "checkpoint"}
MARK = "<!-- public names -->"


def reexports(path: Path) -> list[tuple[str, str]]:
    """Names that the file re-exports, in order of appearance, and the module each comes from."""
    return [
        (node.module or "", alias.name)
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
    ]


def public_names() -> dict[str, list[str]]:
    """Dotted names below `jaxslowmo`, by the package that says in its docstring what they are."""
    groups: dict[str, list[str]] = {}
    for module, name in reexports(PACKAGE / "_api.py"):
        if name not in TOPICS:
            groups.setdefault(module.split(".")[0], []).append(name)
    for topic, folder in TOPICS.items():
        names = reexports(PACKAGE / folder / "__init__.py")
        groups.setdefault(topic, []).extend(f"{topic}.{name}" for _, name in names)
    return groups


def on_page_markdown(markdown: str, **kwargs: object) -> str:
    """Called by mkdocs for every page before it is rendered."""
    if MARK not in markdown:
        return markdown
    lines = []
    for group, names in public_names().items():
        lines += [f"## jaxslowmo.{group}", "", f"::: jaxslowmo.{group}", "    options:"]
        lines += ["      show_root_heading: false", "      show_root_toc_entry: false"]
        lines += ["      members: false", ""]
        for name in names:
            lines += [f"::: jaxslowmo.{name}", ""]
    return markdown.replace(MARK, "\n".join(lines))
