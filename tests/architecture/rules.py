"""The rules that the source tree keeps, as functions from a repository root to violations."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = "jaxslowmo"
TOP_LEVEL = ""  # `jaxslowmo/__init__.py`
API = "_api"  # what the top level re-exports, at the first use of one of the names
MAX_LINES = 400

# A package imports only from lower floors; packages on one floor do not import each other.
FLOORS = {
    "_warn": -1,
    "_typing": -1,
    "tree": 0,
    "topology": 0,
    "mesh": 1,
    "data": 1,
    "models": 1,
    "tracing": 1,
    "collectives": 2,
    "algorithms": 3,
    "pipeline": 3,
    "diagnostics": 4,
    "reducer": 4,
    "sparse": 4,
    "statistics": 5,
    "train": 5,
    "checkpoint": 6,
    API: 7,
    "cli": 8,
    "__main__": 9,
}
# These may need the `train` extra. All others import, at module level, only what the core installs.
BEYOND_CORE = {"data", "models", "checkpoint", "cli", "__main__"}
CORE_DEPENDENCIES = {"jax", "jaxlib", "numpy", "optax"}
# `torch_compat` stands beside the package; only its examples may need more than these.
TORCH_FLOORS = {
    "autograd_threads": 0,
    "errors": 0,
    "messages": 0,
    "samples": 0,
    "runtime": 1,
    "data": 2,
    "slowmo": 2,
    "synchronizer": 2,
    "worker": 3,
    "manager": 4,
    TOP_LEVEL: 5,
    "examples": 6,
}
TORCH_DEPENDENCIES = {"numpy", "torch", "torch_xla"}
# `import jaxslowmo.topology` runs these and must work without jax.
JAX_FREE = {TOP_LEVEL, "topology"}


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


def _unit(parts: tuple[str, ...], known: set[str]) -> str:
    """The unit of the package that `jaxslowmo.<parts>` belongs to."""
    if parts and parts[0] in known:
        return parts[0]
    return TOP_LEVEL


def climbs(importer: str, imported: str) -> bool:
    """Whether this import goes up, or sideways, instead of down."""
    if importer == imported:
        return False
    if imported == TOP_LEVEL:
        return importer not in {"cli", "__main__"}
    if importer == TOP_LEVEL:
        return imported not in {API, "topology"}
    if imported == API:
        return True
    return FLOORS[imported] >= FLOORS[importer]


def floor_violations(root: Path) -> list[str]:
    """Imports that climb, packages without a floor, and core modules that need an extra."""
    source = root / PACKAGE
    units = {p.stem for p in source.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    units.discard("__init__")
    found = [f"{PACKAGE}/{u} has no floor: add it to FLOORS" for u in sorted(units - set(FLOORS))]
    known = units | set(FLOORS)
    for path in sorted(source.rglob("*.py")):
        inside = path.relative_to(source).with_suffix("").parts
        importer = _unit(inside, known)
        if importer != TOP_LEVEL and importer not in FLOORS:
            continue
        for line, target, eager in imports_of(path, root):
            where = f"{path.relative_to(root)}:{line}"
            who = importer or "the top level"
            name, *rest = target.split(".")
            if name == PACKAGE:
                imported = _unit(tuple(rest), known)
                if imported in units - set(FLOORS):
                    continue
                if climbs(importer, imported):
                    found.append(f"{where} {who} must not import {target}")
                if importer == TOP_LEVEL and imported == API and eager:
                    found.append(f"{where} {who} must not load {API} before a name is used")
                if importer == "topology" and imported != "topology":
                    found.append(f"{where} topology stands alone and must not import {target}")
            elif name in sys.stdlib_module_names:
                continue
            elif importer in JAX_FREE and name != "numpy":
                found.append(f"{where} {who} is plain Python and NumPy, not {name}")
            elif importer not in BEYOND_CORE and eager and name not in CORE_DEPENDENCIES:
                found.append(f"{where} {name} is not a core dependency: import it where it is used")
    return found


def torch_compat_violations(root: Path) -> list[str]:
    """Imports in `torch_compat/` that climb, or reach beyond torch and `jaxslowmo.topology`."""
    source = root / "torch_compat"
    found = []
    for path in sorted(source.rglob("*.py")):
        importer = _torch_unit(path.relative_to(source).with_suffix("").parts)
        where = path.relative_to(root)
        if importer not in TORCH_FLOORS:
            found.append(f"{where} torch_compat/{importer} has no floor: add it to TORCH_FLOORS")
            continue
        for line, target, eager in imports_of(path, root):
            name, *rest = target.split(".")
            foreign = name not in sys.stdlib_module_names | TORCH_DEPENDENCIES
            if name == "torch_compat":
                imported = _torch_unit(tuple(rest))
                lower = TORCH_FLOORS[imported] < TORCH_FLOORS[importer]
                if importer != imported and not lower:
                    found.append(f"{where}:{line} {importer} must not import {target}")
            elif name == PACKAGE:
                if not f"{target}.".startswith(f"{PACKAGE}.topology."):
                    allowed = f"{PACKAGE}.topology"
                    found.append(f"{where}:{line} torch_compat may import {allowed}, not {target}")
            elif foreign and eager and importer != "examples":
                found.append(f"{where}:{line} torch_compat stands alone and has no {name}")
    return found


def _torch_unit(parts: tuple[str, ...]) -> str:
    """The unit that `torch_compat.<parts>` belongs to."""
    if not parts or parts[0] == "__init__":
        return TOP_LEVEL
    folder_or_file = parts[0]
    # A name of `torch_compat/__init__.py`, such as `torch_compat.TPUManager`.
    return folder_or_file if len(parts) > 1 or not folder_or_file[0].isupper() else TOP_LEVEL


def _is_dunder_assignment(node: ast.stmt) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return isinstance(node, ast.Assign | ast.AnnAssign) and all(
        isinstance(t, ast.Name) and t.id.startswith("__") and t.id.endswith("__") for t in targets
    )


def _is_lazy_api(node: ast.stmt) -> bool:
    """Whether this is all names of `_api` for type checkers, and a lazy look-up at run time."""
    return (
        isinstance(node, ast.If)
        and ast.unparse(node.test) == "TYPE_CHECKING"
        and [ast.unparse(n) for n in node.body] == [f"from .{API} import *"]
        and all(isinstance(n, ast.FunctionDef) for n in node.orelse)
        and [n.name for n in node.orelse] == ["__getattr__", "__dir__"]
    )


def reexport_violations(root: Path) -> list[str]:
    """Statements of an `__init__.py` other than a docstring, re-exports and `__version__`-likes.

    The top level has its lazy look-up of `_api` besides, and `_api.py` nothing but re-exports.
    """
    source = root / PACKAGE
    found = []
    for path in sorted([*source.rglob("__init__.py"), source / f"{API}.py"]):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        where = path.relative_to(root)
        if not (body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)):
            found.append(f"{where}:1 says in a docstring what the package is for")
        else:
            body = body[1:]
        for node in body:
            if isinstance(node, ast.ImportFrom) and node.level:
                found += [
                    f"{where}:{node.lineno} re-export as `{a.name} as {a.name}`"
                    for a in node.names
                    if a.asname != a.name
                ]
            elif path.stem == API or not (
                isinstance(node, ast.Import | ast.ImportFrom)
                or _is_dunder_assignment(node)
                or (path.parent == source and _is_lazy_api(node))
            ):
                found.append(f"{where}:{node.lineno} only re-exports, no logic")
    return found


def length_violations(root: Path) -> list[str]:
    """Python files that have grown beyond `MAX_LINES`."""
    found = []
    for folder in (PACKAGE, "torch_compat", "tests", "benchmarks"):
        for path in sorted((root / folder).rglob("*.py")):
            count = len(path.read_text(encoding="utf-8").splitlines())
            if count > MAX_LINES:
                found.append(f"{path.relative_to(root)} has {count} lines, more than {MAX_LINES}")
    return found
