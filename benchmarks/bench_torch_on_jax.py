"""Samples per second of a torch module on jax's engine, beside a plain torch loop, in one run.

    python benchmarks/bench_torch_on_jax.py --out benchmarks/results/bench_torch_on_jax

In the environment of the tests of torch_compat.on_jax (`make torchax-env`). Both train the same
model from the same weights on the same samples with AdamW, with as many threads as there are cores,
and take turns, so that what else the machine does falls on both alike; a ratio is the median over
rounds of two times of the same round.
"""

import argparse
import itertools
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path

import jax
import numpy as np
import optax
import torch
from machine import describe
from torch import nn

import jaxslowmo as js
from torch_compat import on_jax
from torch_compat.examples.model import LanguageModel, LanguageModelConfig
from torch_compat.examples.text import TextStream, standard_library

LENGTH = 128  # tokens per sample
RATE, DECAY = 1e-3, 0.01
SIZES = {
    "1M": LanguageModelConfig(),
    "10M": LanguageModelConfig(width=384, layers=6, heads=6),
}
Step = Callable[[], float]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", default="1M:16,10M:4", help="model:batch size")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3, help="timed steps per turn")
    parser.add_argument("--out", type=Path, help="path without suffix; .json and .md are added")
    return parser.parse_args()


def batches(batch_size: int) -> Iterator[torch.Tensor]:
    samples = iter(TextStream(standard_library().train, length=LENGTH, seed=0))
    while True:
        taken = itertools.islice(samples, batch_size)
        yield torch.stack([sample["input_ids"] for sample in taken])


def plain_torch(model: nn.Module, batch_size: int) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    data = batches(batch_size)

    def step() -> float:
        tokens = next(data)
        loss = model(tokens, tokens)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def of_jax(model: nn.Module, batch_size: int) -> Step:
    def loss(module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return module(batch["tokens"], batch["tokens"])["loss"]

    loss_fn, params, model_state = on_jax.as_loss(model, loss)
    train = js.make_train_step(
        loss_fn,
        optax.adamw(RATE, weight_decay=DECAY),
        mesh=js.make_mesh({"replica": 1}, devices=jax.devices()[:1]),
    )
    state = train.init(params, model_state=model_state)
    data = batches(batch_size)

    def step() -> float:
        nonlocal state
        state, metrics = train(state, {"tokens": next(data).numpy().astype(np.int32)})
        return float(metrics["loss"][0])

    return step


VARIANTS = {"plain torch": plain_torch, "on jax": of_jax}


def measure(size: str, batch_size: int, rounds: int, steps: int) -> dict:
    """Rows of one setting; the variants live side by side."""
    torch.manual_seed(0)
    model = LanguageModel(SIZES[size])
    variants = {name: make(deepcopy(model), batch_size) for name, make in VARIANTS.items()}
    warm = {}
    for name, step in variants.items():
        begin = time.perf_counter()
        first = step()
        seconds = time.perf_counter() - begin
        warm[name] = ([first, *(step() for _ in range(4))], seconds)
    milliseconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, step in variants.items():
            step()  # brings what it works on back into the caches
            begin = time.perf_counter()
            for _ in range(steps):
                step()
            milliseconds[name].append(1000 * (time.perf_counter() - begin) / steps)
    rows = []
    base = milliseconds["plain torch"]
    for name, times in milliseconds.items():
        losses, first = warm[name]
        pairs = zip(base, times, strict=True)
        wanted = warm["plain torch"][0]
        rows.append(
            {
                "variant": name,
                "step_ms": quartiles(times),
                "first_step_seconds": round(first, 2),
                "samples_per_second": round(1000 * batch_size / float(np.median(times)), 2),
                "speed_ratio": quartiles([a / b for a, b in pairs]),
                "fastest_ratio": round(min(base) / min(times), 3),
                "loss_difference": max(abs(a - b) for a, b in zip(losses, wanted, strict=True)),
            }
        )
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "batch_size": batch_size,
        "rows": rows,
    }


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Median, and the quarter points between which half of the values lie."""
    found = np.quantile(values, [0.5, 0.25, 0.75]).tolist()
    return {k: round(v, 3) for k, v in zip(("median", "low", "high"), found, strict=True)}


def markdown(result: dict) -> str:
    machine = result["machine"]
    load = ", ".join(map(str, result["load_averages"]))
    lines = [
        "# A torch module on jax's engine beside a plain torch loop",
        "",
        f"`{result['command']}`, {machine['processor']}, {machine['cores']} cores, torch "
        f"{machine['torch']}, torchax {machine['torchax']}, jax {machine['jax']}. Load averages "
        f"(1 minute), before, and after each table: {load}; the run itself is 1 to 2 of it.",
        "",
        "step: median of a step of training, data to optimizer (AdamW), one replica; between the "
        "quarter points in brackets. The ratio is of samples per second, the median over rounds: "
        "1.00 is as fast, 0.50 half as fast; that in brackets is of the fastest turns, which "
        "company on the machine disturbs least. First step: with tracing and compilation. Loss: "
        "the largest difference in the first five steps.",
    ]
    for setting, found in result["settings"].items():
        lines += [
            "",
            f"## {setting}: {found['parameters'] / 1e6:.2f} M parameters, {found['batch_size']} "
            f"samples of {LENGTH} tokens per step",
            "",
            "| | step ms | samples/s | / torch | first step s | loss |",
            "|---|---:|---:|---:|---:|---:|",
        ]
        for row in found["rows"]:
            step, ratio = row["step_ms"], row["speed_ratio"]
            cells = [
                row["variant"],
                f"{step['median']:.1f} ({step['low']:.1f} to {step['high']:.1f})",
                f"{row['samples_per_second']:.1f}",
                f"{ratio['median']:.2f} ({row['fastest_ratio']:.2f})",
                f"{row['first_step_seconds']:.1f}",
                f"{row['loss_difference']:.1e}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    from importlib.metadata import version

    args = parse()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    load = [round(os.getloadavg()[0], 1)]
    result: dict = {
        "command": shlex.join(["python", "benchmarks/bench_torch_on_jax.py", *sys.argv[1:]]),
        "machine": {**describe(), "torch": torch.__version__, "torchax": version("torchax")},
        "load_averages": load,
        "settings": {},
    }
    for setting in args.settings.split(","):
        size, batch_size = setting.split(":")
        found = measure(size, int(batch_size), args.rounds, args.steps)
        result["settings"][setting.replace(":", ", batch ")] = found
        load.append(round(os.getloadavg()[0], 1))
        if args.out:  # after every setting: a run takes long
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
            args.out.with_suffix(".md").write_text(markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
