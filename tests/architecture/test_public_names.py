"""Every public name is documented: arguments, results, errors, and what it communicates."""

import ast
import inspect
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jaxslowmo
from jaxslowmo import checkpoint, data, models

ROOT = Path(__file__).parents[2]


def public_names(module: types.ModuleType) -> dict[str, Any]:
    """Return the names that `module` and the modules in it re-export, with dots."""
    found = {}
    # Without an `__all__` all that it re-exports is public, but for its folders.
    for name in getattr(module, "__all__", None) or dir(module):
        value = getattr(module, name)
        if not isinstance(value, types.ModuleType):
            found |= {} if name.startswith("_") else {name: value}
        elif module is jaxslowmo:
            found |= {f"{name}.{key}": inner for key, inner in public_names(value).items()}
    return found


PUBLIC = public_names(jaxslowmo)
# No names of the top level: imported by their own names.
for module in (checkpoint, data, models):
    topic = module.__name__.partition(".")[2]
    PUBLIC |= {f"{topic}.{key}": value for key, value in public_names(module).items()}


def lacks(value: Any) -> list[str]:
    """What the docstring of a class or function should say and does not."""
    doc = value.__doc__ or ""
    if inspect.isclass(value):
        generated = not doc or doc.startswith(f"{value.__name__}(")
        return ["a docstring"] if generated else []
    if not inspect.isfunction(value):
        return []  # a constant or a type alias
    if not doc:
        return ["a docstring"]
    signature = inspect.signature(value)
    wanted = []
    if signature.parameters:
        wanted.append("Args:")
    if signature.return_annotation not in (None, "None") and "Yields:" not in doc:
        wanted.append("Returns:")
    if re.search(r"^\s+raise \w*Error\(", inspect.getsource(value), re.MULTILINE):
        wanted.append("Raises:")
    if "axis_name" in signature.parameters:
        wanted.append("Communication:")
    described = doc.partition("Args:")[2]
    return [section for section in wanted if section not in doc] + [
        f"argument `{name}`"
        for name in signature.parameters
        if "Args:" in doc and not re.search(rf"^\s+(.*, )?\**{name}\b.*:", described, re.MULTILINE)
    ]


# What the site knows; of other words it makes boxes.
SECTIONS = {"Args", "Attributes", "Example", "Raises", "Returns", "Yields"}


def unknown_sections(doc: str) -> set[str]:
    return set(re.findall(r"^ *([A-Z]\w+):$", doc, re.MULTILINE)) - SECTIONS


def test_public_names_are_documented():
    assert {"local_sgd", "topology.ring"} <= set(PUBLIC)
    missing = {name: lacks(value) for name, value in PUBLIC.items()}
    assert {name: found for name, found in missing.items() if found} == {}
    assert {name for name, x in PUBLIC.items() if unknown_sections(x.__doc__ or "")} == set()


def spelled(name: str, value: Any) -> str:
    """A line of the list of names: with arguments and their defaults, where it is called."""
    if not callable(value):
        return name
    try:
        signature = inspect.signature(value)
    except ValueError:  # of a class of another library
        return name
    plain = [x.replace(annotation=x.empty) for x in signature.parameters.values()]
    text = str(signature.replace(parameters=plain, return_annotation=signature.empty))
    return name + re.sub(r" at 0x\w+", "", text)


def interface() -> list[str]:
    """Lines of all public names, and of what classes of this package have for their users."""
    lines, seen = [], set()
    for name, value in PUBLIC.items():
        lines.append(spelled(name, value))
        classes = value.__mro__ if isinstance(value, type) and value not in seen else ()
        seen |= {*classes[:1]}
        for cls in (c for c in classes if c.__module__.startswith("jaxslowmo.")):
            members = vars(cls).keys() - {*getattr(cls, "_fields", ())}
            lines += [spelled(f"{name}.{m}", getattr(value, m)) for m in members if m[0] != "_"]
    return sorted({*lines, *torch_interface()})


def torch_interface() -> Iterator[str]:
    """Names of torch_compat, whose source is read: torch is not in this environment."""
    for package in ("torch_compat", "torch_compat.on_jax"):
        init = ROOT / package.replace(".", "/") / "__init__.py"
        for node in ast.walk(ast.parse(init.read_text("utf-8"))):
            for alias in node.names if isinstance(node, ast.ImportFrom) and node.level else ():
                if alias.asname and node.module:
                    yield f"{package}.{alias.name}"


def test_names_arguments_and_defaults_are_those_of_the_list():
    """Whoever changes what is public changes the list, in the same commit."""
    written = Path(__file__).with_name("public_names.txt").read_text("utf-8").splitlines()
    found = interface()
    assert found == written, "\n".join({*found} ^ {*written})
