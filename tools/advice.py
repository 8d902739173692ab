"""What is worth a look in the sources, as advice: nothing here fails a build.

    python tools/advice.py

It prints long files and functions, what `plain_english.py` finds, and the table of `lines.py`.
`make lint` ends with it.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import plain_english
from lines import ROOT, print_table

FOLDERS = ("jaxslowmo", "torch_compat", "tests", "benchmarks")
LONG_FILE, LONG_FUNCTION = 600, 80  # lines


def functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the functions and methods of a file; a nested one counts into its outer one."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        else:
            yield from functions(child)


def long_places(path: Path) -> Iterator[str]:
    """Yield a line about the file, if it is long, and about each long function in it."""
    text, name = path.read_text("utf-8"), path.relative_to(ROOT)
    if (count := len(text.splitlines())) > LONG_FILE:
        yield f"{name}: {count} lines, more than {LONG_FILE}"
    for function in functions(ast.parse(text)):
        doc = ast.get_docstring(function, clean=False)
        whole = (function.end_lineno or function.lineno) - function.lineno + 1
        if (count := whole - len((doc or "").splitlines())) > LONG_FUNCTION:
            yield f"{name}:{function.lineno} {function.name}: {count} lines, over {LONG_FUNCTION}"


def main() -> None:
    """Print the report."""
    print("advice, no rules:")
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for line in long_places(path):
                print(line)
    plain_english.print_counts(ROOT / folder for folder in plain_english.FOLDERS)
    print_table(ROOT)


if __name__ == "__main__":
    main()
