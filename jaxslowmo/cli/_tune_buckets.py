"""`jaxslowmo tune buckets`: the measurement of bucket limits, its table and its picture."""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import jaxslowmo as js
from jaxslowmo.models import gpt_loss_fn, init_gpt, num_parameters
from jaxslowmo.tree import noted_buffers

from ._errors import INTERRUPTED, usage_errors
from ._figures import COLOURS, clean, new_figure, save_figure
from ._output import format_bytes, format_count, say, table_of, tracked, write_json
from .config._commands import TuneBucketsConfig
from .processes._peers import StopOnSignal
from .run._division import RunDevices, choose_mesh
from .run._recipes import build_algorithm, config_of, policy_of
from .run._run_folder import make_folder

Layout = tuple[tuple[tuple[str, ...], int], ...]  # names of the leaves and bytes of each bucket


def tune_buckets(config: TuneBucketsConfig) -> int:
    """Measure every limit, then write a table, a figure and tune.json.

    After Ctrl-C they show the rounds that have finished.

    Raises:
      CommandError: the options do not fit each other or the devices.
    """
    console, train = Console(), config.train
    with usage_errors():
        placement, model = choose_mesh(train), config_of(train)
        steps = {limit: _step(config, placement, limit) for limit in config.candidates}
        # All steps use the same state, so that they can take turns.
        state = steps[0].init(init_gpt(model, train.seed), seed=train.seed)
        shape = (train.replicas * train.batch, model.context_length + 1)
        batch = np.random.default_rng(train.seed).integers(0, 256, shape, np.uint8)
        layouts = {limit: _layout(step, state, batch) for limit, step in steps.items()}
    folder = make_folder(config.out, "tune")
    size = f"{format_count(num_parameters(model))} parameters"
    subject = f"{train.preset}: {size}, {placement.description}"
    say(console, subject)
    same = {layout: limit for limit, layout in reversed(layouts.items())}
    seconds: dict[int, list[float]] = {limit: [] for limit in sorted(same.values())}
    turns = list(itertools.product(range(1 + config.rounds), seconds))
    with StopOnSignal() as stop:
        for number, limit in tracked(turns, "measuring", console):
            # Round 0 is not recorded: its first step compiles, its second one fills caches.
            count, began = config.steps if number else 2, time.perf_counter()
            for _ in range(count):
                state, _ = steps[limit](state, batch)
            jax.block_until_ready(state)
            seconds[limit] += [(time.perf_counter() - began) / count] * (number > 0)
            if stop.reason:
                break
    rounds = min(map(len, seconds.values()))
    if not rounds:
        return INTERRUPTED
    rows = make_rows(layouts, seconds)
    best = best_limit(rows)
    result = {
        "config": config,
        "placement": placement.description,
        "best": {"bucket_bytes": best, "first_bucket_bytes": config.first_of(best)},
        "rows": rows,
    }
    write_json(folder / "tune.json", result)
    about = f"{subject}; {rounds} rounds of {config.steps} steps, order {config.order}"
    draw_limits(rows, best, folder / "tune.png", subtitle=about)
    console.print(_table(rows, best))
    axes = '("replica", "device")' if train.devices_per_replica > 1 else '"replica"'
    order = "" if config.order == "ready" else f', order="{config.order}"'
    advice = (
        f"Best: js.all_reduce_gradients({axes}, bucket_bytes={best}, "
        f"first_bucket_bytes={config.first_of(best)}{order})"
    )
    say(console, advice, str(folder / "tune.png"))
    return INTERRUPTED if stop.reason else 0


def _step(config: TuneBucketsConfig, placement: RunDevices, limit: int) -> js.train.TrainStep:
    """Return a training step whose buckets have a limit in bytes."""
    train = config.train
    gradients = js.all_reduce_gradients(
        ("replica", "device") if train.devices_per_replica > 1 else "replica",
        bucket_bytes=limit,
        first_bucket_bytes=config.first_of(limit),
        order=None if config.order == "ready" else config.order,
    )
    algorithm = dataclasses.replace(build_algorithm(train), gradients=gradients)
    loss_fn, policy = gpt_loss_fn(config_of(train)), policy_of(train)
    return algorithm.make_step(loss_fn, train, mesh=placement.mesh, policy=policy)


def _layout(step: js.train.TrainStep, state: js.TrainState, batch: np.ndarray) -> Layout:
    with noted_buffers() as notes:
        step.traced_by_phase(state, batch)
    return tuple((note.leaves, note.size_bytes) for note in notes)


