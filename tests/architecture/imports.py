"""What files import, circles among them, and what is private to a package."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = "jaxslowmo"
TREES = (PACKAGE, "torch_compat")


class Import(NamedTuple):
    """One imported name of one file."""

    line: int
    target: str  # absolute and dotted, the imported name included: `jaxslowmo.tree.leaf_names`
    eager: bool  # runs when the module is imported: not in a function, not for type checkers only


def _imports(node: ast.AST, package: list[str], eager: bool = True) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(node.lineno, alias.name, eager)
    elif isinstance(node, ast.ImportFrom):
        base = package[: len(package) - node.level + 1] if node.level else []
        base = base + (node.module.split(".") if node.module else [])
        for alias in node.names:
            yield Import(node.lineno, ".".join([*base, alias.name]), eager)
    else:
        lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or (
            isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        )
        for child in ast.iter_child_nodes(node):
            yield from _imports(child, package, eager and not lazy)


def imports_of(path: Path, root: Path) -> list[Import]:
    """Every import in `path`, wherever it stands in the file, with relative names resolved."""
    package = list(path.relative_to(root).parent.parts)
    return list(_imports(ast.parse(path.read_text(encoding="utf-8")), package))


def _file_of(target: str, root: Path) -> Path | None:
    """The file of the tree that an import of `target` reads names from; None for other trees."""
    parts = target.split(".")
    while parts and parts[0] in TREES:
        for path in (
            root.joinpath(*parts, "__init__.py"),
            root.joinpath(*parts[:-1], f"{parts[-1]}.py"),
        ):
            if path.exists():
                return path
        parts = parts[:-1]
    return None


def _edges(root: Path) -> dict[Path, list[Path]]:
    """The files that each file imports from, its own lazy imports and those for types included."""
    found = {}
    for tree in TREES:
        for path in sorted((root / tree).rglob("*.py")):
            files = [_file_of(target, root) for _, target, _ in imports_of(path, root)]
            found[path] = sorted({file for file in files if file is not None and file != path})
    return found


def _way_back(edges: dict[Path, list[Path]], start: Path) -> list[Path]:
    """The shortest way along imports from a file to itself, or nothing."""
    came_from: dict[Path, Path] = {}
    queue = [start]
    for file in queue:
        for other in edges[file]:
            if other not in came_from:
                came_from[other] = file
                queue.append(other)
            if other == start:
                way = [start]
                while (file := came_from[way[-1]]) != start:
                    way.append(file)
                return [start, *way[::-1]]
    return []


def circle_violations(root: Path) -> list[str]:
    """Files that import each other, however far around: each circle once, as the way around it."""
    edges = _edges(root)
    found, seen = [], set()
    for file in edges:
        way = _way_back(edges, file) if file not in seen else []
        seen |= set(way)
        if way:
            found.append("a circle: " + " -> ".join(str(step.relative_to(root)) for step in way))
    return found


def privacy_violations(root: Path) -> list[str]:
    """Imports of what another package does not offer in its `__init__`."""
    found = []
    for tree in TREES:
        for path in sorted((root / tree).rglob("*.py")):
            for line, target, _ in imports_of(path, root):
                package, names = target.split(".")[:2], target.split(".")[2:]
                foreign = tuple(package) != path.relative_to(root).parts[:2]
                is_package = package[0] in TREES and root.joinpath(*package, "__init__.py").exists()
                if foreign and is_package and any(map(_is_private, names)):
                    where = f"{path.relative_to(root)}:{line}"
                    found.append(f"{where} {target} is private to {'.'.join(package)}")
    return found


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")
