"""`jaxslowmo tune outer`: settings of slow steps, each with several seeds; a table, a picture."""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.axes import Axes
from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table

import jaxslowmo as js
from jaxslowmo.data import TextBatches, read_corpus
from jaxslowmo.models import gpt_loss_fn, init_gpt, num_parameters

from ._errors import INTERRUPTED, usage_errors
from ._figures import COLOURS, clean, new_figure, save_figure
from ._output import format_count, format_loss, numbers_table, say, write_json
from .config._commands import TuneOuterConfig
from .config._training import TrainConfig
from .processes._peers import StopOnSignal
from .run._division import Text, choose_mesh, divide_text
from .run._recipes import build_setting, config_of
from .run._run_folder import make_folder

_MOST_ROWS = 20  # of the table; tune.json has all


@dataclasses.dataclass(frozen=True)
class Row:
    """The results of one setting.

    Attributes:
      period: steps between slow steps.
      factor: multiple of the learning rate.
      rate: slow learning rate, or that of the outer optimizer.
      momentum: slow momentum, or that of the outer optimizer.
      losses: validation losses of the consensus in nats per byte, one per seed.
      plain: losses of plain averages with the same period, at the factor that suits them best.
    """

    period: int
    factor: float
    rate: float
    momentum: float
    losses: tuple[float, ...]
    plain: tuple[float, ...] = ()

    @property
    def mean(self) -> float:
        """Return the mean loss; infinite if one is not finite."""
        mean = statistics.mean(self.losses)
        return mean if np.isfinite(mean) else float("inf")

    @property
    def is_plain(self) -> bool:
        """Return whether the slow step is a plain average."""
        return (self.rate, self.momentum) == (1, 0)

    @property
    def better(self) -> int:
        """Return the number of seeds with a smaller loss than that of plain averages."""
        return sum(a < b for a, b in zip(self.losses, self.plain, strict=True))


def tune_outer(config: TuneOuterConfig) -> int:
    """Train every setting with every seed, then write a table, a picture and tune.json.

    After Ctrl-C they show the periods that have finished, else the first one's last evaluation.

    Raises:
      CommandError: the options do not fit each other or the data.
    """
    console, train = Console(), config.train
    with usage_errors():
        placement = choose_mesh(train)
        text = divide_text(train, read_corpus(train.data))
        trials = [Trial(config, text, period) for period in config.periods]
    folder = make_folder(config.out, "tune")
    count = len(config.settings()["rate"]) * len(config.seeds)
    size = f"{format_count(num_parameters(config_of(train)))} parameters"
    subject = f"{train.preset}: {size}, {placement.description}"
    what = f"{count} runs of {train.steps} steps for each of {len(trials)} periods"
    say(console, subject, text.description, what)
    rows, done = [], 0
    with StopOnSignal() as stop, Progress(console=console, transient=True) as progress:
        for trial in trials:
            results, count = trial.run(progress, stop)
            # Losses of a period that was stopped early do not compare with those of a whole one.
            if not rows or count == train.steps:
                rows, done = rows + results, count
            if stop.reason:
                break
    if not rows:
        return INTERRUPTED
    rows.sort(key=lambda row: row.mean)
    facts = [dataclasses.asdict(row) | {"mean": row.mean} for row in rows]
    result = {"config": config, "data": text.description, "steps_done": done, "rows": facts}
    write_json(folder / "tune.json", result)
    about = f"{subject}; {train.algorithm.algorithm}, {done} steps"
    draw_settings(rows, folder / "tune.png", subtitle=about)
    console.print(rows_table(rows))
    if stop.reason:
        say(console, f"Stopped: these are losses after {done} of {train.steps} steps.")
    say(console, *advice(config, rows), str(folder / "tune.png"))
    return INTERRUPTED if stop.reason else 0


