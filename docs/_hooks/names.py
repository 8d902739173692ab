"""The public names, read off the re-exports: a re-export is all it takes to be documented.

Nothing is imported, so the site is built without jax.
"""

import ast
import functools
import re
from pathlib import Path
from typing import NamedTuple, TypeGuard

ROOT = Path(__file__).parents[2]
# Modules whose own names are public too, as `jaxslowmo.<topic>.<name>`, and where they lie.
TOPICS = {
    "algorithms": "algorithms/__init__.py",
    "embedding": "embedding/__init__.py",
    "gradients": "gradients/__init__.py",
    "mesh": "mesh/__init__.py",
    "reports": "reports/__init__.py",
    "sparse": "sparse.py",
    "train": "train/__init__.py",
    "topology": "topology/__init__.py",
    "hooks": "gradients/hooks/__init__.py",
    "codecs": "collectives/codecs/__init__.py",
    "islands": "islands/__init__.py",
    "spec": "spec.py",
    "pipeline": "pipeline/__init__.py",
    "schedules": "pipeline/schedules/__init__.py",
    "checkpoint": "checkpoint/__init__.py",
    "data": "data.py",
    "models": "models.py",
}

# What code in a text begins with, if it is a name.
_NAME = re.compile(r"(?:js|jaxslowmo|torch_compat)(?:\.\w+)+|\w+")


class PublicName(NamedTuple):
    """A name that users import.

    Attributes:
      path: dotted, from the package on: `jaxslowmo.hooks.int8`.
      summary: first line of its docstring, empty where it has none.
    """

    path: str
    summary: str

    @property
    def short(self) -> str:
        """As the guides write it: `js.hooks.int8`."""
        return self.path.replace("jaxslowmo.", "js.", 1)


@functools.cache
def public_names() -> dict[str, PublicName]:
    """Public names by their dotted paths."""
    package = ROOT / "jaxslowmo"
    # Not `__version__`, nor modules: `from . import train`.
    above = [
        (module, name)
        for module, name in _reexports(package / "__init__.py")
        if module and name not in TOPICS and name[0] != "_"
    ]
    names = [PublicName(f"jaxslowmo.{n}", _summary(package, m, n)) for m, n in above]
    for topic, place in TOPICS.items():
        found = _names_in(package / place, f"jaxslowmo.{topic}")
        # Else it is listed as a name of the top level.
        names += [x for x in found if (topic, x.path.rpartition(".")[2]) not in above]
    names += _names_in(ROOT / "torch_compat/__init__.py", "torch_compat")
    names += _names_in(ROOT / "torch_compat/on_jax/__init__.py", "torch_compat.on_jax")
    return {name.path: name for name in names}


@functools.cache
def targets() -> dict[str, str]:
    """What pages may write of a public name, and its dotted path.

    `js.slowmo` and `jaxslowmo.slowmo` for every name; `slowmo` alone for algorithms and for what is
    no English word: with an underscore or a capital inside. A short name that two packages have is
    left out.
    """
    found: dict[str, str] = {}
    short: dict[str, list[str]] = {}
    top = _reexports(ROOT / "jaxslowmo" / "__init__.py")
    algorithms = {name for module, name in top if module == "algorithms"}
    for name in public_names().values():
        last = name.path.rpartition(".")[2]
        found |= {name.path: name.path, name.short: name.path}
        is_word = re.fullmatch(r"[A-Za-z][a-z]*", last)
        if not is_word or last in algorithms:
            short.setdefault(last, []).append(name.path)
    return found | {last: paths[0] for last, paths in short.items() if len(paths) == 1}


def target(code: str, known: dict[str, str]) -> str | None:
    """The entry that `code` begins with, of `js.topology.ring(8)` that of `ring`, or None."""
    found = _NAME.match(code)
    if not found:
        return None
    name, rest = found[0], code[found.end() :]
    # `slowmo` and `slowmo(...)`, not `slowmo over ...` or `local_sgd=...`.
    if rest and not (rest.startswith("(") and rest.endswith(")")):
        return None
    while name not in known and "." in name:  # `js.CommReport.wire_bytes`
        name = name.rpartition(".")[0]
    return known.get(name)


def _names_in(path: Path, prefix: str) -> list[PublicName]:
    """Return the names that the file re-exports; with an `__all__`, only those in it."""
    public = next((ast.literal_eval(x.value) for x in _body(path) if _is_all(x)), None)
    return [
        PublicName(f"{prefix}.{name}", _summary(path.parent, module, name))
        for module, name in _reexports(path)
        # `from . import runtime` is a module, not a name.
        if module and (public is None or name in public)
    ]


def _is_all(node: ast.stmt) -> TypeGuard[ast.Assign]:
    return isinstance(node, ast.Assign) and _targets(node) == ["__all__"]


def search_boost(anchor: str) -> float:
    """How much an entry of the API counts in the site's search.

    A function counts before the class of its state, whose longer name the search takes for a rarer
    and better find, and the shorter of two names before the longer: `local_sgd` before
    `hierarchical_local_sgd`. Members of classes count least.
    """
    if anchor not in public_names():
        return 0.5
    last = anchor.rpartition(".")[2]
    return 1 if last[0].isupper() else max(8 / len(last.split("_")), 3)


@functools.cache
def _body(path: Path) -> list[ast.stmt]:
    return ast.parse(path.read_text(encoding="utf-8")).body


def _reexports(path: Path) -> list[tuple[str, str]]:
    """Names that the file re-exports, in order of appearance, and the module each comes from."""
    return [
        ("." * (node.level - 1) + (node.module or ""), alias.name)
        for statement in _body(path)
        # What is loaded when it is used is imported for type checkers alone.
        for node in (statement.body if isinstance(statement, ast.If) else [statement])
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
    ]


def _summary(folder: Path, module: str, name: str) -> str:
    """First line of the docstring of what `from .<module> import <name>` in `folder` is."""
    above = len(module) - len(module.lstrip("."))
    target = (folder / Path(*[".."] * above) / module.lstrip(".").replace(".", "/")).resolve()
    path = target / "__init__.py" if target.is_dir() else target.with_suffix(".py")
    source = {n: m for m, n in _reexports(path)}
    if name in source:
        return _summary(path.parent, source[name], name)
    # The last of several definitions is the function itself: those before are overloads.
    body = _body(path)[::-1]
    for node, after in zip(body, [None, *body], strict=False):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return (ast.get_docstring(node) or "").partition("\n")[0]
        if isinstance(node, ast.Assign | ast.AnnAssign) and name in _targets(node):
            said = after.value if isinstance(after, ast.Expr) else None
            return str(said.value).partition("\n")[0] if isinstance(said, ast.Constant) else ""
    raise ValueError(f"`name` must be defined in {path}, got {name!r}.")


def _targets(node: ast.Assign | ast.AnnAssign) -> list[str]:
    return [ast.unparse(t) for t in (getattr(node, "targets", None) or [node.target])]
