"""Measures bucket limits of the gradient reduction on this machine's devices, and prints the best.

    python benchmarks/tune_buckets.py [--preset 1m] [--replicas 4] [--limits-mib 1,5,25,100]

It times whole training steps of data parallelism: loss, gradients, reduction, optimizer. All limits
take turns, so that a change of the machine's speed hits all alike.
"""

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from jaxslowmo.cli._config import PRESETS, TrainConfig, replace_options
from jaxslowmo.cli._figures import COLOURS, clean, new_figure, save_figure
from jaxslowmo.cli._setup import Model, choose_devices, make_step
from jaxslowmo.models import gpt_preset


def measured(
    config: TrainConfig, limits: Sequence[float], rounds: int, steps: int
) -> dict[float, list[float]]:
    """Return the seconds of a step by bucket limit in MiB, one value per round."""
    devices = choose_devices(config)
    model = Model(config, devices.mesh)
    made = {
        limit: make_step(
            replace_options(config, {"bucket_mib": limit}), model.loss_fn, devices.mesh
        )
        for limit in limits
    }
    # All steps use the same state, so that they can take turns.
    state = made[limits[0]].init(model.init(0), seed=0)
    rows = config.mesh.num_replicas * config.data.batch
    shape = rows, gpt_preset(config.model.preset).context_length + 1
    batch = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    seconds: dict[float, list[float]] = {limit: [] for limit in limits}
    for number in range(1 + rounds):
        for limit, step in made.items():
            # Round 0 is not recorded: its first step compiles, its second one fills caches.
            count, began = steps if number else 2, time.perf_counter()
            for _ in range(count):
                state, _ = step(state, batch)
            jax.block_until_ready(state)
            if number:
                seconds[limit].append((time.perf_counter() - began) / count)
    return seconds


def best_limit(seconds: Mapping[float, Sequence[float]]) -> float:
    """Return the largest limit that is as fast as the fastest median, within noise.

    A limit is as fast if it is no slower than the fastest in at least a quarter of the rounds.
    Rounds are compared one by one, since the machine may slow a whole round.
    """
    fastest = min(seconds.values(), key=statistics.median)
    ratios = {limit: np.divide(times, fastest) for limit, times in seconds.items()}
    return max(limit for limit, ratio in ratios.items() if np.quantile(ratio, 0.25) <= 1)


def draw(seconds: Mapping[float, Sequence[float]], best: float, path: Path, about: str) -> None:
    """Draw the time of a step by limit: every round from left to right, and the median."""
    figure = new_figure((8, 4.5), "Step time by size of gradient buckets", about)
    axes = figure.subplots()
    for x, (limit, times) in enumerate(seconds.items()):
        colour = COLOURS["vermilion" if limit == best else "blue"]
        axes.plot(
            np.linspace(x - 0.2, x + 0.2, len(times)), 1e3 * np.array(times), "o", color=colour
        )
        axes.hlines(1e3 * statistics.median(times), x - 0.3, x + 0.3, color=colour, linewidth=2.2)
    axes.set_xticks(range(len(seconds)), [f"{limit:g}" for limit in seconds])
    axes.set(xlabel="bucket limit in MiB (0: a bucket per gradient)", ylabel="ms per training step")
    clean(axes, grid="y")
    save_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=PRESETS, default="1m")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--limits-mib", default="1,5,25,100")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("buckets.png"))
    asked = parser.parse_args()
    values = {"preset": asked.preset, "replicas": asked.replicas, "algorithm": "all_reduce"}
    config = replace_options(
        TrainConfig(), PRESETS[asked.preset] | values | {"execution": "devices"}
    )
    limits = sorted({0.0, *map(float, asked.limits_mib.split(","))})
    seconds = measured(config, limits, asked.rounds, asked.steps)
    for limit, times in seconds.items():
        low, high = np.quantile(times, [0.25, 0.75])
        median = statistics.median(times)
        print(f"{limit:6g} MiB  {1e3 * median:.2f} ms  ({1e3 * low:.2f} to {1e3 * high:.2f})")
    best = best_limit(seconds)
    size, first = round(best * 2**20), round(min(best, 1) * 2**20)
    call = f'"replica", bucket_bytes={size}, first_bucket_bytes={first}'
    print(f"Best: js.all_reduce_gradients({call})")
    draw(seconds, best, asked.out, f"{asked.preset}, {asked.replicas} replicas")
    print(asked.out)


if __name__ == "__main__":
    main()
