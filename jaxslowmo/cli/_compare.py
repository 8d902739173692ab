"""`jaxslowmo compare`: several runs, a table of their results, and a picture."""

import dataclasses
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter
from rich.console import Console

from jaxslowmo.data import read_corpus

from ._errors import EXIT_CODES, usage_errors
from ._figures import COLOURS, INK, LineStyle, clean, draw_line, new_figure, save_figure
from ._output import (
    Reporter,
    compare_rows,
    compare_table,
    format_bytes,
    format_count,
    say,
    write_json,
)
from .config._commands import CompareConfig
from .run._division import choose_mesh, divide_text
from .run._job import Job, RunResult
from .run._recipes import RECIPES, describe_exchanges
from .run._run_folder import RunFolder, locked_folder


def compare(config: CompareConfig) -> int:
    """Train every algorithm with every seed, then write a table and a figure.

    Each run has its own folder in `config.out`, next to config.json, compare.json and compare.png.
    After Ctrl-C the table and the figure show the runs that have finished.

    Raises:
      CommandError: the options do not fit each other, the data, the devices or the folder.
    """
    console = Console()
    with locked_folder(config.out, "compare") as folder:
        if not config.train.overwrite:
            folder.refuse_leftovers(may_resume=False)
        jobs = _jobs(config)
        if config.train.overwrite:
            folder.sweep()
        write_json(folder.config, dataclasses.replace(config, config=None, out=None))
        return _compare_in(folder, config, jobs, console)


def _jobs(config: CompareConfig) -> dict[str, Job]:
    """Return all jobs, made before the first step, so that a wrong setting fails at once."""
    with usage_errors():
        text = divide_text(config.train, read_corpus(config.train.data))
        placement = choose_mesh(config.train)
        return {
            name: Job(config.run(name, config.seeds[0]), placement, text, label=name)
            for name in config.algorithms
        }


def _compare_in(
    folder: RunFolder, config: CompareConfig, jobs: dict[str, Job], console: Console
) -> int:
    first = next(iter(jobs.values()))
    placement, size = first.placement, format_count(first.num_parameters)
    say(console, f"{size} parameters, {placement.description}", first.text.description)
    # Without this the programs of the first job would stay in memory until the end.
    del first

    runs: list[RunResult] = []
    for name in config.algorithms:
        # `pop`, so that the programs of a job are freed before the next one compiles.
        runs += _run_seeds(jobs.pop(name), name, config, folder, console)
        if runs[-1].was_stopped:
            break
    about = [f"byte-level GPT, {size} parameters", placement.description, *_describe(config)]
    _write_results(config, "  ·  ".join(about), placement.is_virtual, runs, folder, console)
    statuses = {run.status for run in runs}
    worst = next((s for s in ("interrupted", "diverged", "preempted") if s in statuses), "finished")
    return EXIT_CODES[worst]


def _run_seeds(
    job: Job, name: str, config: CompareConfig, folder: RunFolder, console: Console
) -> list[RunResult]:
    runs: list[RunResult] = []
    for seed in config.seeds:
        label = name if len(config.seeds) == 1 else f"{name}, seed {seed}"
        steps, would = config.train.steps, job.placement.is_virtual
        with Reporter(console, label, steps, would=would) as reporter:
            # Some file systems do not allow colons in names.
            out = RunFolder(folder.path / f"{name.replace(':', '-')}-seed{seed}")
            runs.append(job.run(config.run(name, seed), out, reporter))
        if runs[-1].was_stopped:
            break
    return runs


def _write_results(
    config: CompareConfig,
    about: str,
    would: bool,
    runs: list[RunResult],
    folder: RunFolder,
    console: Console,
) -> None:
    rows = compare_rows([run.summary for run in runs])
    write_json(folder.comparison, {"rows": rows, "runs": [run.summary for run in runs]})
    histories: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in config.algorithms}
    for run in runs:
        if run.status == "finished":
            histories[run.summary["algorithm"]].append(run.records)
    draw_comparison(histories, folder.picture, subtitle=about, would=would)
    console.print(compare_table(rows, would=would))
    say(console, *meaning(rows), str(folder.picture))


