"""The public names, read off the re-exports: a re-export is all it takes to be documented.

Nothing is imported, so the site is built without jax.
"""

import ast
import functools
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
# Packages whose own names are public too, as `jaxslowmo.<topic>.<name>`, and where they lie.
TOPICS = {
    "topology": "topology",
    "hooks": "gradients/reducer/hooks",
    "codecs": "collectives/codecs",
    "pipeline": "pipeline",
    "schedules": "pipeline/schedules",
    "spec": "spec.py",
    "checkpoint": "checkpoint",
    "data": "language/data",
    "models": "language/models",
}

# Packages of packages, each of which is listed by itself.
DIVIDED = {"gradients", "reports"}

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

    @property
    def listed(self) -> str:
        """As a page of its package lists it, so narrow that it fits: `js.slowmo`, `int8`."""
        return self.short if self.path.count(".") == 1 else self.path.rpartition(".")[2]


@functools.cache
def public_names() -> dict[str, list[PublicName]]:
    """Public names by the package they are listed under, functions before classes."""
    package = ROOT / "jaxslowmo"
    groups: dict[str, list[PublicName]] = {}
    for module, name in _reexports(package / "_api.py"):
        if name not in TOPICS:
            first, *rest = module.split(".")
            group = ".".join(["jaxslowmo", first, *(rest[:1] if first in DIVIDED else [])])
            summary = _summary(package, module, name)
            groups.setdefault(group, []).append(PublicName(f"jaxslowmo.{name}", summary))
    for topic, folder in TOPICS.items():
        # Some names of a package are on the top level, too, and listed as that.
        known = groups.setdefault(f"jaxslowmo.{topic}", [])
        above = {name.path.rpartition(".")[2] for name in known}
        names = _names_in(package / folder, f"jaxslowmo.{topic}")
        known += [name for name in names if name.path.rpartition(".")[2] not in above]
    groups["torch_compat"] = _names_in(ROOT / "torch_compat", "torch_compat")
    groups["torch_compat.on_jax"] = _names_in(ROOT / "torch_compat/on_jax", "torch_compat.on_jax")
    return {group: sorted(names, key=_is_class) for group, names in groups.items()}


def targets() -> dict[str, str]:
    """What pages may write of a public name, and its dotted path.

    `js.slowmo` and `jaxslowmo.slowmo` for every name; `slowmo` alone for algorithms and for what is
    no English word: with an underscore or a capital inside. A short name that two packages have is
    left out.
    """
    found: dict[str, str] = {}
    short: dict[str, list[str]] = {}
    for group, names in public_names().items():
        for name in names:
            last = name.path.rpartition(".")[2]
            found |= {name.path: name.path, name.short: name.path}
            is_word = re.fullmatch(r"[A-Za-z][a-z]*", last)
            if group == "jaxslowmo.algorithms" or not is_word:
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


def _names_in(place: Path, prefix: str) -> list[PublicName]:
    """Names that a package or a module re-exports."""
    file = place if place.suffix else place / "__init__.py"
    return [
        PublicName(f"{prefix}.{name}", _summary(file.parent, module, name))
        for module, name in _reexports(file)
        if module  # `from . import runtime` is a module, not a name
    ]


def search_boost(anchor: str) -> float:
    """How much an entry of the API counts in the site's search.

    A function counts before the class of its state, whose longer name the search takes for a rarer
    and better find, and the shorter of two names before the longer: `local_sgd` before
    `hierarchical_local_sgd`. Members of classes count least.
    """
    if anchor not in {name.path for names in public_names().values() for name in names}:
        return 0.5
    last = anchor.rpartition(".")[2]
    return 1 if last[0].isupper() else max(8 / len(last.split("_")), 3)


def _is_class(name: PublicName) -> bool:
    last = name.path.rpartition(".")[2]
    return last[0].isupper() and not last.isupper()


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
    if target.is_dir():
        source = {n: m for m, n in _reexports(target / "__init__.py")}
        return _summary(target, source[name], name)
    body = _body(target.with_suffix(".py"))
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return (ast.get_docstring(node) or "").partition("\n")[0]
        if isinstance(node, ast.Assign | ast.AnnAssign) and name in _targets(node):
            said = after.value if isinstance(after, ast.Expr) else None
            return str(said.value).partition("\n")[0] if isinstance(said, ast.Constant) else ""
    raise ValueError(f"`name` must be defined in {target}, got {name!r}.")


def _targets(node: ast.Assign | ast.AnnAssign) -> list[str]:
    return [ast.unparse(t) for t in (getattr(node, "targets", None) or [node.target])]
