"""`jaxslowmo train`."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import jax
from rich.console import Console

from ._cluster import ALONE, Cluster, join_cluster
from ._config import TrainConfig
from ._devices import ask_for_devices, choose_mesh
from ._errors import CommandError, usage_errors
from ._launchers import is_one_of_several, known_processes
from ._output import make_folder
from ._progress import Reporter
from ._run import Job, RunResult
from ._supervise import LOST_A_PROCESS, PEER_FAILED
from ._tables import run_table
from ._text import load_text
from ._units import format_count

# Errors of the runtime that no other process can have caused: no memory left on a device, mostly.
_OWN = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNIMPLEMENTED")
EXIT_CODES = {"finished": 0, "preempted": 0, "diverged": 1, "interrupted": 130}


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
    with _peers_may_fail(config.cluster.heartbeat_timeout):
        return _train(config, out, cluster)


def _train(config: TrainConfig, out: Path | None, cluster: Cluster) -> int:
    with usage_errors():
        placement = choose_mesh(config, cluster)
        text = load_text(config, placement.mesh)
        job = Job(config, placement, text, cluster=cluster)
    folder = make_folder(out, "train")
    with _output_of(cluster, folder, logs=config.cluster.process_logs) as file:
        console = Console(file=file)
        name = config.algorithm.algorithm
        for line in (
            f"{name}, {format_count(job.num_parameters)} parameters, {placement.description}",
            text.description,
        ):
            _say(console, line)
        with Reporter(console, name, config.steps, would=placement.is_virtual) as reporter:
            result = job.run(config.seed, folder, reporter, saves=True)
        _conclude(console, result, folder)
    return EXIT_CODES[result.status]


def _conclude(console: Console, result: RunResult, folder: Path) -> None:
    console.print(run_table(result.summary))
    if result.statistics:
        console.print(str(result.statistics), highlight=False, soft_wrap=True, markup=False)
    if result.status == "diverged":
        step = result.summary["steps"]
        _say(
            console,
            f"The loss is not finite at step {step}: lower --learning-rate or lengthen --warmup.",
        )
    if result.was_stopped and result.saved is not None:
        _say(console, f"Saved at step {result.saved}; --resume goes on from there.")
    _say(console, f"Results in {folder}")


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, soft_wrap=True)


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


@contextlib.contextmanager
def _peers_may_fail(heartbeat_timeout: int) -> Iterator[None]:
    """A failed exchange waits for the runtime to find out, and abort with, who is gone.

    An exchange of the devices, or a meeting of the processes for a checkpoint, which then fails.
    """
    try:
        yield
    except Exception as error:
        if not lost_a_peer(error):
            raise
        os.write(2, f"{PEER_FAILED}: {error}\n".encode())
        time.sleep(heartbeat_timeout + 5)
        os._exit(LOST_A_PROCESS)


def lost_a_peer(error: BaseException | None) -> bool:
    """Whether a lost process may have caused an error, or one that led to it."""
    while error is not None:
        # jax raises a failed exchange as a ValueError, too, where it dispatches it from C++.
        of_runtime = isinstance(error, jax.errors.JaxRuntimeError) or "Gloo" in str(error)
        if of_runtime and not str(error).startswith(_OWN):
            return True
        error = error.__cause__ or error.__context__
    return False
