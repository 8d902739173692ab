"""The Python of a documentation page, section by section, as a reader would run it."""

import functools
import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
_BLOCK = re.compile(r"^```(python|diff title=.*?)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_OUTPUT = re.compile(r"^```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SETTING = "Setting"
# The loops that recipes for optax give a transform to.
LOOP = "A loop of your own: shard_map"
MAPPED = "pmap and vmap"
# What needs torch, which tests/on_jax runs, the second of TORCH after the first.
LOAD_IN_TORCH = "Into torch"
TORCH = ("A vision transformer in stages", "BERT in stages")
# What needs libtpu on the page on TPUs, which tests/tpu_aot runs.
TPU = ("Compile for a TPU without one", "How to read a compiled program")


def sections(page: str) -> dict[str, list[str]]:
    """Return code blocks by heading; those before the first heading are under "".

    A diff with a title is the program that it makes of the block before it.
    """
    found: dict[str, list[str]] = {}
    for title, text in _texts(page).items():
        programs = found[title] = []
        for kind, block in _BLOCK.findall(text):
            programs.append(block if kind == "python" else changed(programs[-1], block))
    return found


def changed(program: str, diff: str) -> str:
    """Return a program with the changes of a diff, whose parts are separated by lines of @@."""
    for part in diff.split("@@\n"):
        lines = part.splitlines(keepends=True)
        old, new = ("".join(x[1:] for x in lines if x[0] != mark) for mark in "+-")
        assert program.count(old) == 1, f"the program does not have this once:\n{old}"
        program = program.replace(old, new)
    return program


def outputs(page: str, title: str) -> list[str]:
    """Return what the page says that code of this section prints."""
    return _OUTPUT.findall(_texts(page)[title])


def num_blocks(page: str) -> int:
    """Count the blocks on the page and those below it, however they are indented."""
    return len(re.findall(r"^\s*```(?:python|diff title)", _read(page), flags=re.MULTILINE))


def of_recipe(title: str) -> pytest.MarkDecorator:
    """Mark tests of one recipe, so that they run in one process, which runs its code once."""
    return pytest.mark.xdist_group(f"recipe {title}")


def fresh(page: str, *titles: str, names: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run the blocks of these sections after those that left `names`; return the names then."""
    names = {"__name__": page} if names is None else names
    for title in titles:
        _execute(page, title, names)
    return names


@functools.cache
def run(page: str, *titles: str) -> dict[str, Any]:
    """Do what `fresh` does once for all tests of a process; do not change what names refer to."""
    *before, last = titles
    names = dict(run(page, *before)) if before else {"__name__": page}
    _execute(page, last, names)
    return names


def _execute(page: str, title: str, names: dict[str, Any]) -> None:
    blocks = sections(page)[title]
    assert blocks, f"{page} has no code under {title!r}"
    for i, block in enumerate(blocks):
        exec(compile(block, f"{page}: {title or 'start'} [{i}]", "exec"), names)


def _texts(page: str) -> dict[str, str]:
    _, *rest = re.split(r"^## (.*)$", "## \n" + _read(page), flags=re.MULTILINE)
    return {title.strip(): text for title, text in zip(rest[::2], rest[1::2], strict=True)}


def _read(page: str) -> str:
    """Return a page and those in the folder of its name, as `recipes/*.md` go on `recipes.md`."""
    paths = [*DOCS.glob(f"{page}.md"), *sorted((DOCS / page).glob("*.md"))]
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)
