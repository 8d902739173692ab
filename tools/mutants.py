"""How sharp the tests are: single changes in the package, drawn by a seed, and which are noticed.

    python tools/mutants.py draw --seed 1 --count 150 > mutants.json
    pytest -n 2 --cov=jaxslowmo --cov-context=test --cov-report= --junitxml=times.xml
    python tools/mutants.py run mutants.json --coverage .coverage --times times.xml

`run` writes what became of each change into the file that it reads, and leaves those that have an
outcome; `--of` names the folders whose changes are tried. A suite with a configuration of its own,
and mostly processes, does without coverage:

    cd tests/torch_compat && pytest --junitxml=../../times.xml
    python tools/mutants.py run mutants.json --suite tests/torch_compat --times times.xml ...

A line of code is drawn, each as likely as another, and one of the changes that it allows: another
comparison, another operator, a constant plus one, a negated condition, a dropped statement, swapped
arguments, an index off by one. `run` needs pytest-cov, and Linux: a process that has imported jax
and the like forks for every mutant. It writes the change into a copy of the checkout and runs the
tests that cover the line, nearest first, until one fails. jax traces a function once and keeps what
it traced, so coverage credits a line to the first test that traced it, and what other processes run
is credited to none: a mutant that survives is tried again with all tests of its package's folder.

Of the libraries that do this, mutmut rewrites every function into a chooser of mutants, which jax
would trace, and cosmic-ray runs one command for all mutants; neither draws by a seed.
"""

# ruff: noqa: D102 (methods that `ast.NodeVisitor` calls by the names of nodes)

import argparse
import ast
import contextlib
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
import traceback
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib import import_module
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple

from lines import code_lines

ROOT = Path(__file__).parents[1]
# Seconds, by the recorded times of tests, of the tests that cover a line and of all tests of one
# mutant. The clock only ends what hangs: another process beside this one changes no outcome.
COVERING_SECONDS, ALL_SECONDS = 60.0, 120.0
HANG_SECONDS = 300.0
# Modules that are imported already cannot be rewritten, of which pytest warns: plain assertions.
OPTIONS = ["-x", "-q", "--tb=line", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:cov"]
UNUSABLE = 70  # the exit code where pytest did not run at all

COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
OPERATORS = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//",
    ast.Pow: "*", ast.BitAnd: "|", ast.BitOr: "&",
}  # fmt: skip
DROPPED = (ast.Expr, ast.AugAssign, ast.Raise, ast.Delete, ast.Continue, ast.Break)
TYPES = {"int", "str", "float", "bool", "bytes", "object", "type", "tuple", "list", "dict", "set"}


class Mutant(NamedTuple):
    """A change: `before`, which stands at `line` and `column` of a file, becomes `after`."""

    path: str
    line: int
    column: int
    kind: str
    before: str
    after: str


