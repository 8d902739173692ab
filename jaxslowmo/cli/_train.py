"""`jaxslowmo train`: one training run, in one process or as one of several."""

import contextlib
import dataclasses
from typing import Any

import jax
import numpy as np
from rich.console import Console

from jaxslowmo.data import read_corpus
from jaxslowmo.models import num_parameters

from ._agreement import clear_folder, open_run
from ._config import TrainConfig, argument_errors
from ._errors import EXIT_CODES
from ._folder import RunFolder
from ._processes import ALONE, Cluster, is_one_of_several, known_processes
from ._record import (
    Reporter,
    facts_table,
    format_bytes,
    format_count,
    format_loss,
    print_lines,
    report_collectives,
    run_table,
)
from ._run import Job, RunResult
from ._setup import Model, Text, choose_devices, join_islands, make_step, set_cpu_devices
from ._watch import Watch, join_cluster, propagate_failures


def train(config: TrainConfig) -> int:
    """Train once, show the progress and a summary, and return the exit code.

    Raises:
      CommandError: the options do not fit each other, the data, the devices or the other processes.
    """
    if not is_one_of_several(config.cluster):
        return _train(config, ALONE)
    assert config.run.out is not None  # checked by the parent
    set_cpu_devices(config, known_processes(config.cluster))
    cluster, saved = join_cluster(config.cluster), RunFolder(config.run.out).describe_checkpoint
    watch = Watch(cluster.index, cluster.count, config.cluster.stall_timeout, saved)
    with propagate_failures(watch):
        return _train(config, dataclasses.replace(cluster, watch=watch))


def _train(config: TrainConfig, cluster: Cluster) -> int:
    with contextlib.ExitStack() as stack:
        with argument_errors():
            devices = choose_devices(config, cluster)
            model, corpus = Model(config, devices.mesh), read_corpus(config.data.data)
            text = Text(config, corpus, devices.mesh)
            folder, config = stack.enter_context(open_run(config, corpus.fingerprint, cluster))
            del corpus  # it may be large, and `text` is what this process needs of it
            island = join_islands(config)
            job = Job(config, devices, model, text, cluster=cluster, island=island)
        if config.run.overwrite:  # only now: a wrong call should delete nothing
            clear_folder(config, folder, cluster)
        console = Console(quiet=not cluster.is_first)
        if config.cluster.process_logs and not cluster.is_first:
            path = folder / "logs" / f"process-{cluster.index}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            log = stack.enter_context(path.open("a", encoding="utf-8", buffering=1))
            console = Console(file=log)
        name, size = job.label, format_count(job.num_parameters)
        print_lines(console, f"{name}, {size} parameters, {devices.description}", text.description)
        reporter = Reporter(console, name, config.run.steps, would=devices.is_virtual)
        result = job.run(config, folder, reporter, saves=True)
        if island is not None and cluster.is_first:
            print_lines(console, f"Island {island.name}: {island.report()}")
        if cluster.is_first:
            from ._figures import draw_loss  # loads matplotlib

            draw_loss(result.records, result.summary, folder / "loss.png")
        _conclude(console, result, folder)
    return EXIT_CODES[result.status]


def _conclude(console: Console, result: RunResult, folder: RunFolder) -> None:
    console.print(run_table(result.summary))
    summary = result.summary
    if result.statistics:
        print_lines(console, str(result.statistics))
    if result.status == "diverged":
        advice = "lower --learning-rate or lengthen --warmup"
        print_lines(console, f"The loss is not finite at step {summary['steps']}: {advice}.")
    if summary["stopped_early"]:
        loss = format_loss(summary["best_validation_loss"])
        best = f"the smallest validation loss, {loss}, was that of step {summary['best_step']}"
        print_lines(
            console, f"Stopped early: {best}. A resumed run with a larger patience goes on."
        )
    if result.got_signal and result.saved is not None:
        print_lines(console, f"Saved at step {result.saved}; --resume goes on from there.")
    print_lines(console, f"Results in {folder.path}")


def dry_run(config: TrainConfig) -> int:
    """Print the placement of a run and the collectives of its steps; return the exit code.

    Nothing is trained and no text is read: programs are traced for the available devices.

    Raises:
      CommandError: `train` would refuse the options, or there are too few devices.
    """
    console = Console()
    with argument_errors():
        devices = choose_devices(config)
        model = Model(config, devices.mesh)
        step = make_step(config, model.loss_fn, devices.mesh)
        state = step.init(model.init(config.data.seed), seed=config.data.seed)

    def on_a_device(tree: Any) -> str:
        leaves = jax.tree.leaves(tree)
        if devices.is_virtual:
            return format_bytes(sum(x.nbytes for x in leaves) // config.mesh.num_replicas)
        return format_bytes(sum(x.addressable_shards[0].data.nbytes for x in leaves))

    facts = {
        "devices": devices.description,
        "parameters": format_count(num_parameters(model.config)),
        "parameters on a device": on_a_device(state.params),
        "optimizer on a device": on_a_device(state.opt_state),
        "algorithm on a device": on_a_device(state.exchange),
        "windows of a replica in a step": str(config.data.batch),
    }
    if model.schedule is not None and model.parts is not None:
        schedule, executor = model.schedule, config.mesh.executor
        timed = schedule.simulate(lockstep=executor == "one_program")
        stages = [
            " and ".join(f"{start} to {end - 1}" for start, end in ranges) for ranges in model.parts
        ]
        facts |= {
            "microbatches": str(schedule.num_microbatches),
            "layers of each stage": "; ".join(stages),
            "schedule": schedule.name,
            "executor": executor,
            "bubble, equal costs": f"{timed.bubble:.1%}",
            "microbatches that a stage holds": ", ".join(map(str, schedule.stash)),
        }
    console.print(facts_table(facts, title=config.algorithm.algorithm))
    rows = config.mesh.num_replicas * config.data.batch
    batch = np.zeros((rows, model.config.context_length + 1), np.uint8)
    print_lines(console, "What a step sends, as bytes that go into each collective on one device:")
    print_lines(console, str(report_collectives(step, state, batch)))
    return 0