def make_rows(
    layouts: Mapping[int, Layout], seconds: Mapping[int, Sequence[float]]
) -> list[dict[str, Any]]:
    """Return a row per limit, from the rounds in which all limits were measured.

    Args:
      layouts: maps a limit to the layout of its buckets.
      seconds: maps a measured limit to its seconds per step, one value per round.

    Returns:
      Dicts with `limit` (bytes), `bucket_sizes` (bytes, in order), `same_as` (an earlier limit with
      the same buckets, which was measured instead; else None), `seconds` (of a step, a value per
      round), their `median` and `quartiles`, and `ratio` (median over the rounds of the time
      divided by that of one bucket per gradient).
    """
    rounds, rows = min(map(len, seconds.values())), []
    for limit, layout in layouts.items():
        source = next(other for other in seconds if layouts[other] == layout)
        times = seconds[source][:rounds]
        row = {
            "limit": limit,
            "bucket_sizes": [size for _, size in layout],
            "same_as": None if source == limit else source,
            "seconds": times,
            "median": statistics.median(times),
            "quartiles": np.quantile(times, [0.25, 0.75]).tolist(),
            "ratio": statistics.median(np.divide(times, seconds[0][:rounds]).tolist()),
        }
        rows.append(row)
    return rows


def best_limit(rows: Sequence[Mapping[str, Any]]) -> int:
    """Return the largest limit that is as fast as the fastest median, within noise.

    A limit is as fast if it is no slower than the fastest in at least a quarter of the rounds.
    Rounds are compared one by one, since the machine may slow a whole round.
    """
    fastest = min(rows, key=lambda row: row["median"])["seconds"]
    measured = [row for row in rows if row["same_as"] is None]
    return max(
        row["limit"]
        for row in measured
        if np.quantile(np.divide(row["seconds"], fastest), 0.25) <= 1
    )


def _limit(limit: int) -> str:
    """Return a bucket limit in bytes as users write it: per leaf (0), 1.5 MiB, 4,000 B."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if limit >= size and limit * 100 % size == 0:
            return f"{limit / size:g} {unit}"
    return f"{limit:,} B" if limit else "per leaf"


def _table(rows: Sequence[Mapping[str, Any]], best: int) -> Table:
    def cells(row: Mapping[str, Any]) -> dict[str, str]:
        source = row["same_as"]
        median, low, high = (f"{1e3 * x:.2f}" for x in (row["median"], *row["quartiles"]))
        return {
            "limit": _limit(row["limit"]) + (" (best)" if row["limit"] == best else ""),
            "buckets": str(len(row["bucket_sizes"])),
            "largest": format_bytes(max(row["bucket_sizes"])),
            "ms": median if source is None else "",
            "quartiles": f"{low} - {high}" if source is None else f"as {_limit(source)}",
            "ratio": f"{row['ratio']:.3f}" if source is None else "",
        }

    caption = (
        "ms: median step, and quartiles over the rounds; ratio: to one bucket per gradient, round "
        "by round"
    )
    return table_of(map(cells, rows), caption=caption)


def draw_limits(rows: Sequence[Mapping[str, Any]], best: int, path: Path, *, subtitle: str) -> None:
    """Draw the time of a step by limit: every round, quartiles and median.

    Args:
      rows: rows of `make_rows`; those that were measured are shown in this order.
      best: limit to mark.
      path: path of the PNG.
      subtitle: description of the measurement.
    """
    what = "Lines: medians; boxes: quartiles; dots: rounds, from left to right."
    figure = new_figure((8.5, 4.8), "Step time by size of gradient buckets", subtitle, what)
    axes = figure.subplots()
    rows = [row for row in rows if row["same_as"] is None]
    times = [1e3 * np.array(row["seconds"]) for row in rows]
    names = [
        f"{_limit(row['limit'])}\n{len(row['bucket_sizes'])} buckets\n{1e3 * row['median']:.3g} ms"
        for row in rows
    ]
    boxes = axes.boxplot(
        times,
        widths=0.6,
        showcaps=False,
        whis=0,
        showfliers=False,
        tick_labels=names,
        medianprops={"linewidth": 2.2},
    )
    for x, row in enumerate(rows):
        colour = COLOURS["vermilion" if row["limit"] == best else "blue"]
        boxes["medians"][x].set_color(colour)
        # Rounds are drawn from left to right, so that a drift of the machine is visible.
        spread = np.linspace(x + 0.8, x + 1.2, len(times[x]))
        axes.plot(spread, times[x], "o", color=colour, alpha=0.3, markersize=4)
    axes.set(xlabel="bucket limit", ylabel="ms per training step")
    # Limits around the quartiles, so that a disturbed round does not flatten the rest.
    low, high = min(row["quartiles"][0] for row in rows), max(row["quartiles"][1] for row in rows)
    margin = max(high - low, 0.1 * high)
    axes.set_ylim(1e3 * max(low - margin, 0), 1e3 * (high + margin))
    clean(axes, grid="y")
    save_figure(figure, path)
