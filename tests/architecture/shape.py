"""What files and folders look like: as functions from a repository root to violations."""

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

from architecture.imports import PACKAGE, TREES

API = "_api"  # what the top level re-exports, at the first use of one of the names
MAX_LINES = 400
MAX_FILES = 14  # of a folder, `__init__` not counted
MAX_FUNCTION_LINES = 60
MAX_LONG_FUNCTIONS = 5
COMMENTED = ("transform", "algorithms")
COMMENTS = (8, 12)  # fewest and most lines with a comment per 100 lines of code

_Function = ast.FunctionDef | ast.AsyncFunctionDef


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
    for folder in (*TREES, "tests", "benchmarks"):
        for path in sorted((root / folder).rglob("*.py")):
            count = len(path.read_text(encoding="utf-8").splitlines())
            if count > MAX_LINES:
                found.append(f"{path.relative_to(root)} has {count} lines, more than {MAX_LINES}")
    return found


def folder_violations(root: Path) -> list[str]:
    """Folders of more than `MAX_FILES` Python files."""
    found = []
    for tree in TREES:
        for folder in sorted({path.parent for path in (root / tree).rglob("*.py")}):
            count = sum(path.stem != "__init__" for path in folder.glob("*.py"))
            if count > MAX_FILES:
                found.append(f"{folder.relative_to(root)} has {count} files, more than {MAX_FILES}")
    return found


def _docstring_lines(node: ast.AST) -> Iterator[int]:
    """The lines of all docstrings in `node`."""
    for part in ast.walk(node):
        if isinstance(part, _Function | ast.ClassDef | ast.Module) and ast.get_docstring(part):
            first = part.body[0]
            yield from range(first.lineno, (first.end_lineno or first.lineno) + 1)


def _functions(node: ast.AST) -> Iterator[_Function]:
    """The functions and methods of a file; what stands inside of one counts into it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Function):
            yield child
        else:
            yield from _functions(child)


def long_functions(root: Path) -> list[str]:
    """Functions of more than `MAX_FUNCTION_LINES` lines, docstrings not counted."""
    found = []
    for tree in TREES:
        for path in sorted((root / tree).rglob("*.py")):
            for function in _functions(ast.parse(path.read_text(encoding="utf-8"))):
                whole = (function.end_lineno or function.lineno) - function.lineno + 1
                lines = whole - len(set(_docstring_lines(function)))
                if lines > MAX_FUNCTION_LINES:
                    found.append(f"{path.relative_to(root)} {function.name}: {lines} lines")
    return found


def function_violations(root: Path) -> list[str]:
    """All long functions, where there are more than `MAX_LONG_FUNCTIONS`."""
    found = long_functions(root)
    return found if len(found) > MAX_LONG_FUNCTIONS else []


def comments_per_100_lines(root: Path) -> float | None:
    """Lines with a comment, behind code or alone, per 100 lines of code in `COMMENTED` folders."""
    comments = code = 0
    for folder in COMMENTED:
        for path in (root / PACKAGE / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            tokens = tokenize.generate_tokens(io.StringIO(text).readline)
            comments += sum(token.type == tokenize.COMMENT for token in tokens)
            docstrings = set(_docstring_lines(ast.parse(text)))
            for number, line in enumerate(text.splitlines(), 1):
                alone = not line.strip() or line.strip().startswith("#")
                code += not alone and number not in docstrings
    return 100 * comments / code if code else None


def comment_violations(root: Path) -> list[str]:
    """Too few or too many comments where algorithms are explained."""
    found, (least, most) = comments_per_100_lines(root), COMMENTS
    if found is None or least <= found <= most:
        return []
    where = " and ".join(COMMENTED)
    return [f"{where} have {found:.1f} comments per 100 lines of code, not {least} to {most}"]
