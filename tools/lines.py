"""Lines of code of each package, and comments per 100 of them.

    python tools/lines.py [CHECKOUT]

Blank lines, comments and docstrings are no lines of code.
"""

import argparse
import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip


def code_lines(text: str) -> set[int]:
    """Return the numbers of the lines of code of a file, from 1."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        for child in body if isinstance(body, list) else ():
            value = child.value if isinstance(child, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                docstrings |= set(range(child.lineno, (child.end_lineno or child.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            code |= set(range(token.start[0], token.end[0] + 1))
    return code - docstrings


def count(text: str) -> tuple[int, int]:
    """Return the lines of code of a file, and the lines that hold a comment."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return len(code_lines(text)), sum(token.type == tokenize.COMMENT for token in tokens)


def print_table(checkout: Path) -> None:
    """Print one row per package of a checkout, and one each for jaxslowmo and torch_compat."""
    code, comments, files = Counter(), Counter(), Counter()
    for top in ("jaxslowmo", "torch_compat"):
        for path in (checkout / top).rglob("*.py"):
            first, *rest = path.relative_to(checkout / top).parts
            package = first if rest else "top level"
            for name in (top,) if top == "torch_compat" else (package, "jaxslowmo, all"):
                lines, with_comment = count(path.read_text(encoding="utf-8"))
                code[name] += lines
                comments[name] += with_comment
                files[name] += 1
    print("package | files | lines of code | comments per 100")
    wholes = ("jaxslowmo, all", "torch_compat")
    for name in sorted(code, key=lambda name: (name in wholes, name)):
        print(f"{name} | {files[name]} | {code[name]} | {100 * comments[name] / code[name]:.1f}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", nargs="?", type=Path, default=ROOT)
    print_table(parser.parse_args().checkout)


if __name__ == "__main__":
    main()
