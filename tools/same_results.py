"""Are the results of loops, steps and restores those of another commit, and its refusals? By bits.

    git worktree add /tmp/before <commit>
    python tools/same_results.py --before /tmp/before              about 60 random scenarios
    python tools/same_results.py --before /tmp/before --seeds 600  more of them
    python tools/same_results.py --before /tmp/before --only "step 17"

A scenario has a name, such as "step 17", of which its options are drawn, in every process and
whatever the number of scenarios (`tools/differential/drawing.py`). It is run in both checkouts, and
parameters, states and metrics are compared bit for bit; errors by type and by what they name first.
Restores are of checkpoints that the other checkout has saved: they are resumed alike, or refused by
a `CheckpointError`. Where this checkout has `js.GradientTransform`, scenarios are also written with
`js.chain`, whose parameters and metrics must be the same.

`--keep FOLDER` keeps the results, and uses those of the other checkout again. Differences that are
meant stand in a file (`--explained`), as lines `pattern of names | reason`; with others it ends
with 1.
"""

import argparse
import fnmatch
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from differential.checkouts import ROOT, run_in
from differential.drawing import drawn, said
from differential.outcomes import Outcome, differences, outcome_of

EXPLAINED = ROOT / "tools" / "differential" / "explained.txt"
BESIDE_STATES = ("params", "metrics", "model_state")
Outcomes = dict[str, dict[str, Outcome]]
"""By name of scenario and spelling."""


def outcomes(folder: Path, label: str, count: int, pattern: str) -> Outcomes:
    """Of the checkout that is on the path."""
    import jax
    from differential import misuses, runs

    results: Outcomes = {}
    for name, options in drawn(count).items():
        if not fnmatch.fnmatch(name, pattern):
            continue
        print(name, said(options), file=sys.stderr, flush=True)  # the last line before a crash
        results[name] = {}
        for spelling in runs.spellings(name, options):
            file = folder / label / f"{name}, {spelling}.npz"
            results[name][spelling] = outcome_of(
                lambda n=name, o=options, s=spelling: runs.run(n, o, s, folder / "checkpoints"),
                file,
            )
        jax.clear_caches()
    for name in misuses.MISUSES:
        if fnmatch.fnmatch(f"misuse: {name}", pattern):

            def call(name: str = name) -> dict:
                misuses.run(name)
                return {}

            results[f"misuse: {name}"] = {"": outcome_of(call, folder / label / "nothing.npz")}
    return results


def outcomes_in(checkout: Path, folder: Path, label: str, count: int, pattern: str) -> Outcomes:
    """Of a checkout, in a process of its own."""
    arguments = ["--in", label, "--keep", str(folder), "--seeds", str(count), "--only", pattern]
    run_in(checkout, "same_results.py", *arguments)
    return json.loads((folder / f"{label}.json").read_text())


def kept_outcomes(checkout: Path, folder: Path, count: int, pattern: str) -> Outcomes:
    """Those of the checkout before; of the folder where commit and scenarios are the same."""
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    scenarios = b"".join(x.read_bytes() for x in sorted((ROOT / "tools/differential").glob("*.py")))
    digest = hashlib.sha256(scenarios).hexdigest()
    wanted = f"{checkout.resolve()} {commit} {count} {pattern} {digest}"
    of, result = folder / "before.txt", folder / "before.json"
    if of.exists() and of.read_text() == wanted:
        return json.loads(result.read_text())
    of.unlink(missing_ok=True)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    results = outcomes_in(checkout, folder, "before", count, pattern)
    of.write_text(wanted)
    return results


def explanations(file: Path) -> dict[str, str]:
    """Reasons by pattern of names."""
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
    pairs = (line.partition("|") for line in lines)
    return {pattern.strip(): reason.strip() for pattern, _, reason in pairs}


def compared(before: Outcomes, now: Outcomes, reasons: dict[str, str], count: int) -> list[str]:
    """Differences that nobody explains, by scenario; prints these, the explained and a count."""
    options, unexplained, explained, notes = drawn(count), [], {}, []
    refused = sum(bool(next(iter(one.values()))["error"]) for one in now.values())
    for name in now:
        first = next(iter(now[name]))
        lines: list[str] = []
        if name not in before:
            lines.append("not run before")
        else:
            lines, note = differences(before[name][first], now[name][first])
            notes += [f"{name}: {note}"] if note else []
        if name.startswith("restore") and now[name][first]["error"][:1] == ["CheckpointError"]:
            notes.append(f"{name}: refused: {now[name][first]['error'][2]}")
            lines = []
        for spelling in list(now[name])[1:]:
            pair = now[name][first], now[name][spelling]
            other, _ = differences(*pair, BESIDE_STATES, (first, spelling))
            lines += [f"as {spelling}: {line}" for line in other]
        if not lines:
            continue
        reason = next((r for p, r in reasons.items() if fnmatch.fnmatch(name, p)), None)
        if reason is None:
            unexplained.append(name)
            print(f"{name} ({said(options[name])})" if name in options else name)
            print("".join(f"    {line}\n" for line in lines), end="")
        else:
            explained[name] = reason
    for name, reason in explained.items():
        print(f"{name}: explained: {reason}")
    print("".join(f"{note}\n" for note in notes), end="")
    print(
        f"{len(now) - len(unexplained) - len(explained)} of {len(now)} scenarios are the same "
        f"({refused} of all are refused), {len(explained)} differ as explained, "
        f"{len(unexplained)} otherwise"
    )
    return unexplained


def main() -> None:
    """Run both checkouts and print what differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, help="checkout of another commit")
    parser.add_argument("--seeds", type=int, default=60, help="scenarios, about; 60 by default")
    parser.add_argument("--only", default="*", help="pattern of names of scenarios")
    parser.add_argument("--explained", type=Path, default=EXPLAINED)
    parser.add_argument("--keep", type=Path, help="folder for results")
    parser.add_argument("--in", dest="label", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    asked = arguments.seeds, arguments.only
    if arguments.label:
        results = outcomes(arguments.keep, arguments.label, *asked)
        (arguments.keep / f"{arguments.label}.json").write_text(json.dumps(results))
        return
    if arguments.before is None:
        parser.error("--before is missing")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        before = kept_outcomes(arguments.before, folder, *asked)
        now = outcomes_in(ROOT, folder, "now", *asked)
        sys.exit(bool(compared(before, now, explanations(arguments.explained), arguments.seeds)))


if __name__ == "__main__":
    main()
