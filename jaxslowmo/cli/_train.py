"""`jaxslowmo train`: one training run, in one process or as one of several."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

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
from .run._recipes import form_of, join_islands
from .run._run_folder import RunFolder, locked_folder


def train(config: TrainConfig, out: Path | None) -> int:
    """Train once, show the progress and a summary, and return the exit code.

    Raises:
      CommandError: the options do not fit each other, the data, the devices or the other processes.
    """
    if not is_one_of_several(config):
        return _train(config, out, ALONE)
    if out is None:
        raise CommandError("--out must be given where there are several processes: they share it")
    ask_for_devices(config, known_processes(config))
    cluster = join_cluster(config)
    last_saved = RunFolder(out).last_saved
    watch = Watch(cluster.index, cluster.count, config.stall_timeout, last_saved)
    with failing_together(watch):
        return _train(config, out, dataclasses.replace(cluster, watch=watch))


def _train(config: TrainConfig, out: Path | None, cluster: Cluster) -> int:
    with contextlib.ExitStack() as stack:
        with usage_errors():
            form_of(config)  # raises for wrong sizes, before a folder is made
            corpus = read_corpus(config.data)
            folder, config = stack.enter_context(opened(config, out, corpus.contents, cluster))
            placement = choose_mesh(config, cluster)
            text = divide_text(config, corpus, placement.mesh)
            del corpus  # it may be large, and `text` is what this process needs of it
            island = join_islands(config)
            job = Job(config, placement, text, cluster=cluster, island=island)
        if config.overwrite:  # only now: a wrong call should delete nothing
            clear(folder, config, cluster)
        console = Console(quiet=not cluster.is_first)
        if config.process_logs and not cluster.is_first:
            path = folder.logs / f"process-{cluster.index}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            log = stack.enter_context(path.open("a", encoding="utf-8", buffering=1))
            console = Console(file=log)
        name, size = config.algorithm, format_count(job.num_parameters)
        say(console, f"{name}, {size} parameters, {placement.description}", text.description)
        with Reporter(console, name, config.steps, would=placement.is_virtual) as reporter:
            result = job.run(config, folder, reporter, saves=True)
        if island is not None and cluster.is_first:
            say(console, f"Island {island.name}: {island.report()}")
        _conclude(console, result, folder)
    return EXIT_CODES[result.status]


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
        requested, resumes = config, config.resume
        if not config.overwrite:
            folder.refuse_leftovers(may_resume=True, resumes=resumes)
        if resumes:
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
