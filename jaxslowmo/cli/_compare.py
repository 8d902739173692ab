"""`jaxslowmo compare`."""

from pathlib import Path
from typing import Any

from rich.console import Console

from jaxslowmo.data import read_corpus

from ._errors import EXIT_CODES, usage_errors
from ._output import say, write_json
from ._tables import compare_rows, compare_table
from ._units import format_count
from .config._compare import CompareConfig
from .figures._comparison import draw_comparison
from .run._devices import Placement, choose_mesh
from .run._job import Job, RunResult
from .run._leftovers import refuse_leftovers, sweep
from .run._opening import locked_folder
from .run._recipes import describe_exchanges
from .run._text import divide_text
from .run.records._progress import Reporter


def compare(config: CompareConfig, out: Path | None) -> int:
    """Trains every algorithm with every seed, then writes a table and a figure.

    Each run has its own folder in `out`, beside config.json, compare.json and compare.png. Ctrl-C
    ends it with what was finished.

    Raises:
      CommandError: for arguments that do not go together, or with the data, the devices or the
        folder.
    """
    console = Console()
    with locked_folder(out, "compare") as (folder, _):
        if not config.train.overwrite:
            refuse_leftovers(folder, may_resume=False)
        jobs = _jobs(config)
        if config.train.overwrite:
            sweep(folder)
        write_json(folder / "config.json", config)
        return _compare_in(folder, config, jobs, console)


def _jobs(config: CompareConfig) -> dict[str, Job]:
    """All before the first step: a wrong argument of the last one should not wait for it."""
    with usage_errors():
        text = divide_text(config.train, read_corpus(config.train.data))
        placement = choose_mesh(config.train)
        return {
            name: Job(config.run(name, config.seeds[0]), placement, text, label=name)
            for name in config.algorithms
        }


def _compare_in(folder: Path, config: CompareConfig, jobs: dict[str, Job], console: Console) -> int:
    first = next(iter(jobs.values()))
    placement, size = first.placement, format_count(first.num_parameters)
    say(console, f"{size} parameters, {placement.description}", first.text.description)
    # Else the first one's programs would stay as long as all of them.
    del first

    runs: list[RunResult] = []
    for name in config.algorithms:
        # Popped: its programs are freed before the next one compiles.
        runs += _run_seeds(jobs.pop(name), name, config, folder, console)
        if runs[-1].was_stopped:
            break
    _write_results(config, placement, size, runs, folder, console)
    statuses = {run.status for run in runs}
    worst = next((s for s in ("interrupted", "diverged", "preempted") if s in statuses), "finished")
    return EXIT_CODES[worst]


def _run_seeds(
    job: Job, name: str, config: CompareConfig, folder: Path, console: Console
) -> list[RunResult]:
    runs: list[RunResult] = []
    for seed in config.seeds:
        label = name if len(config.seeds) == 1 else f"{name}, seed {seed}"
        steps, would = config.train.steps, job.placement.is_virtual
        with Reporter(console, label, steps, would=would) as reporter:
            # Some file systems have no colons in names.
            out = folder / f"{name.replace(':', '-')}-seed{seed}"
            runs.append(job.run(config.run(name, seed), out, reporter))
        if runs[-1].was_stopped:
            break
    return runs


def _write_results(
    config: CompareConfig,
    placement: Placement,
    size: str,
    runs: list[RunResult],
    folder: Path,
    console: Console,
) -> None:
    rows = compare_rows([run.summary for run in runs])
    write_json(folder / "compare.json", {"rows": rows, "runs": [run.summary for run in runs]})
    histories: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in config.algorithms}
    for run in runs:
        if run.status == "finished":
            histories[run.summary["algorithm"]].append(run.records)
    picture = folder / "compare.png"
    draw_comparison(
        histories,
        picture,
        title="Loss against steps, and against bytes on the wire",
        subtitle=_describe(config, placement, size),
        would=placement.is_virtual,
    )
    console.print(compare_table(rows, would=placement.is_virtual))
    say(console, str(picture))


def _describe(config: CompareConfig, placement: Placement, size: str) -> str:
    train, seeds = config.train, len(config.seeds)
    exchanges = describe_exchanges(config.base_algorithms, train.algorithm)
    parts = [
        f"byte-level GPT, {size} parameters",
        placement.description,
        f"{train.steps} steps",
        *([", ".join(exchanges)] if exchanges else []),
        f"{seeds} seeds (mean, least to largest)" if seeds > 1 else f"seed {config.seeds[0]}",
    ]
    return "  ·  ".join(parts)
