r"""Samples per second of TPUManager on CPU devices, beside a plain torch loop, in one run.

    python benchmarks/bench_tpu_manager.py --also .venv-torchax/bin/python \
      --out benchmarks/results/bench_tpu_manager

In the environment of the tests of torch_compat (`make torch-env`), and, with `--also`, in that of
torch_compat.on_jax (`make torchax-env`): each measures the backend that it has beside the plain
torch that it has, one after the other for each setting. All variants of one train the same
model on the same samples with the same AdamW, with as many threads as there are cores, and take
turns, so that what else the machine does falls on all alike; a ratio is the median over rounds of
two times of the same round. CPU devices share the cores of the machine: what is measured is what
the manager adds, not what more devices would gain.
"""

import argparse
import importlib.metadata
import itertools
import json
import multiprocessing as mp
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path

import torch
from machine import host
from torch import nn

from torch_compat import TPUManager
from torch_compat.examples.model import LanguageModel, LanguageModelConfig
from torch_compat.examples.text import TextStream, standard_library

HAS_XLA = find_spec("torch_xla") is not None
LENGTH = 128  # tokens per sample
SIZES = {
    "1M": LanguageModelConfig(),
    "10M": LanguageModelConfig(width=384, layers=6, heads=6),
}
ABOUT = {
    "torch": "plain torch",
    "xla": "plain torch_xla, one device",
    **{f"manager {n}": f"TPUManager, {n} device{'s' * (n > 1)}" for n in (1, 2, 4)},
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", default="1M:16,10M:4,1M:64", help="model:batch size")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2, help="timed steps per turn")
    parser.add_argument(
        "--patience", type=float, default=20, help="seconds a round may wait for a quiet machine"
    )
    parser.add_argument("--out", type=Path, help="path without suffix; .json and .md are added")
    parser.add_argument(
        "--also", action="append", default=[], help="python of another environment to measure in"
    )
    parser.add_argument("--one", action="store_true", help="one setting, its rows to stdout")
    return parser.parse_args()


def adamw(model: nn.Module, **options) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, **options)


def batches(samples: TextStream, batch_size: int) -> Iterator[torch.Tensor]:
    iterator = iter(samples)
    while True:
        taken = itertools.islice(iterator, batch_size)
        yield torch.stack([sample["input_ids"] for sample in taken])


class PlainTorch:
    def __init__(self, model: nn.Module, samples: TextStream, batch_size: int):
        self.model, self.optimizer = model, adamw(model)
        self.batches = batches(samples, batch_size)

    def step(self) -> dict[str, float]:
        tokens = next(self.batches)
        loss = self.model(tokens, tokens)["loss"]
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"loss": loss.item()}

    def close(self) -> None:
        pass


