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

from .._support.checks import ArgumentError, warn_user
from .._support.files import write_atomic
from ._config import (
    AlgorithmConfig,
    CompareConfig,
    TrainConfig,
    argument_errors,
    option_types,
    parse_scalar,
    replace_options,
    to_file,
    unused_options,
)
from ._errors import EXIT_CODES
from ._figures import COLOURS, INK, clean, draw_line, new_figure, save_figure
from ._folder import RunFolder, lock_folder
from ._record import (
    Reporter,
    format_bytes,
    format_count,
    format_loss,
    print_lines,
    rows_table,
    to_json,
)
from ._run import Job, RunResult
from ._setup import LOOKS, Model, Text, choose_devices, describe_exchanges


def compare(config: CompareConfig) -> int:
    """Train every algorithm with every seed, then write a table and a figure.

    Each run has its own folder in OUT, next to config.json, compare.json and compare.png. After
    Ctrl-C the table and the figure show the runs that have finished.

    Raises:
      CommandError: the options do not fit each other, the data, the devices or the folder.
    """
    console, train, overwrite = Console(), config.train, config.run.overwrite
    names = config.algorithms.split(",")
    with lock_folder(config.run.out, "compare") as folder:
        if not overwrite:
            folder.check_no_earlier_run(resumes=None)
        with argument_errors():
            seeds = _seeds(config)
            configs = {name: algorithm_config(train, name) for name in names}
            devices = choose_devices(train)
            text = Text(train, read_corpus(train.data.data), devices.mesh)
            model = Model(train, devices.mesh)
            # All are made before the first step, so that a wrong setting fails at once.
            jobs = {name: Job(x, devices, model, text, name) for name, x in configs.items()}
        if overwrite:
            folder.delete_run_files()
        own = {"algorithms": config.algorithms, "seeds": ",".join(map(str, seeds))}
        write_atomic(folder / "config.json", to_json(to_file(train) | own, 2))
        size = f"{format_count(jobs[names[0]].num_parameters)} parameters"
        print_lines(console, f"{size}, {devices.description}", text.description)
        runs = _train_all(configs, jobs, seeds, folder, console)
        rows, would = compare_rows([run.summary for run in runs]), devices.is_virtual
        content = {"rows": rows, "runs": [run.summary for run in runs]}
        write_atomic(folder / "compare.json", to_json(content, 2))
        bases = {name.partition("+")[0] for name in names}
        about = [
            *(f"byte-level GPT, {size}", devices.description, f"{train.run.steps} steps"),
            ", ".join(describe_exchanges(bases, train.algorithm)),
            f"{len(seeds)} seeds (mean, least to largest)" if seeds[1:] else f"seed {seeds[0]}",
        ]
        subtitle = "  ·  ".join(filter(None, about))
        done = [run for run in runs if run.status == "finished"]
        histories = {
            name: [run.records for run in done if run.summary["algorithm"] == name]
            for name in names
        }
        draw_comparison(histories, folder / "compare.png", subtitle=subtitle, would=would)
        console.print(_table(rows, would=would))
        print_lines(console, str(folder / "compare.png"))
    statuses = {run.status for run in runs}
    worst = next((s for s in ("interrupted", "diverged", "preempted") if s in statuses), "finished")
    return EXIT_CODES[worst]


def _seeds(config: CompareConfig) -> list[int]:
    texts = [str(config.data.seed)] if config.seeds is None else config.seeds.split(",")
    if not all(text.isdecimal() for text in texts) or len({*texts}) < len(texts):
        rule = "must be different numbers, separated by commas"
        raise ArgumentError("seeds", f"`seeds` {rule}, got {config.seeds}.")
    return [int(text) for text in texts]


def algorithm_config(train: TrainConfig, algorithm: str) -> TrainConfig:
    """Return the configuration of an algorithm with settings, such as "sgp+overlap=1".

    Raises:
      ArgumentError: no such algorithm, or a setting is none of an algorithm, or has a wrong value.
    """
    name, *settings = algorithm.split("+")
    # Algorithms do best at different rates: rare exchanges at smaller ones.
    known, values = {*option_types(AlgorithmConfig), "learning_rate"}, {"algorithm": name}
    for setting in settings:
        key, _, value = setting.partition("=")
        key = key.replace("-", "_")
        if key not in known:
            rule = f"settings are name+SETTING=VALUE with {', '.join(sorted(known))}"
            raise ArgumentError("algorithms", f"{rule}; got {setting}.")
        values[key] = parse_scalar(value)
    try:
        config = replace_options(train, values)
    except ArgumentError as error:
        raise ArgumentError("algorithms", f"{algorithm}: {error}") from None
    for key in unused_options(config).keys() & values.keys():
        warn_user(f"--algorithms: {key} has no effect with {name}.")
    return config


def _train_all(
    configs: Mapping[str, TrainConfig],
    jobs: dict[str, Job],
    seeds: Sequence[int],
    folder: RunFolder,
    console: Console,
) -> list[RunResult]:
    """Return the results of all runs, or of those until a signal."""
    runs: list[RunResult] = []
    for name, config in configs.items():
        # `pop`, so that the programs of a job are freed before the next one compiles.
        job = jobs.pop(name)
        for seed in seeds:
            label = f"{name}, seed {seed}" if seeds[1:] else name
            # Some file systems do not allow colons in names.
            out = RunFolder(folder / f"{name.replace(':', '-')}-seed{seed}")
            would, own = job.devices.is_virtual, replace_options(config, {"seed": seed})
            reporter = Reporter(console, label, config.run.steps, would=would)
            runs.append(job.run(own, out, reporter))
            if runs[-1].got_signal:
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
            **({"spread": format_loss(row["spread"])} if has_spread else {}),
            "bytes": format_bytes(row["bytes_sent"]),
            f"of {first}": "-" if row["ratio"] is None else f"{100 * row['ratio']:.3g} %",
            "tokens/s": format_count(row["tokens_per_second"]),
        }

    first, has_spread = rows[0]["algorithm"], any(row["spread"] is not None for row in rows)
    sent = "that a replica would send" if would else "sent per replica"
    caption = f"validation loss: nats per byte, consensus model; bytes {sent}"
    return rows_table(map(cells, rows), caption=caption)


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
        colour, line = COLOURS[LOOKS[name].colour], _LINES[seen[name] % len(_LINES)]
        look = {"color": colour, "marker": LOOKS[name].marker, "linestyle": line}
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
