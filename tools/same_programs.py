"""Are the programs of steps and loops what they were in another commit? By their StableHLO text.

    git worktree add /tmp/before <commit>
    python tools/same_programs.py --before /tmp/before

A reshaping that leaves all programs as they are leaves bytes, results and times on the devices as
they are, too. A program with the same operations in another order, or with other names, is counted
apart; those that differ are printed, with the operations that have become more or fewer. What a
checkout refuses or has no name for is listed. `tools/differential/programs.py` has the scenarios.
"""

import argparse
import collections
import fnmatch
import hashlib
import json
import re
import warnings
from pathlib import Path
from typing import TypedDict

from differential.checkouts import ROOT, run_in


class Program(TypedDict):
    """What is compared of one program: hash of its text and of its lines without names."""

    text: str
    lines: str
    operations: dict[str, int]


class Programs(TypedDict):
    """Programs by name of scenario and phase, and why scenarios have none."""

    programs: dict[str, Program]
    refused: dict[str, str]


def described(text: str) -> Program:
    """Of a program's StableHLO text, or that of a compiled one."""
    lines = [
        re.sub(r"[%@#][\w.\-#:]+|handle = \d+|channel_id=\d+", "", line).strip()
        for line in text.splitlines()
        if not re.match(r"\s*(func\.func|module|sdy\.mesh|\^bb|return|stablehlo.return)", line)
    ]
    operations = re.findall(r"stablehlo\.\w+", text) or re.findall(r" ([a-z][\w\-]*)\(", text)
    return {
        "text": hashlib.sha256(text.encode()).hexdigest(),
        "lines": hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest(),
        "operations": dict(collections.Counter(operations)),
    }


def programs(pattern: str) -> Programs:
    """Of the checkout that is on the path."""
    from differential.programs import scenarios

    warnings.simplefilter("ignore")
    result: Programs = {"programs": {}, "refused": {}}
    for name, texts in scenarios():
        if not fnmatch.fnmatch(name, pattern):
            continue
        try:
            for phase, text in texts().items():
                result["programs"][f"{name}: {phase}"] = described(text)
        except Exception as error:
            message = (str(error).splitlines() or [""])[0]
            result["refused"][name] = f"{type(error).__name__}: {message[:200]}"
    return result


def compared(before: Programs, now: Programs) -> list[str]:
    """The lines to print: differences, what was refused, and a count of each kind."""
    old, new = before["programs"], now["programs"]
    both = [name for name in new if name in old]
    same = {name for name in both if old[name]["text"] == new[name]["text"]}
    alike = {name for name in both if old[name]["lines"] == new[name]["lines"]} - same
    lines = [f"{name}: the same operations" for name in sorted(alike)]
    for name in sorted(set(both) - same - alike):
        counts = old[name]["operations"], new[name]["operations"]
        changed = {
            operation: " -> ".join(str(count.get(operation, 0)) for count in counts)
            for operation in sorted({*counts[0], *counts[1]})
            if counts[0].get(operation) != counts[1].get(operation)
        }
        lines.append(f"{name}: {changed or 'as many operations, of other shapes or constants'}")
    for label, one, other in (("before", old, new), ("now", new, old)):
        lines += [f"{name}: {label} only" for name in sorted(set(one) - set(other))]
    for label, result in (("before", before), ("now", now)):
        lines += [f"no program {label}: {n}: {why}" for n, why in sorted(result["refused"].items())]
    return [
        *lines,
        f"{len(same)} of {len({*old, *new})} programs have the same text, {len(alike)} the same "
        f"operations, {len(both) - len(same) - len(alike)} others; "
        f"{len({*old} ^ {*new})} are in one checkout alone",
    ]


def main() -> None:
    """Print how many programs are the same, and what the others have become."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="checkout of another commit")
    parser.add_argument("--only", default="*", help="pattern of names of scenarios")
    parser.add_argument("--print", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.print:
        print(json.dumps(programs(arguments.only)))
        return
    if arguments.before is None:
        parser.error("--before is missing")
    before, now = (
        json.loads(
            run_in(checkout, "same_programs.py", "--print", "--only", arguments.only).splitlines()[
                -1
            ]
        )
        for checkout in (arguments.before, ROOT)
    )
    print("\n".join(compared(before, now)))


if __name__ == "__main__":
    main()