class Changes(ast.NodeVisitor):
    """Collects the changes that a file allows; annotations, docstrings and decorators stay."""

    def __init__(self, path: str, text: str) -> None:
        self._path = path
        self._bytes = text.encode()
        self._starts = [0]
        for line in self._bytes.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self.found: list[Mutant] = []
        self.visit(ast.parse(text))

    def _source(self, node: Any) -> str:
        start = self._starts[node.lineno - 1] + node.col_offset
        return self._bytes[start : self._starts[node.end_lineno - 1] + node.end_col_offset].decode()

    def _add(self, node: Any, kind: str, after: str) -> None:
        before = self._source(node)
        if after != before:
            place = self._path, node.lineno, node.col_offset
            self.found.append(Mutant(*place, kind, before, after))

    def _join(self, node: Any, kind: str, left: ast.AST, sign: str, right: ast.AST) -> None:
        self._add(node, kind, f"(({self._source(left)}) {sign} ({self._source(right)}))")

    def visit_FunctionDef(self, node: Any) -> None:
        for child in [*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body]:
            self.visit(child)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for child in node.body:
            self.visit(child)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_If(self, node: Any) -> None:
        if "TYPE_CHECKING" not in self._source(node.test):
            self._add(node.test, "negated condition", f"(not ({self._source(node.test)}))")
            self.generic_visit(node)

    visit_While = visit_IfExp = visit_Assert = visit_If

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._add(test, "negated condition", f"(not ({self._source(test)}))")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            sign = COMPARISONS[type(node.ops[0])]
            self._join(node, "comparison", node.left, sign, node.comparators[0])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        sign = " or " if isinstance(node.op, ast.And) else " and "
        values = sign.join(f"({self._source(value)})" for value in node.values)
        self._add(node, "operator", f"({values})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        is_text = isinstance(node.left, (ast.Constant, ast.JoinedStr)) and not isinstance(
            getattr(node.left, "value", None), (int, float)
        )
        if type(node.op) in OPERATORS and not is_text:
            self._join(node, "operator", node.left, OPERATORS[type(node.op)], node.right)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add(node, "constant", str(not node.value))
        elif isinstance(node.value, (int, float)):
            self._add(node, "constant", str(node.value + 1))

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave texts as they are."""

    def visit_Call(self, node: ast.Call) -> None:
        first, second, *_ = [*node.args, None, None]
        if first and second and not any(isinstance(a, ast.Starred) for a in (first, second)):
            start = len(self._source(node.func)) + 1
            old = self._source(node)
            i, j = (old.find(self._source(a), start) for a in (first, second))
            a, b = self._source(first), self._source(second)
            if 0 <= i < j:
                between = old[i + len(a) : j]
                after = old[:i] + b + between + a + old[j + len(b) :]
                self._add(node, "swapped arguments", after)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        parts = [node.slice]
        if isinstance(node.slice, ast.Slice):
            parts = [part for part in (node.slice.lower, node.slice.upper) if part]
        for part in parts:
            is_name = isinstance(part, ast.Name) and part.id.islower() and part.id not in TYPES
            is_number = isinstance(part, ast.Constant) and type(part.value) is int
            if is_name or is_number or isinstance(part, (ast.BinOp, ast.UnaryOp)):
                sign = "+" if len(self.found) % 2 else "-"
                self._add(part, "index", f"{self._source(part)} {sign} 1")
        self.generic_visit(node)

    def visit(self, node: ast.AST) -> None:
        """Visit a node; statements may also be dropped."""
        value = getattr(node, "value", None)
        is_docstring = isinstance(node, ast.Expr) and isinstance(value, ast.Constant)
        if isinstance(node, DROPPED) and not is_docstring:
            self._add(node, "dropped statement", "pass")
        if isinstance(node, ast.Return) and value is not None:
            self._add(node, "dropped statement", "return None")
        super().visit(node)


def changed(text: str, mutant: Mutant) -> str:
    """Return the text of a file with the change; ValueError if it is not the file drawn from."""
    lines = text.encode().splitlines(keepends=True)
    start = sum(map(len, lines[: mutant.line - 1])) + mutant.column
    before, rest = text.encode()[:start], text.encode()[start:]
    if not rest.startswith(mutant.before.encode()):
        raise ValueError(f"{mutant.path}:{mutant.line} is not {mutant.before!r} any more")
    rest = rest[len(mutant.before.encode()) :]
    return (before + mutant.after.encode() + rest).decode()


def draw(seed: int, count: int, packages: Sequence[str]) -> list[Mutant]:
    """Return `count` different changes of the packages, each of their lines as likely."""
    generator = random.Random(seed)
    allowed: dict[tuple[str, int], list[Mutant]] = {}
    lines: list[tuple[str, int]] = []
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            name, text = str(path.relative_to(ROOT)), path.read_text("utf-8")
            lines += [(name, line) for line in sorted(code_lines(text))]
            for mutant in Changes(name, text).found:
                allowed.setdefault((name, mutant.line), []).append(mutant)
    drawn: list[Mutant] = []
    while len(drawn) < count:
        changes = allowed.get(generator.choice(lines))
        mutant = generator.choice(changes) if changes else None
        if mutant is None or mutant in drawn:
            continue
        with contextlib.suppress(SyntaxError):  # such as `pass` for the only part of an expression
            ast.parse(changed((ROOT / mutant.path).read_text("utf-8"), mutant))
            drawn.append(mutant)
    return drawn


class Suite:
    """The tests of a checkout: which cover a line, how long each takes, which fail anyway."""

    def __init__(self, coverage: Path | None, times: Path, root: str) -> None:
        self.root = root
        self._seconds: dict[str, float] = {}
        self._failing: set[str] = set()
        self._database = coverage
        for case in ET.parse(times).getroot().iter("testcase"):
            name = _node_id(case.attrib["classname"], case.attrib["name"])
            seconds = self._seconds.get(name, 0.0) + float(case.attrib["time"])
            self._seconds[name] = seconds
            if case.find("failure") is not None or case.find("error") is not None:
                self._failing.add(name)

    def keep_only(self, names: Iterable[str]) -> None:
        """Forget tests that are not named; a name of a junit file is not always a test's."""
        self._seconds = {name: self._seconds[name] for name in names if name in self._seconds}

    def files(self, checkout: Path) -> list[str]:
        """Return the files of the recorded tests that the checkout still has."""
        files = {name.partition("::")[0] for name in self._seconds}
        return sorted(file for file in files if (checkout / self.root / file).is_file())

    def covering(self, mutant: Mutant) -> set[str]:
        """Return the tests that run the mutant's line; none without coverage."""
        if self._database is None:
            return set()
        with contextlib.closing(sqlite3.connect(self._database)) as database:
            rows = database.execute(
                "select context.context, line_bits.numbits from line_bits"
                " join file on file.id = line_bits.file_id"
                " join context on context.id = line_bits.context_id where file.path like ?",
                (f"%/{mutant.path}",),
            ).fetchall()
        byte, bit = divmod(mutant.line, 8)
        found = (name for name, bits in rows if len(bits) > byte and bits[byte] >> bit & 1)
        return {_without_group(name.rpartition("|")[0]) for name in found if name}

    def stages(self, mutant: Mutant) -> Iterator[list[str]]:
        """Yield lists of tests, nearest first, which together keep to the limits of time."""
        tests = "tests/" if self.root == "." else ""
        folder = f"{tests}{Path(mutant.path).parts[1]}/"
        stem = Path(mutant.path).stem.lstrip("_")
        if not any(name.startswith(folder) for name in self._seconds):
            folder = tests
        seen: set[str] = set()
        spent = 0.0

        def take(names: Iterable[str], most: float) -> list[str]:
            nonlocal spent
            taken = []
            for name in sorted(names, key=lambda n: (self._far(n, folder, stem), n)):
                if name in seen or name in self._failing or name not in self._seconds:
                    continue
                if spent + self._seconds[name] > most:
                    continue
                seen.add(name)
                spent += self._seconds[name]
                taken.append(name)
            return by_folder(taken)

        covering = self.covering(mutant)
        yield take(covering, COVERING_SECONDS / 6)
        yield take(covering, COVERING_SECONDS)
        yield take((name for name in self._seconds if name.startswith(folder)), ALL_SECONDS)

    def _far(self, name: str, folder: str, stem: str) -> tuple[bool, bool, float]:
        file = name.partition("::")[0]
        return (
            Path(file).stem != f"test_{stem}",
            not file.startswith(folder),
            self._seconds.get(name, 0.0),
        )


