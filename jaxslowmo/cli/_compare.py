"""`jaxslowmo compare`: several runs, a table of their results, and a picture."""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import EngFormatter
from rich.console import Console
from rich.table import Table

from jaxslowmo.data import read_corpus

from ._errors import EXIT_CODES, usage_errors
from ._figures import COLOURS, INK, clean, draw_line, new_figure, save_figure
from ._output import Reporter, format_bytes, format_count, format_loss, say, table_of, write_json
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
    console, train, seeds = Console(), config.train, config.seeds
    with locked_folder(config.out, "compare") as folder:
        if not train.overwrite:
            folder.refuse_leftovers(may_resume=False)
        with usage_errors():
            text, placement = divide_text(train, read_corpus(train.data)), choose_mesh(train)
            # All are made before the first step, so that a wrong setting fails at once.
            jobs = {
                name: Job(config.run(name, seeds[0]), placement, text, label=name)
                for name in config.algorithms
            }
        if train.overwrite:
            folder.sweep()
        own = {"algorithms": config.algorithms, "seeds": config.seeds}
        write_json(folder.config, config.train.to_file() | own)
        size = f"{format_count(next(iter(jobs.values())).num_parameters)} parameters"
        say(console, f"{size}, {placement.description}", text.description)
        runs = _train_all(config, jobs, folder, console)
        rows, would = compare_rows([run.summary for run in runs]), placement.is_virtual
        write_json(folder.comparison, {"rows": rows, "runs": [run.summary for run in runs]})
        about = [
            *(f"byte-level GPT, {size}", placement.description, f"{train.steps} steps"),
            ", ".join(describe_exchanges(config.base_algorithms, train)),
            f"{len(seeds)} seeds (mean, least to largest)" if seeds[1:] else f"seed {seeds[0]}",
        ]
        subtitle = "  ·  ".join(filter(None, about))
        done = [run for run in runs if run.status == "finished"]
        histories = {
            name: [run.records for run in done if run.summary["algorithm"] == name]
            for name in config.algorithms
        }
        draw_comparison(histories, folder.picture, subtitle=subtitle, would=would)
        console.print(_table(rows, would=would))
        say(console, *meaning(rows), str(folder.picture))
    statuses = {run.status for run in runs}
    worst = next((s for s in ("interrupted", "diverged", "preempted") if s in statuses), "finished")
    return EXIT_CODES[worst]


def _train_all(
    config: CompareConfig, jobs: dict[str, Job], folder: RunFolder, console: Console
) -> list[RunResult]:
    """Return the results of all runs, or of those until a signal."""
    runs: list[RunResult] = []
    for name in config.algorithms:
        # `pop`, so that the programs of a job are freed before the next one compiles.
        job = jobs.pop(name)
        for seed in config.seeds:
            label = f"{name}, seed {seed}" if config.seeds[1:] else name
            # Some file systems do not allow colons in names.
            out = RunFolder(folder.path / f"{name.replace(':', '-')}-seed{seed}")
            would = job.placement.is_virtual
            with Reporter(console, label, config.train.steps, would=would) as reporter:
                runs.append(job.run(config.run(name, seed), out, reporter))
            if runs[-1].was_stopped:
                return runs
    return runs


