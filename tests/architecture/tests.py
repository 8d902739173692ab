"""Which test is that of a source file: as functions from a repository root to violations."""

import re
from collections.abc import Iterator
from pathlib import Path

from architecture.imports import PACKAGE

TABLE = "tests/README.md"
_ROW = re.compile(r"^\| (`[\w/.]+\.py`(?:, `[\w/.]+\.py`)*) \| `([\w/.]+\.py)` \|", re.MULTILINE)


def sources(root: Path) -> Iterator[Path]:
    """The files of all packages, as paths in the package; a package's `__init__` re-exports."""
    for path in sorted((root / PACKAGE).rglob("_*.py")):
        inside = path.relative_to(root / PACKAGE)
        if path.name != "__init__.py" and len(inside.parts) > 1:
            yield inside


def own_test(source: Path) -> Path:
    """Where a reader looks first: `tests/mesh/test_axes.py` for `mesh/_axes.py`."""
    return source.parent / f"test{source.name}"


def table(root: Path) -> dict[Path, Path]:
    """Sources whose test has another name, with that test."""
    path = root / TABLE
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return {
        Path(source): Path(test)
        for names, test in _ROW.findall(text)
        for source in re.findall(r"`([\w/.]+)`", names)
    }


def untested(root: Path) -> list[str]:
    """Sources with neither a test of their name nor a row in the table."""
    listed, tests = table(root), root / "tests"
    return [
        f"{source} has no {own_test(source)}, and no row in {TABLE}"
        for source in sources(root)
        if source not in listed and not (tests / own_test(source)).exists()
    ]


def dead_rows(root: Path) -> list[str]:
    """Rows of files that are not there, and of sources that have a test of their name."""
    known, tests = set(sources(root)), root / "tests"
    found = []
    for source, test in table(root).items():
        if source not in known:
            found.append(f"{TABLE} names {source}, which is not there")
        if not (tests / test).exists():
            found.append(f"{TABLE} names {test}, which is not there")
        if (tests / own_test(source)).exists():
            found.append(f"{TABLE} names {source}, which has a test of its name")
    return found
