"""`jaxslowmo tune buckets`: the measurement of bucket limits, its table and its picture."""

import dataclasses
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table

import jaxslowmo as js
from jaxslowmo.models import gpt_loss_fn, gpt_preset, init_gpt, num_parameters
from jaxslowmo.tree import noted_buffers

from ._errors import INTERRUPTED, usage_errors
from ._figures import COLOURS, clean, new_figure, save_figure
from ._output import format_bytes, format_count, format_limit, numbers_table, say, write_json
from .config._commands import TuneBucketsConfig
from .processes._peers import StopOnSignal
from .run._division import RunDevices, choose_mesh
from .run._recipes import build_algorithm, policy_of
from .run._run_folder import make_folder


@dataclasses.dataclass(frozen=True)
class Row:
    """The results for one limit.

    Attributes:
      limit: bucket limit in bytes.
      bucket_sizes: sizes of the resulting buckets in bytes, in order.
      same_as: an earlier limit with the same buckets, which was measured instead; else None.
      seconds: seconds of a step, one value per round.
      median: median of `seconds`.
      quartiles: lower and upper quartile of `seconds`.
      ratio: median over the rounds of the time divided by that of one bucket per gradient.
    """

    limit: int
    bucket_sizes: tuple[int, ...]
    same_as: int | None
    seconds: tuple[float, ...]
    median: float
    quartiles: tuple[float, float]
    ratio: float


def tune_buckets(config: TuneBucketsConfig) -> int:
    """Measure every limit, then write a table, a figure and tune.json.

    After Ctrl-C they show the rounds that have finished.

    Raises:
      CommandError: the options do not fit each other or the devices.
    """
    console = Console()
    with usage_errors():
        placement = choose_mesh(config.train)
        bench = Bench(config, placement)
    folder = make_folder(config.out, "tune")
    size = f"{format_count(bench.num_parameters)} parameters"
    subject = f"{config.train.preset}: {size}, {placement.description}"
    say(console, subject)
    with StopOnSignal() as stop, Progress(console=console, transient=True) as progress:
        seconds = bench.measure(progress, stop)
    rounds = min(map(len, seconds.values()))
    if not rounds:
        return INTERRUPTED
    rows = make_rows(bench.buckets, seconds)
    best = best_limit(rows)
    result = {
        "config": config,
        "placement": placement.description,
        "best": {"bucket_bytes": best, "first_bucket_bytes": config.first_of(best)},
        "rows": rows,
    }
    write_json(folder / "tune.json", result)
    about = f"{subject}; {rounds} rounds of {config.steps} steps, order {config.order}"
    measured = [row for row in rows if row.same_as is None]
    draw_limits(measured, best, folder / "tune.png", subtitle=about)
    console.print(rows_table(rows, best))
    say(console, _advice(config, best), str(folder / "tune.png"))
    return INTERRUPTED if stop.reason else 0


class Bench:
    """A training step per limit; all steps use the same state, so that they can take turns.

    Attributes:
      num_parameters: number of parameters of the model.
      buckets: maps a limit to its layout: leaf names and bytes of each bucket.

    Raises:
      ValueError: the library refuses an argument.
    """

    def __init__(self, config: TuneBucketsConfig, placement: RunDevices):
        train = self._train = config.train
        self._config = config
        model = gpt_preset(train.preset, dtype=train.dtype, attention=train.attention)
        self.num_parameters = num_parameters(model)
        axes = ("replica", "device") if train.devices_per_replica > 1 else "replica"
        loss_fn, algorithm = gpt_loss_fn(model), build_algorithm(train)
        self._steps = {
            limit: dataclasses.replace(
                algorithm,
                gradients=js.all_reduce_gradients(
                    axes,
                    bucket_bytes=limit,
                    first_bucket_bytes=config.first_of(limit),
                    order=None if config.order == "ready" else config.order,
                ),
            ).make_step(loss_fn, train, mesh=placement.mesh, policy=policy_of(train))
            for limit in config.candidates
        }
        step = self._steps[0]
        self._state = step.init(init_gpt(model, train.seed), seed=train.seed)
        shape = (train.replicas * train.batch, model.context_length + 1)
        self._batch = np.random.default_rng(train.seed).integers(0, 256, shape, np.uint8)
        self.buckets = {limit: self._layout(step) for limit, step in self._steps.items()}

    def _layout(self, step: js.train.TrainStep) -> tuple[tuple[tuple[str, ...], int], ...]:
        with noted_buffers() as notes:
            step.traced_by_phase(self._state, self._batch)
        return tuple((note.leaves, note.size_bytes) for note in notes)

    def measure(self, progress: Progress, stop: StopOnSignal) -> dict[int, list[float]]:
        """Return seconds of a step by limit, one per round; limits with equal buckets are one."""
        same = {buckets: limit for limit, buckets in reversed(self.buckets.items())}
        limits = sorted(same.values())
        seconds: dict[int, list[float]] = {limit: [] for limit in limits}
        rounds = 1 + self._config.rounds
        task = progress.add_task("compiling", total=len(limits) * rounds)
        for number in range(rounds):
            for limit in limits:
                # Round 0 is not recorded: its first step compiles, its second one fills caches.
                took = self._timed(limit, self._config.steps if number else 2)
                seconds[limit] += [took] * (number > 0)
                progress.advance(task)
                if stop.reason:
                    return seconds
            progress.update(task, description="measuring")
        return seconds

    def _timed(self, limit: int, steps: int) -> float:
        step = self._steps[limit]
        began = time.perf_counter()
        for _ in range(steps):
            self._state, _ = step(self._state, self._batch)
        jax.block_until_ready(self._state)
        return (time.perf_counter() - began) / steps