def meaning(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return in one sentence what rare communication costs; none where no row sends little.

    Args:
      rows: rows of `compare_rows`; the first is what the others are compared with.
    """
    trained = [row for row in rows if row["validation_loss"] is not None and row["ratio"]]
    rare = [row for row in trained[1:] if row["ratio"] < _RARE]
    if not rare:
        return []
    first, best = trained[0], min(rare, key=lambda row: row["validation_loss"])
    lead = best["validation_loss"] - first["validation_loss"]
    where = f"{abs(lead):.3f} {'above' if lead > 0 else 'below'} {first['algorithm']}"
    sentence = f"With 1/{1 / best['ratio']:.0f} of the bytes {best['algorithm']} ends {where}"
    name = best["algorithm"].partition("+")[0]
    plain = [row for row in rare if row["algorithm"].partition("+")[0] == "local_sgd"]
    alike = [row for row in plain if abs(row["ratio"] / best["ratio"] - 1) < _EQUAL]
    gap = alike[0]["validation_loss"] - first["validation_loss"] if alike else 0
    if name != "local_sgd" and gap > 0:
        sentence += (
            f"; it closes {100 * (1 - lead / gap):.0f} % of the gap that plain averages "
            f"(local_sgd) leave with as many bytes"
        )
    return [f"{sentence}."]


def _describe(config: CompareConfig) -> list[str]:
    train, seeds = config.train, len(config.seeds)
    exchanges = describe_exchanges(config.base_algorithms, train.algorithm)
    return [
        f"{train.steps} steps",
        *([", ".join(exchanges)] if exchanges else []),
        f"{seeds} seeds (mean, least to largest)" if seeds > 1 else f"seed {config.seeds[0]}",
    ]


_RARE = 0.5  # of the bytes of the first algorithm
_EQUAL = 0.05  # relative difference between bytes that count as equal
# The same algorithm with other settings has the same colour, and the next of these line styles.
_LINES = ("-", "--", ":", "-.")


def draw_comparison(
    histories: Mapping[str, Sequence[Sequence[dict[str, Any]]]],
    path: Path,
    *,
    subtitle: str,
    would: bool = False,
) -> None:
    """Draw validation loss against steps, and against bytes on a logarithmic axis.

    Args:
      histories: maps an algorithm to the records of each seed's run (`Recorder`). The picture shows
        those with a `validation_loss`: their mean over seeds, and a band from least to largest.
      path: path of the PNG.
      subtitle: description of the runs, in smaller letters.
      would: whether the bytes are only what the runs would send (virtual replicas).
    """
    title = "Loss against steps, and against bytes on the wire"
    figure = new_figure((11, 5), title, subtitle, wspace=0.06)
    by_steps, by_bytes = figure.subplots(1, 2, sharey=True)
    losses: list[float] = []
    most_steps, is_any_sent = 0, False
    styles = _styles(histories)
    for algorithm, runs in histories.items():
        points = _mean_over_seeds(runs)
        if points:
            # Axis limits leave out the first point, the loss of guessing, to show differences.
            for point in points[1:] or points:
                losses += [point["low"], point["high"]]
            most_steps = max(most_steps, points[-1]["step"])
            _draw(by_steps, algorithm, points, "step", styles[algorithm])
            # A logarithmic axis cannot show 0 bytes, before the first exchange.
            sending = [p for p in points if p["bytes_sent"] > 0]
            is_any_sent = is_any_sent or bool(sending)
            _draw(by_bytes, algorithm, sending, "bytes_sent", styles[algorithm])
    verb = "that a replica would send" if would else "sent by each replica"
    by_bytes.set(xlabel=f"bytes {verb} (log scale)")
    if is_any_sent:  # matplotlib refuses a logarithmic axis without data
        by_bytes.set_xscale("log")
        by_bytes.xaxis.set_major_formatter(FuncFormatter(_label))
        by_bytes.xaxis.set_minor_formatter(FuncFormatter(_minor_label))
    loss = "validation loss of the consensus model\n(nats per byte)"
    by_steps.set(xlim=(0, 1.02 * max(most_steps, 1)), xlabel="optimizer steps", ylabel=loss)
    if losses:
        margin = 0.06 * max(max(losses) - min(losses), 0.1)
        by_steps.set_ylim(min(losses) - margin, max(losses) + margin)
        by_steps.legend(frameon=False, labelcolor=INK, loc="upper right")
    for axes in (by_steps, by_bytes):
        clean(axes)
    save_figure(figure, path)


def _mean_over_seeds(runs: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return a point for each step that every run evaluated."""
    by_step = [
        {record["step"]: record for record in run if record.get("validation_loss") is not None}
        for run in runs
    ]
    if not by_step:
        return []
    steps = sorted(set.intersection(*(set(run) for run in by_step)))
    points = []
    for step in steps:
        records = [run[step] for run in by_step]
        losses = [record["validation_loss"] for record in records]
        points.append(
            {
                "step": step,
                "bytes_sent": statistics.fmean(record["bytes_sent"] for record in records),
                "mean": statistics.fmean(losses),
                "low": min(losses),
                "high": max(losses),
            }
        )
    return points


def _styles(algorithms: Iterable[str]) -> dict[str, LineStyle]:
    """Return the style of each algorithm; those that differ only in settings differ in the line."""
    seen: Counter[str] = Counter()
    styles: dict[str, LineStyle] = {}
    for algorithm in algorithms:
        name = algorithm.partition("+")[0]
        recipe, line = RECIPES[name], _LINES[seen[name] % len(_LINES)]
        seen[name] += 1
        look = {"color": COLOURS[recipe.colour], "marker": recipe.marker}
        styles[algorithm] = look | {"linestyle": line}
    return styles


def _draw(
    axes: Axes, algorithm: str, points: list[dict[str, Any]], x: str, style: LineStyle
) -> None:
    xs = [point[x] for point in points]
    last = points[-1] if points else None
    label = (
        f"{algorithm}: {last['mean']:.3f} for {format_bytes(last['bytes_sent'])}" if last else ""
    )
    low, high, mean = ([point[name] for point in points] for name in ("low", "high", "mean"))
    axes.fill_between(xs, low, high, color=style["color"], alpha=0.15, linewidth=0)
    draw_line(axes, xs, mean, style, label=label)


def _label(count: float, _: int = 0) -> str:
    number, unit = format_bytes(count).split()
    return f"{float(number):g} {unit}"


def _minor_label(count: float, _: int) -> str:
    return _label(count) if f"{count:.0e}"[0] in "25" else ""
