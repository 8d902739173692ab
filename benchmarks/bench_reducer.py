"""Time and bytes of a gradient reduction, beside torch's DistributedDataParallel, in one run.

    make bench-env
    python benchmarks/bench_reducer.py --out benchmarks/results/bench_reducer

Both libraries run as processes of this machine that talk through gloo over the loopback interface,
with the same leaves, one arithmetic thread each. Their variants take turns, so that what else the
machine does falls on all alike. A variant's time is compared with the same program without the
reduction; bytes are what the loopback interface counts, TCP's own included, so let nothing else use
it: on Linux, as root, `unshare -n sh -c 'ip link set lo up && python benchmarks/bench_reducer.py'`
gives the run an interface of its own.
"""

import argparse
import itertools
import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "reducer"))

from group import Group, loopback_bytes, medians
from shapes import MODELS, shapes_of
from table import markdown

ROOT = Path(__file__).parent.parent
TORCH_PYTHON = ROOT / ".venv-bench" / "bin" / "python"
CAPS = ("cap 1", "cap 5", "cap 25", "cap 100")
JAX = ["none", "psum", "psum, apart", *CAPS, "cap 1, apart", "cap 25, apart", "cap 25, alone"]
JAX += [f"hook {x}" for x in ("mean", "noop", "fp16_compress", "bf16_compress")]
JAX += [f"hook {x}" for x in ("powersgd 1", "powersgd 4", "int8", "fp8", "top_k 0.01")]
TORCH = ["no_sync", "per leaf", "default", "view", *CAPS, "fp16", "bf16"]
TORCH += ["powersgd 1", "powersgd 4"]
THREADS = {
    "jax": {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"},
    "torch": {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
}
# glibc gives large blocks back to the system when they are freed, and pays a page fault per 4 KiB
# when it gets them again in the next step. Both settings are measured, for both libraries alike.
KEPT = {"MALLOC_TRIM_THRESHOLD_": str(2**32), "MALLOC_MMAP_THRESHOLD_": str(2**32)}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS), help="names, with commas")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=3, help="timed steps per turn")
    parser.add_argument("--memory", default="default,kept", help="of the allocator, see KEPT")
    parser.add_argument("--only", default="", help="variants of JAX and torch, with semicolons")
    parser.add_argument("--out", type=Path, help="path without suffix; .json and .md are added")
    args = parser.parse_args()
    if not TORCH_PYTHON.exists():
        parser.error(f"{TORCH_PYTHON} is missing; `make bench-env` installs torch there.")
    return args


def measure(model: str, memory: str, args: argparse.Namespace) -> dict:
    """Rows of one model, and what the workers say about themselves."""
    wanted = [name for name in args.only.split(";") if name]
    groups: dict[str, Group] = {}
    try:
        for kind, python in (("jax", sys.executable), ("torch", str(TORCH_PYTHON))):
            env = THREADS[kind] | (KEPT if memory == "kept" else {})
            groups[kind] = Group(python, f"{kind}_worker.py", args.processes, model, env)
        rows: dict[tuple[str, str], dict] = {}
        both = itertools.zip_longest(JAX, TORCH)
        for kind, name in ((k, n) for pair in both for k, n in zip(groups, pair, strict=True) if n):
            if wanted and name not in wanted:
                continue
            start = time.perf_counter()
            found = groups[kind].ask(name, seconds=500)[0]
            row = {"library": kind, "variant": name, **found}
            rows[kind, name] = row | ({} if "refused" in found else {"ms": [], "bytes": []})
            taken = time.perf_counter() - start
            print(f"{model}: {kind} {name}: {taken:.1f} s, {found}", file=sys.stderr, flush=True)
        turns = [key for key, row in rows.items() if "refused" not in row]
        for _ in range(args.rounds):
            for kind, name in turns:
                before = loopback_bytes()
                answers = groups[kind].ask(name, args.steps + 1)
                sent = (loopback_bytes() - before) / args.processes / (args.steps + 1)
                # The first step waits for the processes to meet. A step ends with the slowest.
                steps = zip(*(a["seconds"][1:] for a in answers), strict=True)
                taken = [max(step) for step in steps]
                rows[kind, name]["ms"].append(1000 * sum(taken) / len(taken))
                rows[kind, name]["bytes"].append(sent)
        facts = {kind: group.facts for kind, group in groups.items()}
    finally:
        for group in groups.values():
            group.close()
    return {"facts": facts, "rows": summarise(rows)}


def summarise(rows: dict[tuple[str, str], dict]) -> list[dict]:
    """Medians, and ratios as medians over rounds of both times of the same round."""

    def ratio(row: dict, other: tuple[str, str]) -> float | None:
        if other not in rows:
            return None
        own, others = row["ms"], rows[other]["ms"]
        return medians([a / b for a, b in zip(own, others, strict=True)])["median"]

    def difference(row: dict, other: dict) -> float:
        return medians([a - b for a, b in zip(row["ms"], other["ms"], strict=True)])["median"]

    found = []
    for row in rows.values():
        if "refused" in row:
            found.append(row)
            continue
        bare = rows.get((row["library"], "none" if row["library"] == "jax" else "no_sync"))
        found.append(
            {
                **{k: v for k, v in row.items() if k not in ("ms", "bytes")},
                "step_ms": {k: round(v, 3) for k, v in medians(row["ms"]).items()},
                "reduction_ms": bare and round(difference(row, bare), 3),
                "ratio_to_ddp": ratio(row, ("torch", "default")),
                "ratio_to_psum": ratio(row, ("jax", "psum")),
                "bytes_sent": round(medians(row["bytes"])["median"]),
            }
        )
    return found


def main() -> None:
    args = parse()
    told = {"jax": dict(THREADS["jax"]), "torch": THREADS["torch"], "kept": KEPT}
    cache = tempfile.TemporaryDirectory()  # programs are compiled once for both memory settings
    THREADS["jax"] |= {
        "JAX_COMPILATION_CACHE_DIR": cache.name,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    begin, load = time.time(), [os.getloadavg()[0]]
    result: dict = {
        "command": "python benchmarks/bench_reducer.py",
        "arguments": {k: str(v) for k, v in vars(args).items() if k != "out"},
        "environment": told,
        "models": {},
    }
    for model, memory in itertools.product(args.models.split(","), args.memory.split(",")):
        sizes = [4 * math.prod(s) for s in shapes_of(model)]
        measured = measure(model, memory, args)
        result["machine"] = measured["facts"]["jax"]
        result["torch"] = measured["facts"]["torch"]
        result["models"][f"{model}, memory {memory}"] = {
            "leaves": len(sizes),
            "bytes": sum(sizes),
            "about": MODELS[model],
            "rows": measured["rows"],
        }
        load.append(os.getloadavg()[0])
        result["load_averages"] = [round(x, 1) for x in load]
        result["minutes"] = round((time.time() - begin) / 60, 1)
        if args.out:  # after every model: a run takes long
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
            args.out.with_suffix(".md").write_text(markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
