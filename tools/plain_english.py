"""What a machine can judge of plain English: docstrings, lines of arguments, and names.

    python tools/plain_english.py [PATH ...]        counts by folder
    python tools/plain_english.py --list PATH ...   every place

The rules, of which `../CONTRIBUTING.md` tells why:

* A docstring begins with a sentence. That of a function says what the function does, in the
  imperative: "Return ...", "Raise ...", "Exchange ...". That of a class or a property may name the
  thing: "The roles of the arguments."
* A line about an argument or an attribute says what the value is: "index of this process", not
  "of this process".
* A name says what the value is, not where the author stood.

`EXCEPTIONS` holds what is right all the same, each with its reason.
"""

import argparse
import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDERS = ("jaxslowmo", "torch_compat")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Words with which no docstring begins: what follows is a piece of a sentence.
FRAGMENTS = _words(
    """after also and as at before behind beside between but by else for from how if in into
    likewise not of on only or over so than that those to under unless until what when where
    whether which while who whom whose why with within without"""
)
# Words with which a noun begins: a function does something.
NOUNS = _words("a all an each every its no one some such the their these this whatever")
# Imperatives that end in "s".
IMPERATIVES = _words("address bypass compress cross express guess pass press process")
# Words with which no line about an argument begins.
PREPOSITIONS = _words(
    "as at beside between by for from in likewise of on over so than that those to under with"
)
NAMES = _words("asked found given known made moved own said told there")
CLASSES = _words("Asked Found Given Known Made Moved Own Said Told")

# "path:name": the reason.
EXCEPTIONS: dict[str, str] = {
    "jaxslowmo/embedding/_requests.py:asked": "a field of the public js.embedding.Requests",
    "jaxslowmo/reports/_measured.py:asked": "as in js.train.AheadStep, for which it stands",
    "jaxslowmo/train/step/_ahead.py:asked": "keyword argument of the public js.train.AheadStep",
}

_ITEM = re.compile(r"^ {2,8}(\*{0,2}[A-Za-z_][\w.]*(?:, \*{0,2}\w+)*): +(.*)")
_SECTIONS = ("Args:", "Attributes:")
_HEADING = re.compile(r" *(Args|Attributes|Communication|Example|Raises|Returns|Source|Yields):")


class Finding(NamedTuple):
    """A place that breaks a rule.

    Attributes:
      path: the file, relative to the checkout.
      line: number of the line.
      rule: "docstring", "argument" or "name".
      text: what stands there.
    """

    path: str
    line: int
    rule: str
    text: str


def findings(path: Path) -> Iterator[Finding]:
    """Yield every place in a Python file that breaks a rule."""
    tree = ast.parse(path.read_text("utf-8"))
    name = path.resolve().relative_to(ROOT).as_posix()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _of_docstring(name, node)
        for text, line in _names_in(node):
            if f"{name}:{text}" not in EXCEPTIONS:
                yield Finding(name, line, "name", text)


def _of_docstring(path: str, node: ast.AST) -> Iterator[Finding]:
    docstring = ast.get_docstring(node, clean=False)
    if not docstring:
        return
    first = node.body[0].lineno
    lines = docstring.splitlines()
    own_name = getattr(node, "name", "module")
    if f"{path}:{own_name}" not in EXCEPTIONS and not _is_sentence(lines[0].strip(), node):
        yield Finding(path, first, "docstring", f"{own_name}: {lines[0].strip()}")
    inside = False
    for number, line in enumerate(lines):
        if _HEADING.match(line):
            inside = line.strip() in _SECTIONS
        elif inside and (item := _ITEM.match(line)) and item[2]:
            word = re.split(r"[ ,.;:]", item[2])[0].lower()
            if word in PREPOSITIONS and f"{path}:{item[1]}" not in EXCEPTIONS:
                yield Finding(path, first + number, "argument", line.strip())


def _is_sentence(line: str, node: ast.AST) -> bool:
    """Return whether the first line of a docstring may begin as it does."""
    word = re.split(r"[ ,.:;]", line)[0]
    plain = word.lower()
    if plain in FRAGMENTS or (word[:1].islower() and "_" not in word and "." not in word):
        return False
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or _is_property(node):
        return True
    if plain in NOUNS or not word[:1].isupper():
        return False
    return not plain.endswith("s") or plain in IMPERATIVES


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    names = {ast.unparse(decorator).rsplit(".", 1)[-1] for decorator in node.decorator_list}
    return bool(names & {"property", "cached_property", "setter", "fixture"})


def _names_in(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the banned names that a node gives to a value, an argument or a class."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in NAMES:
        yield node.id, node.lineno
    elif isinstance(node, ast.arg) and node.arg in NAMES:
        yield node.arg, node.lineno
    elif isinstance(node, ast.ClassDef) and node.name.lstrip("_") in CLASSES:
        yield node.name, node.lineno


def print_counts(paths: Iterable[Path], *, with_places: bool = False) -> None:
    """Print counts by folder and rule, and before them every place if that is asked for."""
    counts: dict[str, Counter[str]] = {}
    for path in paths:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            for finding in findings(file.resolve()):
                if with_places:
                    print(f"{finding.path}:{finding.line}: {finding.rule}: {finding.text}")
                folder = "/".join(finding.path.split("/")[:2])
                counts.setdefault(folder, Counter())[finding.rule] += 1
    print("folder | docstrings | arguments | names")
    for folder, found_by_rule in sorted(counts.items()):
        numbers = [found_by_rule[rule] for rule in ("docstring", "argument", "name")]
        print(folder, *numbers, sep=" | ")
    total = sum(counts.values(), Counter())
    print("all", *(total[rule] for rule in ("docstring", "argument", "name")), sep=" | ")


def main() -> None:
    """Print counts by folder and rule, or every place."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path, default=[ROOT / f for f in FOLDERS])
    parser.add_argument("--list", action="store_true", help="print every place")
    options = parser.parse_args()
    print_counts(options.paths, with_places=options.list)


if __name__ == "__main__":
    main()