class Trial:
    """All settings and seeds with one period.

    Raises:
      ValueError: the library refuses an argument.
    """

    def __init__(self, config: TuneOuterConfig, text: Text, period: int):
        algorithm = dataclasses.replace(config.train.algorithm, slow_every=period)
        train = self._train = dataclasses.replace(config.train, algorithm=algorithm)
        self._config, self._text, self._period = config, text, period
        self._model = config_of(train)
        self._loss_fn = gpt_loss_fn(self._model)
        self._sweep = js.Sweep(
            loss_fn=self._loss_fn,
            make=lambda setting: build_setting(train, setting),
            settings=config.settings(),
            replicas=train.replicas,
            # Seeds side by side: more would not fit into the caches of a CPU.
            at_once=1,
        )

    def run(self, progress: Progress, stop: StopOnSignal) -> tuple[list[Row], int]:
        """Train, and return the results with the number of steps that they are of."""
        train = self._train
        each = min(train.eval_every, train.steps)
        task = progress.add_task(f"every {self._period}", total=train.steps)
        models = [init_gpt(self._model, seed) for seed in self._config.seeds]
        state = self._sweep.init(jax.tree.map(lambda *x: np.stack(x), *models))
        losses: np.ndarray | None = None
        while state.count < train.steps and not stop.reason:
            steps = range(state.count, min(state.count + each, train.steps))
            state, _ = self._sweep.run(state, self._batches(steps))
            losses = self._evaluate(self._sweep.consensus(state))
            progress.update(task, completed=state.count)
        return ([] if losses is None else self._rows(losses)), state.count

    def _batches(self, steps: range) -> np.ndarray:
        """Return windows of shape (seeds, steps, replicas, batch, context_length + 1)."""
        train, window = self._train, self._model.context_length + 1
        of_seeds = []
        for seed in self._config.seeds:
            text = TextBatches(self._text.shares, batch_size=train.batch, window=window, seed=seed)
            of_seeds.append([text.batch(index) for index in steps])
        shape = len(of_seeds), len(steps), train.replicas, train.batch, window
        return np.array(of_seeds).reshape(shape)

    def _evaluate(self, models: Any) -> np.ndarray:
        """Return the validation losses: (settings, seeds)."""
        return np.mean([np.asarray(self._losses(models, x)) for x in self._text.validation], axis=0)

    @functools.cached_property
    def _losses(self) -> Callable[..., jax.Array]:
        of_seeds = jax.vmap(self._loss_fn, (0, None))
        return jax.jit(lambda models, x: jax.lax.map(lambda model: of_seeds(model, x), models))

    def _rows(self, losses: np.ndarray) -> list[Row]:
        columns = self._config.settings()
        settings = zip(columns["factor"], columns["rate"], columns["momentum"], losses, strict=True)
        rows = [
            Row(self._period, factor, rate, momentum, tuple(map(float, of_seeds)))
            for factor, rate, momentum, of_seeds in settings
        ]
        plain = min((row for row in rows if row.is_plain), key=lambda row: row.mean)
        return [dataclasses.replace(row, plain=plain.losses) for row in rows]


def rows_table(rows: Sequence[Row]) -> Table:
    """Return a table of the settings, from the smallest loss on."""

    def cells(row: Row) -> list[str]:
        better = "plain average" if row.is_plain else f"{row.better} of {len(row.losses)}"
        numbers = [f"{x:g}" for x in (row.period, row.factor, row.rate, row.momentum)]
        losses = map(format_loss, (row.mean, min(row.losses), max(row.losses)))
        return [*numbers, *losses, better]

    shown = [row for row in rows[:_MOST_ROWS] if not row.is_plain]
    shown += [row for row in rows if row.is_plain]
    caption = (
        "loss: mean over the seeds, in nats per byte, and the smallest and largest; better: seeds "
        "with a smaller loss than plain averages, with the same period"
    )
    names = ("factor", "rate", "momentum", "loss", "from", "to", "better")
    in_order = map(cells, sorted(shown, key=lambda row: row.mean))
    return numbers_table(Column("period", no_wrap=True), names, in_order, caption=caption)


