"""Seconds of training until a validation loss on real text, on shaped links, beside torch's DDP.

    make bench-env
    sudo .venv/bin/python benchmarks/cluster/time_to_target.py --out \\
        benchmarks/results/cluster_time_to_target

Four hosts as in `step_time.py`. A byte-level GPT, the same in both libraries, starts from the same
parameters and reads the same batches of the standard library's source. The clock runs while the
hosts train, not while the mean of their models is evaluated; compilation comes before it.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import text_task as task
from host_group import HostGroup
from namespaces import Host, hosts, missing
from step_time import APART, ONE_THREAD, TORCH_ENV, TORCH_PYTHON

from jaxslowmo.models import gpt_preset


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", default="200mbit", help="of the links")
    parser.add_argument("--target", type=float, default=2.4, help="validation loss, nats per byte")
    parser.add_argument("--batch", type=int, default=2, help="windows per host and step")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", default="", help="variants, with semicolons")
    parser.add_argument("--out", type=Path, help="path without suffix; .json and .md are added")
    args = parser.parse_args()
    if lacks := missing():
        parser.error(f"missing here: {', '.join(lacks)}.")
    args.wanted = [name for name in args.only.split(";") if name] or (*task.JAX, *task.TORCH)
    if set(args.wanted) & set(task.TORCH) and not TORCH_PYTHON.exists():
        parser.error(f"{TORCH_PYTHON} is missing; `make bench-env` installs torch there.")
    return args


def train(group: HostGroup, name: str, target: float) -> dict:
    """One run: seconds, steps and bytes until the target is met, or None."""
    first = group.ask(name, seconds=300)[0]
    curve = [{"steps": 0, "seconds": 0.0, "validation": first["validation"]}]
    seconds, sent = 0.0, 0.0
    for steps in range(task.EVERY, task.MAX_STEPS + 1, task.EVERY):
        answers = group.ask(name, task.EVERY, seconds=300)
        seconds += max(a["seconds"] for a in answers)
        sent += sum(a["bytes"] for a in answers) / len(answers)
        loss = answers[0]["validation"]
        curve.append({"steps": steps, "seconds": round(seconds, 2), "validation": round(loss, 4)})
        if loss <= target:
            break
    met = loss <= target
    found = {"variant": name, "ms_per_step": round(1000 * seconds / steps, 1), "curve": curve}
    found |= {"mb_sent_per_step": round(sent / 1e6 / steps, 4)}
    return found | {"seconds": round(seconds, 2) if met else None, "steps": steps if met else None}


def measure(found: list[Host], args: argparse.Namespace, folder: str) -> dict:
    runs, facts = [], {}
    for seed in range(args.seeds):
        data = f"{folder}/{seed}.npz"
        about = task.save(data, seed, args.batch)
        heads = str(gpt_preset(task.PRESET).num_heads)
        jax_env = {"XLA_FLAGS": f"{ONE_THREAD} {APART}"}
        for library, names, start in (
            ("jax", task.JAX, (sys.executable, "text_jax_worker.py", 9821, jax_env)),
            ("torch", task.TORCH, (str(TORCH_PYTHON), "text_torch_worker.py", 9822, TORCH_ENV)),
        ):
            wanted = [name for name in names if name in args.wanted]
            if library == "torch" and not wanted:  # jax says what the machine is
                continue
            group = HostGroup(found, *start, data, str(seed), heads)
            try:
                facts[library] = group.facts
                for name in wanted:
                    run = {"library": library, "seed": seed, **train(group, name, args.target)}
                    runs.append(run)
                    shown = {k: v for k, v in run.items() if k != "curve"}
                    print(shown, run["curve"][-1], file=sys.stderr, flush=True)
            finally:
                group.close()
    return {"machine": facts["jax"], "torch": facts.get("torch"), **about, "runs": runs}


def markdown(result: dict) -> str:
    machine = result["machine"]
    torch = f", torch {result['torch']['torch']}, gloo in both" if result["torch"] else ", gloo"
    ddp = {r["seed"]: r["seconds"] for r in result["runs"] if r["variant"] == "DDP"}
    lines = [
        "# Time to a validation loss on shaped links",
        "",
        f"`{result['command']}`: {task.HOSTS} hosts, network namespaces of one machine, links "
        f"shaped in both directions; {machine['processor']}, {machine['cores']} cores for all "
        f"hosts; jax {machine['jax']}{torch}, one arithmetic "
        f"thread per process. A GPT of {result['model_bytes'] / 1e6:.2f} MB (float32), "
        f"batch {result['batch']} per host, {result['corpus_mb']} MB of Python source; AdamW, "
        f"learning rate {task.LEARNING_RATE} after {task.WARMUP} steps of warm-up. Evaluated every "
        f"{task.EVERY} steps, outside of the measured time, at most {task.MAX_STEPS} steps. "
        f"Target: {result['target']} nats per byte. Load averages (1 minute) before and after: "
        f"{' and '.join(map(str, result['load_averages']))}.",
        "",
        "| | seed | seconds | / DDP | steps | ms per step | MB per host and step |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for run in result["runs"]:
        base = ddp.get(run["seed"])
        reached = run["seconds"] is not None
        ratio = f"{run['seconds'] / base:.2f}" if reached and base else ""
        lines.append(
            f"| {run['library']}: {run['variant']} | {run['seed']} "
            f"| {run['seconds'] if reached else 'not reached'} | {ratio} | {run['steps'] or ''} "
            f"| {run['ms_per_step']} | {run['mb_sent_per_step']:.3f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    args = parse()
    # A polite kill ends the run as Ctrl-C does: with the hosts removed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    begin, load = time.time(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder, hosts(task.HOSTS, args.rate) as found:
        measured = measure(found, args, folder)
    options = f"--rate {args.rate} --target {args.target} --batch {args.batch} --seeds {args.seeds}"
    options += f' --only "{args.only}"' if args.only else ""
    result = {
        "command": f"benchmarks/cluster/time_to_target.py {options}",
        "target": args.target,
        "batch": args.batch,
        "load_averages": [round(load, 1), round(os.getloadavg()[0], 1)],
        "minutes": round((time.time() - begin) / 60, 1),
        **measured,
    }
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
