"""`jaxslowmo train`."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from rich.console import Console

from jaxslowmo.data import read_corpus

from ._errors import EXIT_CODES, CommandError, usage_errors
from ._output import say
from ._tables import run_table
from ._units import format_count, format_loss
from .config._train import TrainConfig
from .processes._join import join_cluster
from .processes._launchers import ALONE, Cluster, is_one_of_several, known_processes
from .processes._peers import failing_together
from .processes._restarts import last_saved
from .processes._watch import Watch
from .run._devices import ask_for_devices, choose_mesh
from .run._job import Job, RunResult
from .run._model import form_of
from .run._opening import Opening, opened
from .run._text import divide_text
from .run.records._progress import Reporter


def train(config: TrainConfig, out: Path | None) -> int:
    """Trains once, shows the progress and a summary, and returns the exit code.

    Raises:
      CommandError: for arguments that do not go together, or with the data, the devices or the
        other processes.
    """
    if not is_one_of_several(config.cluster):
        return _train(config, out, ALONE)
    if out is None:
        raise CommandError("--out must be given where there are several processes: they share it")
    ask_for_devices(config, known_processes(config.cluster))
    cluster = join_cluster(config.cluster)
    watch = Watch(
        cluster.index,
        cluster.count,
        config.cluster.stall_timeout,
        functools.partial(last_saved, out),
    )
    with failing_together(watch, config.cluster.heartbeat_timeout):
        return _train(config, out, dataclasses.replace(cluster, watch=watch))


def _train(config: TrainConfig, out: Path | None, cluster: Cluster) -> int:
    with contextlib.ExitStack() as stack:
        opening, job = _made_ready(config, out, cluster, stack)
        config, folder = opening.config, opening.folder
        # Not before: a wrong call should delete nothing.
        opening.begin()
        logs = config.cluster.process_logs
        console = Console(file=stack.enter_context(_output_of(cluster, folder, logs=logs)))
        name, where = config.algorithm.algorithm, job.placement
        size = format_count(job.num_parameters)
        say(console, f"{name}, {size} parameters, {where.description}", job.text.description)
        with Reporter(console, name, config.steps, would=where.is_virtual) as reporter:
            result = job.run(config, folder, reporter, saves=True)
        _conclude(console, result, folder)
    return EXIT_CODES[result.status]


def _made_ready(
    config: TrainConfig, out: Path | None, cluster: Cluster, stack: contextlib.ExitStack
) -> tuple[Opening, Job]:
    """The folder of the run, which stays its own until the stack ends, and its programs."""
    with usage_errors():
        form_of(config)  # only for its checks: what cannot be shared so leaves no folder
        corpus = read_corpus(config.data)
    opening = stack.enter_context(opened(config, out, corpus.contents, cluster))
    config = opening.config
    with usage_errors():
        placement = choose_mesh(config, cluster)
        text = divide_text(config, corpus, placement.mesh)
        return opening, Job(config, placement, text, cluster=cluster)


def _conclude(console: Console, result: RunResult, folder: Path) -> None:
    console.print(run_table(result.summary))
    if result.statistics:
        console.print(str(result.statistics), highlight=False, soft_wrap=True, markup=False)
    if result.status == "diverged":
        step = result.summary["steps"]
        advice = "lower --learning-rate or lengthen --warmup"
        say(console, f"The loss is not finite at step {step}: {advice}.")
    if result.summary["stopped_early"]:
        step = result.summary["best_step"]
        loss = format_loss(result.summary["best_validation_loss"])
        best = f"the smallest validation loss, {loss}, was that of step {step}"
        say(console, f"Stopped early: {best}. --resume with a larger --patience goes on.")
    if result.was_stopped and result.saved is not None:
        say(console, f"Saved at step {result.saved}; --resume goes on from there.")
    say(console, f"Results in {folder}")


@contextlib.contextmanager
def _output_of(cluster: Cluster, folder: Path, *, logs: bool) -> Iterator[TextIO | None]:
    """Where a process writes what it has to say: the first to the terminal, others to their log."""
    if cluster.is_first:
        yield None
        return
    path = Path(os.devnull)
    if logs:
        path = folder / "logs" / f"process-{cluster.index}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8", buffering=1) as file:
        yield file