def advice(config: TuneOuterConfig, rows: Sequence[Row]) -> list[str]:
    """Return the best setting of each period in words, and whether it beats plain averages."""
    sentences = []
    for period in config.periods:
        of_period = [row for row in rows if row.period == period]
        if not of_period:
            continue
        best = min(of_period, key=lambda row: row.mean)
        count, plain = len(best.losses), f"{statistics.mean(best.plain):.3f}"
        if best.is_plain or best.better <= count / 2:
            sentences.append(f"Every {period}: no setting beats plain averages, {plain}.")
            continue
        edge = _at_edge(config, best)
        sentences.append(
            f"Every {period}: {_call(config.train, best)} has a loss of {best.mean:.3f}, plain "
            f"averages {plain}; it is smaller with {best.better} of {count} seeds."
            + (f" At the end of what was tried: {edge}; try more." if edge else "")
        )
    return sentences


def _at_edge(config: TuneOuterConfig, row: Row) -> str:
    """Return the options whose best value is the first or last of several, in words."""
    tried = (
        ("--momenta", row.momentum, config.momenta),
        ("--rates", row.rate, config.rates),
        ("--factors", row.factor, config.factors),
    )
    return ", ".join(
        f"{flag} {value:g}"
        for flag, value, values in tried
        if len(values) > 1 and value in (min(values), max(values))
    )


def _call(train: TrainConfig, row: Row) -> str:
    rate = f"{row.factor * train.optimizer.learning_rate:g}"
    if train.algorithm.algorithm == "diloco":
        outer = f"optax.sgd({row.rate:g}, momentum={row.momentum:g}, nesterov=True)"
        arguments = f"outer_optimizer={outer}"
    else:
        arguments = f"momentum={row.momentum:g}, slow_learning_rate={row.rate:g}"
    name = train.algorithm.algorithm.partition("_")[0]
    return f"js.{name}(..., {arguments}) at a learning rate of {rate}"


def draw_settings(rows: Sequence[Row], path: Path, *, subtitle: str) -> None:
    """Draw the loss against the momentum: a panel per period, a line per rate and factor.

    Args:
      rows: results of all settings.
      path: path of the PNG.
      subtitle: description of what was trained.
    """
    periods = sorted({row.period for row in rows})
    what = "Points: means over seeds; bars: smallest and largest. Dashed: plain averages."
    size = (3.2 + 4.2 * len(periods), 4.6)
    figure = new_figure(size, "Validation loss by slow momentum", subtitle, what)
    panels = figure.subplots(1, len(periods), sharey=True, squeeze=False)[0]
    for axes, period in zip(panels, periods, strict=True):
        _draw_period(axes, [row for row in rows if row.period == period])
        axes.set_title(f"every {period} steps", size=10, loc="left")
        axes.set_xlabel("momentum")
    panels[0].set_ylabel("validation loss, nats per byte")
    lines, labels = panels[0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside right upper", fontsize=9, frameon=False)
    save_figure(figure, path)


def _draw_period(axes: Axes, rows: Sequence[Row]) -> None:
    colours = [value for name, value in COLOURS.items() if name not in ("black", "grey")]
    tried = [row for row in rows if not row.is_plain]
    lines = sorted({(row.factor, row.rate) for row in tried})
    for number, (factor, rate) in enumerate(lines):
        line = [row for row in tried if (row.factor, row.rate) == (factor, rate)]
        line.sort(key=lambda row: row.momentum)
        # Points of one momentum stand beside each other.
        xs = [row.momentum + 0.012 * (number - (len(lines) - 1) / 2) for row in line]
        means = np.array([row.mean for row in line])
        bars = np.abs(np.array([(min(row.losses), max(row.losses)) for row in line]).T - means)
        look: Any = {"color": colours[number % len(colours)], "marker": "o", "capsize": 2}
        axes.errorbar(xs, means, bars, label=f"rate {rate:g},\nfactor {factor:g}", **look)
    plain = statistics.mean(rows[0].plain)
    axes.axhline(plain, color=COLOURS["black"], linewidth=1, linestyle="--", zorder=1)
    clean(axes, grid="y")