def by_folder(names: Sequence[str]) -> list[str]:
    """Return the names with those of a folder, and of a file, together; else in their order.

    pytest does not find the fixtures of a folder's conftest.py again when it comes back to it.
    """
    first: dict[str, int] = {}
    for i, name in enumerate(names):
        parts = name.partition("::")[0].split("/")
        for depth in range(2, len(parts) + 1):
            first.setdefault("/".join(parts[:depth]), i)

    def place(name: str) -> list[int]:
        parts = name.partition("::")[0].split("/")
        return [first["/".join(parts[:depth])] for depth in range(2, len(parts) + 1)]

    return sorted(names, key=place)


def _node_id(classname: str, name: str) -> str:
    """Return pytest's name of a test from that in a junit file."""
    return _without_group(classname.replace(".", "/") + ".py::" + name)


def _without_group(name: str) -> str:
    """Return the name of a test without the group that pytest-xdist adds to it."""
    return re.sub(r"@\w+$", "", name)


def run_tests(checkout: Path, root: str, names: Sequence[str], log: Path, *options: str) -> str:
    """Run tests of the suite at `root` in a forked process; return "passed", "failed" or "hung"."""
    listed = log.with_suffix(".txt")
    listed.write_text("\n".join([*OPTIONS, *options, *names]), "utf-8")
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            output = os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.chdir(checkout / root)
            sys.path.insert(0, str(checkout))
            os.environ["PYTHONPATH"] = str(checkout)
            sys.dont_write_bytecode = True
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
            import pytest

            code = int(pytest.main(["--rootdir", str(checkout / root), f"@{listed}"]))
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            code = UNUSABLE
        os._exit(code)
    ends = time.monotonic() + HANG_SECONDS
    status: int | None = None
    while status is None and time.monotonic() < ends:
        time.sleep(0.05)
        pid, code = os.waitpid(child, os.WNOHANG)
        status = code if pid else None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if status is None:
        os.waitpid(child, 0)
        return "hung"
    if os.waitstatus_to_exitcode(status) == UNUSABLE:
        raise RuntimeError(log.read_text("utf-8", "replace"))
    return "passed" if os.waitstatus_to_exitcode(status) == 0 else "failed"


