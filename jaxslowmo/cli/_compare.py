"""`jaxslowmo compare`: several runs, a table of their results, and a picture."""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import EngFormatter
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
        own = {"algorithms": config.algorithms, "seeds": config.seeds}
        write_json(folder.config, config.train.to_file() | own)
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
    placement, size = first.placement, f"{format_count(first.num_parameters)} parameters"
    say(console, f"{size}, {placement.description}", first.text.description)
    # Without this the programs of the first job would stay in memory until the end.
    del first

    runs: list[RunResult] = []
    for name in config.algorithms:
        # `pop`, so that the programs of a job are freed before the next one compiles.
        runs += _run_seeds(jobs.pop(name), name, config, folder, console)
        if runs[-1].was_stopped:
            break
    about = "  ·  ".join([f"byte-level GPT, {size}", placement.description, *_describe(config)])
    would = placement.is_virtual
    rows = compare_rows([run.summary for run in runs])
    write_json(folder.comparison, {"rows": rows, "runs": [run.summary for run in runs]})
    histories: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in config.algorithms}
    for run in runs:
        if run.status == "finished":
            histories[run.summary["algorithm"]].append(run.records)
    draw_comparison(histories, folder.picture, subtitle=about, would=would)
    console.print(compare_table(rows, would=would))
    say(console, *meaning(rows), str(folder.picture))
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
    gaps = [
        row["validation_loss"] - first["validation_loss"]
        for row in rare
        if row["algorithm"].partition("+")[0] == "local_sgd"
        and abs(row["ratio"] / best["ratio"] - 1) < _EQUAL
    ]
    if gaps and gaps[0] > 0 and best["algorithm"].partition("+")[0] != "local_sgd":
        share = 100 * (1 - lead / gaps[0])
        sentence += (
            f"; it closes {share:.0f} % of the gap that plain averages (local_sgd) leave with as "
            "many bytes"
        )
    return [f"{sentence}."]


def _describe(config: CompareConfig) -> list[str]:
    train, seeds = config.train, len(config.seeds)
    exchanges = describe_exchanges(config.base_algorithms, train)
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
    styles, shown = _styles(histories), []
    for algorithm, runs in histories.items():
        steps, sent, losses = _over_seeds(runs)
        if not len(steps):
            continue
        label = f"{algorithm}: {losses[-1].mean():.3f} for {format_bytes(sent[-1])}"
        # A logarithmic axis cannot show 0 bytes, before the first exchange.
        for axes, xs, is_in in ((by_steps, steps, steps >= 0), (by_bytes, sent, sent > 0)):
            xs, ys, look = xs[is_in], losses[is_in], styles[algorithm]
            axes.fill_between(xs, ys.min(1), ys.max(1), color=look["color"], alpha=0.15, lw=0)
            draw_line(axes, xs, ys.mean(1), look, label=label)
        # Axis limits leave out the first point, the loss of guessing, to show differences.
        shown.append(losses[1:] if len(losses) > 1 else losses)
    verb = "that a replica would send" if would else "sent by each replica"
    by_bytes.set(xlabel=f"bytes {verb} (log scale)")
    if any(len(line.get_xdata()) for line in by_bytes.lines):  # else matplotlib refuses the scale
        unit = EngFormatter("B")
        by_bytes.set_xscale("log")
        by_bytes.xaxis.set_major_formatter(unit)
        by_bytes.xaxis.set_minor_formatter(lambda x, _: unit(x) if f"{x:.0e}"[0] in "25" else "")
    loss = "validation loss of the consensus model\n(nats per byte)"
    by_steps.set(xlabel="optimizer steps", ylabel=loss)
    if shown:
        low, high = (limit(map(limit, map(np.ravel, shown))) for limit in (min, max))
        margin = 0.06 * max(high - low, 0.1)
        by_steps.set_xlim(left=0)
        by_steps.set_ylim(low - margin, high + margin)
        by_steps.legend(frameon=False, labelcolor=INK, loc="upper right")
    for axes in (by_steps, by_bytes):
        clean(axes)
    save_figure(figure, path)


def _over_seeds(runs: Sequence[Sequence[dict[str, Any]]]) -> tuple[np.ndarray, ...]:
    """Return the steps that every run evaluated, mean bytes, and losses: (steps, seeds)."""
    by_step = [
        {record["step"]: record for record in run if record.get("validation_loss") is not None}
        for run in runs
    ]
    steps = sorted(set.intersection(*map(set, by_step))) if by_step else []
    sent = [statistics.fmean(run[step]["bytes_sent"] for run in by_step) for step in steps]
    losses = [[run[step]["validation_loss"] for run in by_step] for step in steps]
    return np.array(steps), np.array(sent), np.array(losses)


def _styles(algorithms: Iterable[str]) -> dict[str, LineStyle]:
    """Return the style of each algorithm; those that differ only in settings differ in the line."""
    seen: Counter[str] = Counter()
    styles: dict[str, LineStyle] = {}
    for algorithm in algorithms:
        name = algorithm.partition("+")[0]
        recipe, line = RECIPES[name], _LINES[seen[name] % len(_LINES)]
        seen[name] += 1
        look = {"color": COLOURS[recipe.colour], "marker": recipe.marker, "linestyle": line}
        styles[algorithm] = look
    return styles
