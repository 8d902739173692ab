"""`jaxslowmo train`: one training run, in one process or as one of several."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from rich.console import Console

from jaxslowmo.data import Contents, read_corpus

from ._errors import EXIT_CODES, CommandError, usage_errors
from ._output import Reporter, format_count, format_loss, run_table, say
from .config._training import TrainConfig
from .processes._peers import ALONE, Cluster, is_one_of_several, known_processes
from .processes._watch import Watch, failing_together, join_cluster
from .run._agreement import agreed, clear, resumed_config
from .run._division import ask_for_devices, choose_mesh, divide_text
from .run._job import Job, RunResult
from .run._model import form_of
from .run._run_folder import RunFolder, locked_folder


def train(config: TrainConfig, out: Path | None) -> int:
    """Train once, show the progress and a summary, and return the exit code.

    Raises:
      CommandError: the options do not fit each other, the data, the devices or the other processes.
    """
    if not is_one_of_several(config.cluster):
        return _train(config, out, ALONE)
    if out is None:
        raise CommandError("--out must be given where there are several processes: they share it")
    ask_for_devices(config, known_processes(config.cluster))
    cluster = join_cluster(config.cluster)
    last_saved = RunFolder(out).last_saved
    watch = Watch(cluster.index, cluster.count, config.cluster.stall_timeout, last_saved)
    with failing_together(watch):
        return _train(config, out, dataclasses.replace(cluster, watch=watch))


def _train(config: TrainConfig, out: Path | None, cluster: Cluster) -> int:
    with contextlib.ExitStack() as stack:
        folder, config, job = _prepared(config, out, cluster, stack)
        if config.overwrite:  # only now: a wrong call should delete nothing
            clear(folder, config, cluster)
        logs = config.cluster.process_logs
        console = Console(file=stack.enter_context(_output_of(cluster, folder, logs=logs)))
        name, where = config.algorithm.algorithm, job.placement
        size = format_count(job.num_parameters)
        say(console, f"{name}, {size} parameters, {where.description}", job.text.description)
        with Reporter(console, name, config.steps, would=where.is_virtual) as reporter:
            result = job.run(config, folder, reporter, saves=True)
        _conclude(console, result, folder)
    return EXIT_CODES[result.status]


def _prepared(
    config: TrainConfig, out: Path | None, cluster: Cluster, stack: contextlib.ExitStack
) -> tuple[RunFolder, TrainConfig, Job]:
    """Return folder, options and programs of a run; the folder is locked until the stack ends."""
    with usage_errors():
        form_of(config)  # raises for wrong sizes, before a folder is made
        corpus = read_corpus(config.data)
    folder, config = stack.enter_context(opened(config, out, corpus.contents, cluster))
    with usage_errors():
        placement = choose_mesh(config, cluster)
        text = divide_text(config, corpus, placement.mesh)
        return folder, config, Job(config, placement, text, cluster=cluster)


@contextlib.contextmanager
def opened(
    config: TrainConfig, out: Path | None, corpus: Contents, cluster: Cluster
) -> Iterator[tuple[RunFolder, TrainConfig]]:
    """Run the block while the folder belongs to this run, and all processes have agreed.

    Args:
      config: configuration from the command line.
      out: folder of the run.
      corpus: listing of the text that this process reads; the texts themselves can be freed.
      cluster: the processes.

    Yields:
      The folder, and the configuration that all processes use.

    Raises:
      CommandError: another run uses the folder or has left files in it; the run to resume had other
        options or another text; or see `agreed`.

    Communication: that of `agreed`, with several processes.
    """
    if not cluster.is_first:
        assert out is not None  # `train` checks this for several processes
        folder = RunFolder(out)
        yield folder, agreed(config, config, folder, corpus, cluster)
        return
    with locked_folder(out, "train") as folder:
        requested, resumes = config, config.checkpoint.resume
        if not config.overwrite:
            folder.refuse_leftovers(may_resume=True, resumes=resumes)
        if resumes:
            with usage_errors():
                config = resumed_config(config, folder, corpus)
        folder.keep_listing(corpus)
        if cluster.count > 1:
            agreed(requested, config, folder, corpus, cluster)
        yield folder, config


def _conclude(console: Console, result: RunResult, folder: RunFolder) -> None:
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
    say(console, f"Results in {folder.path}")


@contextlib.contextmanager
def _output_of(cluster: Cluster, folder: RunFolder, *, logs: bool) -> Iterator[TextIO | None]:
    """Yield the file for the output of a process: None (the terminal) for the first, else a log."""
    if cluster.is_first:
        yield None
        return
    path = Path(os.devnull)
    if logs:
        path = folder.logs / f"process-{cluster.index}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8", buffering=1) as file:
        yield file
