"""What files import, circles among them, and what is private to a package."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

PACKAGE, TORCH = "jaxslowmo", "torch_compat"
TREES = (PACKAGE, TORCH)


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


def imports_of(root: Path, tree: str) -> Iterator[tuple[Path, Import]]:
    """Every import of a tree, wherever it stands in its file, with relative names resolved."""
    for path in sorted((root / tree).rglob("*.py")):
        package = list(path.relative_to(root).parent.parts)
        for found in _imports(ast.parse(path.read_text(encoding="utf-8")), package):
            yield path, found


def _file_of(target: str, root: Path) -> Path | None:
    """The file of the tree that an import of `target` reads names from; None for other trees."""
    parts = target.split(".")
    while parts and parts[0] in TREES:
        module = root.joinpath(*parts)
        for path in (module / "__init__.py", module.with_suffix(".py")):
            if path.exists():
                return path
        parts = parts[:-1]
    return None


def circle_violations(root: Path) -> list[str]:
    """Files that import each other, however far around, lazily and for types, too: one circle."""
    edges: dict[Path, set[Path]] = {}
    for tree in TREES:
        for path, (_, target, _) in imports_of(root, tree):
            edges.setdefault(path, set())
            if (file := _file_of(target, root)) not in (None, path):
                edges[path].add(file)
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return [" <- ".join(str(path.relative_to(root)) for path in error.args[1])]
    return []


def privacy_violations(root: Path) -> list[str]:
    """Imports of what another package does not offer in its `__init__`."""
    found = []
    for tree in TREES:
        for path, (line, target, _) in imports_of(root, tree):
            package, names = target.split(".")[:2], target.split(".")[2:]
            foreign = tuple(package) != path.relative_to(root).parts[:2]
            is_package = package[0] in TREES and root.joinpath(*package, "__init__.py").exists()
            if foreign and is_package and any(n[0] == "_" and n[:2] != "__" for n in names):
                where = f"{path.relative_to(root)}:{line}"
                found.append(f"{where} {target} is private to {'.'.join(package)}")
    return found