def outcome(mutant: Mutant, suite: Suite, checkout: Path) -> dict[str, Any]:
    """Try one mutant in a copy of a checkout; return what happened, and which test noticed it."""
    path = checkout / mutant.path
    text = path.read_text("utf-8")
    log = checkout / "mutant.log"
    path.write_text(changed(text, mutant), "utf-8")
    for cached in path.parent.glob(f"__pycache__/{path.stem}.*"):
        cached.unlink()
    num_tests, result = 0, "survived"
    try:
        for names in suite.stages(mutant):
            if not names:
                continue
            num_tests += len(names)
            ended = run_tests(checkout, suite.root, names, log)
            if ended != "passed":
                result = "killed" if ended == "failed" else "timed out"
                break
    finally:
        path.write_text(text, "utf-8")
    record: dict[str, Any] = {"outcome": result, "tests": num_tests}
    if result == "killed":
        lines = log.read_text("utf-8", "replace").splitlines()
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        last = failed[0] if failed else lines[-1]
        record["by"] = last.split(" - ")[0].removeprefix("FAILED ")[:200]
    return record


def preload() -> None:
    """Import what tests import and no mutant changes; no device is touched."""
    names = "pytest torch jax flax.nnx grain hypothesis matplotlib optax orbax.checkpoint"
    for name in names.split():
        with contextlib.suppress(ModuleNotFoundError):
            import_module(name)


def copy_of(checkout: Path, cache: Path) -> Path:
    """Return a copy of a checkout whose tests keep what they compile on disk."""
    copy = Path(tempfile.mkdtemp(prefix="mutants-")) / "checkout"
    ignored = shutil.ignore_patterns(".git", ".venv*", "site", "__pycache__", ".hypothesis")
    shutil.copytree(checkout, copy, ignore=ignored)
    conftest = copy / "tests" / "conftest.py"
    off = 'jax.config.update("jax_enable_compilation_cache", False)'
    settings = {
        "jax_compilation_cache_dir": str(cache),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    on = f"for _setting in {settings!r}.items():\n    jax.config.update(*_setting)"
    conftest.write_text(conftest.read_text("utf-8").replace(off, on), "utf-8")
    return copy


def run(
    mutants: Sequence[Mutant], suite: Suite, checkout: Path, workers: int
) -> Iterator[tuple[Mutant, dict[str, Any]]]:
    """Yield the outcome of each mutant, as they come."""
    cache = Path(tempfile.gettempdir()) / "mutants-compiled"
    copies: Queue[Path] = Queue()
    for _ in range(workers):
        copies.put(copy_of(checkout, cache))

    copy = copies.get()
    log = copy / "collected.log"
    run_tests(copy, suite.root, suite.files(copy), log, "--collect-only")
    suite.keep_only(log.read_text("utf-8").splitlines())
    copies.put(copy)

    def one(mutant: Mutant) -> tuple[Mutant, dict[str, Any]]:
        copy = copies.get()
        try:
            return mutant, outcome(mutant, suite, copy)
        finally:
            copies.put(copy)

    with ThreadPoolExecutor(workers) as pool:
        for done in as_completed([pool.submit(one, mutant) for mutant in mutants]):
            yield done.result()


def key(mutant: Mutant) -> str:
    """Return a name of a mutant, the same in every run."""
    return f"{mutant.path}:{mutant.line}:{mutant.column} {mutant.kind}: {mutant.after}"


def main() -> None:
    """Draw mutants, or try them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw")
    drawing.add_argument("--seed", type=int, required=True)
    drawing.add_argument("--count", type=int, required=True)
    drawing.add_argument("--package", nargs="+", default=["jaxslowmo"], help="folders to draw from")
    trying = commands.add_parser("run")
    trying.add_argument("mutants", type=Path)
    trying.add_argument("--coverage", type=Path, help="of --cov-context=test")
    trying.add_argument("--times", type=Path, required=True, help="junit file of the same run")
    trying.add_argument("--of", nargs="+", default=["jaxslowmo"], help="the mutated folders")
    trying.add_argument("--suite", default=".", help="the folder of the suite's configuration")
    trying.add_argument("--checkout", type=Path, default=ROOT, help="whose tests are run")
    trying.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    if arguments.command == "draw":
        drawn = draw(arguments.seed, arguments.count, arguments.package)
        entries = [{"seed": arguments.seed, "mutant": mutant._asdict()} for mutant in drawn]
        print(json.dumps(entries, indent=1))
        return
    entries = json.loads(arguments.mutants.read_text("utf-8"))
    open_entries = {
        Mutant(**entry["mutant"]): entry
        for entry in entries
        if entry.get("outcome") is None and entry["mutant"]["path"].startswith(tuple(arguments.of))
    }
    suite = Suite(arguments.coverage, arguments.times, arguments.suite)
    preload()
    checkout = arguments.checkout.absolute()
    for mutant, record in run(list(open_entries), suite, checkout, arguments.workers):
        open_entries[mutant]["outcome"] = record["outcome"]
        arguments.mutants.write_text(json.dumps(entries, indent=1) + "\n", "utf-8")
        print(f"{record['outcome']:9} {key(mutant)} {record.get('by', '')}", flush=True)


if __name__ == "__main__":
    main()
