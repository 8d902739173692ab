"""Are the programs of training steps what they were in another commit? By their StableHLO text.

    git worktree add /tmp/before <commit>
    python tools/same_programs.py --before /tmp/before

A reshaping that leaves all programs as they are leaves bytes, results and times on the devices as
they are, too. Programs that differ are printed, with the operations that have become more or fewer.
"""

import argparse
import collections
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--before", type=Path, help="checkout of another commit")
PARSER.add_argument("--print", action="store_true", help=argparse.SUPPRESS)  # in each checkout
BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
Programs = dict[str, tuple[str, dict[str, int]]]
"""Hash of the text and number of each operation, by name of step and phase."""


def programs() -> Programs:
    """Of every step of benchmarks/bench_step.py, in the checkout that is on the path."""
    sys.argv = [sys.argv[0], "--width", "64"]
    sys.path.insert(0, str(BENCHMARKS))
    import bench_step
    import numpy as np
    import optax

    import jaxslowmo as js

    mesh = js.make_mesh({"replica": bench_step.ARGS.replicas})
    params = bench_step.init_mlp(64)
    batch = tuple(np.zeros((64, n), np.float32) for n in (64, 16))
    found: Programs = {}
    for name, parts in bench_step.variants().items():
        step = js.make_train_step(bench_step.loss, optax.adamw(1e-3), mesh=mesh, **parts)
        for phase, traced in step.traced_by_phase(step.init(params), batch).items():
            text = traced.lower().as_text()
            operations = collections.Counter(re.findall(r"stablehlo\.\w+", text))
            found[f"{name}, {phase or 'all'}"] = (
                hashlib.sha256(text.encode()).hexdigest(),
                dict(operations),
            )
    return found


def programs_of(checkout: Path) -> Programs:
    """In a process of its own, with the package of that checkout."""
    command = [sys.executable, __file__, "--print"]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        sys.exit(f"{checkout}: {result.stderr}")
    return json.loads(result.stdout.splitlines()[-1])


def main() -> None:
    """Print how many programs are the same, and what the others have become."""
    arguments = PARSER.parse_args()
    if arguments.print:
        print(json.dumps(programs()))
        return
    if arguments.before is None:
        PARSER.error("--before is missing")
    before, now = programs_of(arguments.before), programs_of(BENCHMARKS.parent)
    same = [name for name in now if name in before and now[name][0] == before[name][0]]
    for name in sorted({*before, *now} - set(same)):
        _, old = before.get(name, ("", {}))
        _, new = now.get(name, ("", {}))
        changed = {
            operation: f"{old.get(operation, 0)} -> {new.get(operation, 0)}"
            for operation in sorted({*old, *new})
            if old.get(operation) != new.get(operation)
        }
        print(f"{name}: {changed or 'the same operations in another order'}")
    print(f"{len(same)} of {len({*before, *now})} programs have the same text")


if __name__ == "__main__":
    main()