def make_rows(
    buckets: dict[int, tuple[tuple[tuple[str, ...], int], ...]], seconds: dict[int, list[float]]
) -> list[Row]:
    """Return a row per limit, from the rounds in which all limits were measured.

    Args:
      buckets: maps a limit to its layout.
      seconds: maps a measured limit to its seconds per step, one value per round.
    """
    rounds, rows = min(map(len, seconds.values())), []
    for limit, layout in buckets.items():
        source = next(other for other in seconds if buckets[other] == layout)
        times = tuple(seconds[source][:rounds])
        ratio = statistics.median(a / b for a, b in zip(times, seconds[0], strict=False))
        sizes, same = tuple(size for _, size in layout), None if source == limit else source
        middle = statistics.median(times), _quartiles(times)
        rows.append(Row(limit, sizes, same, times, *middle, ratio))
    return rows


def best_limit(rows: Sequence[Row]) -> int:
    """Return the largest limit that is as fast as the fastest median, within noise.

    A limit is as fast if it is no slower than the fastest in at least a quarter of the rounds.
    Rounds are compared one by one, since the machine may slow a whole round.
    """
    fastest = min(rows, key=lambda row: row.median)

    def is_as_fast(row: Row) -> bool:
        ratios = [a / b for a, b in zip(row.seconds, fastest.seconds, strict=True)]
        return _quartiles(ratios)[0] <= 1

    return max(row.limit for row in rows if row.same_as is None and is_as_fast(row))


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    low, high = np.quantile(values, [0.25, 0.75])
    return float(low), float(high)


def rows_table(rows: Sequence[Row], best: int) -> Table:
    """Return a table of the rows."""

    def cells(row: Row) -> list[str]:
        name = format_limit(row.limit) + (" (best)" if row.limit == best else "")
        sizes = (str(len(row.bucket_sizes)), format_bytes(max(row.bucket_sizes)))
        if row.same_as is not None:
            return [name, *sizes, "", f"as {format_limit(row.same_as)}", ""]
        median, low, high = (f"{1e3 * value:.2f}" for value in (row.median, *row.quartiles))
        return [name, *sizes, median, f"{low} - {high}", f"{row.ratio:.3f}"]

    caption = (
        "ms: median step, and quartiles over the rounds; ratio: to one bucket per gradient, round "
        "by round"
    )
    names = ("buckets", "largest", "ms", "quartiles", "ratio")
    return numbers_table(Column("limit", no_wrap=True), names, map(cells, rows), caption=caption)


def _advice(config: TuneBucketsConfig, best: int) -> str:
    axes = '("replica", "device")' if config.train.devices_per_replica > 1 else '"replica"'
    order = "" if config.order == "ready" else f', order="{config.order}"'
    return (
        f"Best: js.all_reduce_gradients({axes}, bucket_bytes={best}, "
        f"first_bucket_bytes={config.first_of(best)}{order})"
    )


def draw_limits(rows: Sequence[Row], best: int, path: Path, *, subtitle: str) -> None:
    """Draw the time of a step by limit: every round, quartiles and median.

    Args:
      rows: results, in the order of the axis.
      best: limit to mark.
      path: path of the PNG.
      subtitle: description of the measurement.
    """
    what = "Lines: medians; bars: quartiles; dots: rounds, from left to right."
    figure = new_figure((8.5, 4.8), "Step time by size of gradient buckets", subtitle, what)
    axes = figure.subplots()
    for x, row in enumerate(rows):
        colour = COLOURS["vermilion" if row.limit == best else "blue"]
        times, median = 1e3 * np.array(row.seconds), 1e3 * row.median
        # Rounds are drawn from left to right, so that a drift of the machine is visible.
        spread = np.linspace(x - 0.2, x + 0.2, len(times))
        axes.plot(spread, times, "o", color=colour, alpha=0.3, markersize=4, markeredgewidth=0)
        low, high = (1e3 * t for t in row.quartiles)
        axes.vlines(x, low, high, color=colour, linewidth=7, alpha=0.35)
        axes.hlines(median, x - 0.3, x + 0.3, color=colour, linewidth=2.2, zorder=3)
        axes.text(x + 0.33, median, f"{median:.3g} ms", va="center", size=9.5, color=colour)
    names = [f"{format_limit(row.limit)}\n{len(row.bucket_sizes)} buckets" for row in rows]
    axes.set_xticks(range(len(rows)), names)
    axes.set(xlim=(-0.5, len(rows) - 0.25), xlabel="bucket limit", ylabel="ms per training step")
    # Limits around the quartiles, so that a disturbed round does not flatten the rest.
    low, high = min(row.quartiles[0] for row in rows), max(row.quartiles[1] for row in rows)
    margin = max(high - low, 0.1 * high)
    axes.set_ylim(1e3 * max(low - margin, 0), 1e3 * (high + margin))
    clean(axes, grid="y")
    save_figure(figure, path)