class PlainXla:
    """Everything on one CPU device of a process of its own, nothing copied but the samples."""

    def __init__(self, model: nn.Module, samples: TextStream, batch_size: int):
        context = mp.get_context("fork")
        self.pipe, end = context.Pipe()
        self.process = context.Process(
            target=self.serve, args=(end, model, samples, batch_size), daemon=True
        )
        self.process.start()

    @staticmethod
    def serve(pipe, model: nn.Module, samples: TextStream, batch_size: int) -> None:
        import torch_xla
        import torch_xla.core.xla_model as xm

        from torch_compat import runtime

        torch.set_num_threads(1)  # OpenMP's threads do not survive a fork; XLA has its own
        (device,) = runtime.open_devices(1)
        model = model.to(device)
        model.tie_weights()
        optimizer = adamw(model, capturable=True)  # else every step were a program of its own
        for batch in batches(samples, batch_size):
            pipe.recv()
            tokens = batch.to(device)
            loss = model(tokens, tokens)["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            torch_xla.sync()
            xm.wait_device_ops()
            pipe.send({"loss": loss.item()})

    def step(self) -> dict[str, float]:
        self.pipe.send(None)
        return self.pipe.recv()

    def close(self) -> None:
        self.process.kill()
        self.process.join()


class Manager:
    def __init__(self, model: nn.Module, samples: TextStream, batch_size: int, devices: int):
        per_device = batch_size // devices
        self.model, self.manager = (
            model,
            TPUManager(
                model,
                samples,
                nprocs=devices,
                batch_size_per_device=per_device,
                prefetch=max(16, 2 * per_device),
                start=True,
            ),
        )
        self.optimizer = adamw(model)

    def step(self) -> dict[str, float]:
        loss, _ = self.manager.step()
        begin = time.perf_counter()
        self.optimizer.step()
        updated = time.perf_counter()
        self.manager.update_model_parameters(self.model.parameters())
        self.manager.zero_grad()
        return {
            "loss": loss,
            "optimizer_seconds": updated - begin,
            "push_seconds": time.perf_counter() - updated,
            **self.manager.statistics._asdict(),
        }

    def close(self) -> None:
        self.manager.shutdown()


def wait_for_quiet(patience: float) -> float:
    """Wait until other programs leave the cores alone; the share of them still busy at the end.

    Threads of OpenMP wait for each other in every operation of torch, and pay most for company.
    """
    end = time.monotonic() + patience
    while True:
        before = _ticks()
        time.sleep(0.3)
        idle, total = (b - a for a, b in zip(before, _ticks(), strict=True))
        busy = 1 - idle / total
        if busy < 0.1 or time.monotonic() > end:
            return busy


def _ticks() -> tuple[int, int]:
    try:
        with open("/proc/stat") as file:
            ticks = [int(field) for field in file.readline().split()[1:9]]
    except OSError:  # not Linux: nothing is waited for
        now = time.monotonic_ns()
        return now, now
    return ticks[3] + ticks[4], sum(ticks)


def measure(size: str, batch_size: int, rounds: int, steps: int, patience: float) -> dict:
    """Rows of one setting; all variants live side by side."""
    torch.manual_seed(0)
    model = LanguageModel(SIZES[size])
    samples = TextStream(standard_library().train, length=LENGTH, seed=0)
    variants = {
        f"manager {n}": Manager(deepcopy(model), samples, batch_size, n)
        for n in (1, 2, 4)
        if batch_size % n == 0
    }
    if HAS_XLA:
        variants["xla"] = PlainXla(deepcopy(model), samples, batch_size)
    variants["torch"] = PlainTorch(model, samples, batch_size)
    try:
        # As many steps as until nothing is compiled any more, for all variants.
        warm = {name: [variant.step() for _ in range(3)] for name, variant in variants.items()}
        milliseconds = {name: [] for name in variants}
        answers = {name: [] for name in variants}
        busy = []
        for _ in range(rounds):
            busy.append(wait_for_quiet(patience))
            for name, variant in variants.items():
                variant.step()  # brings what it works on back into the caches
                begin = time.perf_counter()
                answers[name] += [variant.step() for _ in range(steps)]
                milliseconds[name].append(1000 * (time.perf_counter() - begin) / steps)
    finally:
        for variant in variants.values():
            variant.close()
    rows = []
    for name in sorted(variants, key=list(ABOUT).index):
        row = {"variant": name, "step_ms": quartiles(milliseconds[name])}
        row["fastest_ms"] = round(min(milliseconds[name]), 3)
        row["samples_per_second"] = round(1000 * batch_size / row["step_ms"]["median"], 2)
        for other in [name for name in ("torch", "xla") if name in variants]:
            pairs = zip(milliseconds[other], milliseconds[name], strict=True)
            row[f"speed_ratio_to_{other}"] = quartiles([a / b for a, b in pairs])
            fastest = min(milliseconds[other]) / min(milliseconds[name])
            row[f"fastest_ratio_to_{other}"] = round(fastest, 3)
        differences = [
            abs(a["loss"] - b["loss"]) for a, b in zip(warm[name], warm["torch"], strict=True)
        ]
        row["loss_difference"] = max(differences)
        keys = [key for key in answers[name][0] if key != "loss"]
        for key in keys:
            values = [answer[key] for answer in answers[name]]
            if key.endswith("seconds"):
                name_ms = "manager_ms" if key == "seconds" else key.replace("seconds", "ms")
                row[name_ms] = quartiles([1000 * v for v in values])
            else:
                row[key] = max(values)
        rows.append(row)
    parameters = list(model.parameters())
    return {
        "parameters": sum(p.numel() for p in parameters),
        "parameter_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "batch_size": batch_size,
        "versions": versions(),
        "busy_before_rounds": quartiles(busy),
        "rows": rows,
    }


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Median, and the quarter points between which half of the values lie."""
    ordered = torch.tensor(values, dtype=torch.float64)
    shares = torch.tensor([0.5, 0.25, 0.75], dtype=torch.float64)
    found = torch.quantile(ordered, shares).tolist()
    return {k: round(v, 3) for k, v in zip(("median", "low", "high"), found, strict=True)}


def versions() -> dict[str, str]:
    """Of what this environment drives the devices with."""
    names = ["torch", "torch_xla"] if HAS_XLA else ["torch", "torchax", "jax"]
    return {name: importlib.metadata.version(name) for name in names}


def table(setting: str, backend: str, found: dict) -> list[str]:
    """One setting in one environment."""
    told = ", ".join(" ".join(pair) for pair in found["versions"].items())
    lines = [
        "",
        f"## {setting}, {backend}: {found['parameters'] / 1e6:.2f} M parameters "
        f"({found['parameter_bytes'] / 1e6:.2f} MB), {found['batch_size']} samples of {LENGTH} "
        "tokens per step",
        "",
        f"{told}.",
        "",
        "| | step ms | samples/s | / torch | / torch_xla | samples ms | devices ms | AdamW ms "
        "| MB to devices | MB to host | compiled |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in found["rows"]:
        step = row["step_ms"]
        ratios = [
            f"{row[f'speed_ratio_to_{other}']['median']:.2f} "
            f"({row[f'fastest_ratio_to_{other}']:.2f})"
            if f"speed_ratio_to_{other}" in row
            else ""
            for other in ("torch", "xla")
        ]
        cells = [
            ABOUT[row["variant"]],
            f"{step['median']:.1f} ({step['low']:.1f} to {step['high']:.1f})",
            f"{row['samples_per_second']:.1f}",
            *ratios,
        ]
        if "data_ms" in row:
            waits = ("data_ms", "barrier_ms", "optimizer_ms")
            cells += [f"{row[key]['median']:.1f}" for key in waits]
            cells += [f"{row[f'bytes_to_{end}'] / 1e6:.2f}" for end in ("device", "host")]
            cells.append(str(row["compilations"]))
        else:
            cells += [""] * 6
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def markdown(result: dict) -> str:
    machine = result["machine"]
    lines = [
        "# TPUManager on CPU devices beside a plain torch loop",
        "",
        f"`{result['command']}`, {machine['processor']}, {machine['cores']} cores. Load averages "
        f"(1 minute), before, and after each setting: "
        f"{', '.join(map(str, result['load_averages']))}; the run itself is 1 to 2 of it.",
        "",
        "step: median of a step of training, forward to optimizer; between the quarter points in "
        "brackets. The ratios are of samples per second, medians over rounds: 1.00 is as fast, "
        "0.50 half as fast; those in brackets are of the fastest turns, which company on the "
        "machine disturbs least. Plain torch_xla has model and optimizer on the device and copies "
        "samples only; TPUManager's optimizer is on the host. Of a step of the manager: waiting "
        "of device 0 for samples, and for the other devices (0 where one program drives all); "
        "AdamW on the host; MB copied to all devices and back; programs compiled in any step "
        "measured. CPU devices share the cores. Each backend has the torch of its environment "
        "beside it.",
    ]
    for setting, found in result["settings"].items():
        for backend, measured in found.items():
            lines += table(setting, backend, measured)
    return "\n".join(lines) + "\n"


def main() -> None:
    args = parse()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    if args.one:
        size, batch_size = args.settings.split(":")
        print(json.dumps(measure(size, int(batch_size), args.rounds, args.steps, args.patience)))
        return
    begin, load = time.time(), [round(os.getloadavg()[0], 1)]
    result: dict = {
        "command": shlex.join(["python", "benchmarks/bench_tpu_manager.py", *sys.argv[1:]]),
        "arguments": {k: v for k, v in vars(args).items() if k not in ("out", "one", "also")},
        "machine": host(),
        "load_averages": load,
        "settings": {},
    }
    for setting in args.settings.split(","):
        # A process of its own: device processes are forked before torch has threads.
        numbers = ["--rounds", str(args.rounds), "--steps", str(args.steps)]
        numbers += ["--patience", str(args.patience)]
        found = result["settings"].setdefault(setting.replace(":", ", batch "), {})
        for python in [sys.executable, *args.also]:
            command = [python, __file__, "--one", "--settings", setting, *numbers]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            measured = json.loads(output.splitlines()[-1])
            found["torch_xla" if "torch_xla" in measured["versions"] else "torchax"] = measured
        load.append(round(os.getloadavg()[0], 1))
        result["minutes"] = round((time.time() - begin) / 60, 1)
        if args.out:  # after every setting: a run takes long
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
            args.out.with_suffix(".md").write_text(markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