def compare_rows(summaries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per algorithm, in the order of first appearance.

    Returns:
      Dicts with `algorithm`, `seeds`, `validation_loss` (mean over the seeds that finished, None
      without any), `spread` (largest minus smallest, None below two), `bytes_sent` (mean), `ratio`
      (to the first row's bytes), `tokens_per_second` (mean), `diverged` (number of seeds).
    """
    rows: list[dict[str, Any]] = []
    for algorithm in dict.fromkeys(run["algorithm"] for run in summaries):
        runs = [run for run in summaries if run["algorithm"] == algorithm]
        done = [run for run in runs if run["status"] == "finished"]
        losses = [run["validation_loss"] for run in done]
        sent = _mean(run["bytes_sent"] for run in done)
        first = rows[0]["bytes_sent"] if rows else sent
        row = {
            "algorithm": algorithm,
            "seeds": [run["seed"] for run in done],
            "validation_loss": _mean(losses),
            "spread": max(losses) - min(losses) if len(losses) > 1 else None,
            "bytes_sent": sent,
            "ratio": sent / first if sent is not None and first else None,
            "tokens_per_second": _mean(run["tokens_per_second"] for run in done),
            "diverged": sum(run["status"] == "diverged" for run in runs),
        }
        rows.append(row)
    return rows


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _table(rows: Sequence[dict[str, Any]], *, would: bool) -> Table:
    def cells(row: dict[str, Any]) -> dict[str, str]:
        diverged = f" ({row['diverged']} diverged)" if row["diverged"] else ""
        return {
            "algorithm": row["algorithm"],
            "validation": format_loss(row["validation_loss"]) + diverged,
            "spread": format_loss(row["spread"]),
            "bytes": format_bytes(row["bytes_sent"]),
            f"of {first}": "-" if row["ratio"] is None else f"{100 * row['ratio']:.3g} %",
            "tokens/s": format_count(row["tokens_per_second"]),
        }

    first = rows[0]["algorithm"]
    sent = "that a replica would send" if would else "sent per replica"
    caption = f"validation loss: nats per byte, consensus model; bytes {sent}"
    return table_of(map(cells, rows), caption=caption)


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
    sentence = (
        f"With 1/{1 / best['ratio']:.0f} of the bytes {best['algorithm']} ends {abs(lead):.3f} "
        f"{'above' if lead > 0 else 'below'} {first['algorithm']}"
    )
    plain = [row for row in rare if row["algorithm"].partition("+")[0] == "local_sgd"]
    equal = [row for row in plain if abs(row["ratio"] / best["ratio"] - 1) < _EQUAL]
    gap = equal[0]["validation_loss"] - first["validation_loss"] if equal else 0
    if gap > 0 and best not in plain:
        sentence += (
            f"; it closes {100 * (1 - lead / gap):.0f} % of the gap that plain averages "
            "(local_sgd) leave with as many bytes"
        )
    return [f"{sentence}."]


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
        those with a `validation_loss`, but for that before the first step: their mean over seeds,
        and a band from least to largest.
      path: path of the PNG.
      subtitle: description of the runs, in smaller letters.
      would: whether the bytes are only what the runs would send (virtual replicas).
    """
    title = "Loss against steps, and against bytes on the wire"
    figure = new_figure((11, 5), title, subtitle, wspace=0.06)
    by_steps, by_bytes = figure.subplots(1, 2, sharey=True)
    seen: Counter[str] = Counter()
    for algorithm, runs in histories.items():
        name = algorithm.partition("+")[0]
        colour, line = COLOURS[RECIPES[name].colour], _LINES[seen[name] % len(_LINES)]
        look = {"color": colour, "marker": RECIPES[name].marker, "linestyle": line}
        seen[name] += 1
        if not runs:
            continue
        steps, sent, losses = _over_seeds(runs)
        label = f"{algorithm}: {losses[-1].mean():.3f} for {format_bytes(sent[-1])}"
        # A logarithmic axis cannot show 0 bytes, before the first exchange.
        for axes, xs, is_in in ((by_steps, steps, steps > 0), (by_bytes, sent, sent > 0)):
            xs, ys = xs[is_in], losses[is_in]
            axes.fill_between(xs, ys.min(1), ys.max(1), color=colour, alpha=0.15, linewidth=0)
            draw_line(axes, xs, ys.mean(1), look, label=label)
    verb = "that a replica would send" if would else "sent by each replica"
    by_bytes.set(xlabel=f"bytes {verb} (log scale)", xscale="log")
    unit = EngFormatter("B")
    by_bytes.xaxis.set_major_formatter(unit)
    by_bytes.xaxis.set_minor_formatter(lambda x, _: unit(x) if f"{x:.0e}"[0] in "25" else "")
    by_steps.set(
        xlabel="optimizer steps",
        ylabel="validation loss of the consensus model\n(nats per byte)",
    )
    by_steps.set_xlim(left=0)
    if by_steps.lines:
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
    steps = sorted(set.intersection(*map(set, by_step)))
    sent, losses = (
        np.array([[run[step][name] for run in by_step] for step in steps])
        for name in ("bytes_sent", "validation_loss")
    )
    return np.array(steps), sent.mean(1), losses
