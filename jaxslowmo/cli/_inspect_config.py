"""`jaxslowmo inspect config`: the devices and memory of a run, and what it would send."""

import math
from typing import Any

import jax
import numpy as np
from rich.console import Console

import jaxslowmo as js

from ._errors import usage_errors
from ._output import facts_table, format_bytes, format_count, say
from .config._commands import InspectConfigConfig
from .config._training import TrainConfig
from .run._division import RunDevices, Text, choose_mesh
from .run._job import Job
from .run._recipes import Form, form_of, parts_of, schedule_of
from .run._recorder import emitted

_NOTHING = Text((), (), np.zeros((0, 0, 0), np.uint8), "", "")


def inspect_config(command: InspectConfigConfig) -> int:
    """Print the placement of a run and the collectives of its steps; return the exit code.

    Nothing is trained and no text is read: programs are traced for the available devices.

    Raises:
      CommandError: `train` would refuse the options, or there are too few devices.
    """
    config, console = command.train, Console()
    with usage_errors():
        form = form_of(config)
        placement = choose_mesh(config)
        job = Job(config, placement, _NOTHING)
    state = job.step.init(form.init(config.seed, placement.mesh))
    facts = _facts(config, form, placement, job, state)
    console.print(facts_table(facts, title=config.algorithm.algorithm))
    batch = np.zeros((config.replicas * config.batch, form.config.context_length + 1), np.uint8)
    say(console, "What a step sends, as bytes that go into each collective on one device:")
    report = emitted(job.step, state, batch)
    console.print(str(report), highlight=False, soft_wrap=True, markup=False)
    return 0


def _facts(
    config: TrainConfig, form: Form, placement: RunDevices, job: Job, state: js.TrainState
) -> dict[str, str]:
    facts = {
        "devices": placement.description,
        "parameters": format_count(job.num_parameters),
        "parameters on a device": format_bytes(_on_a_device(state.params, placement, config)),
        "optimizer and algorithm on a device": format_bytes(
            _on_a_device(state.opt_state, placement, config)
        ),
        "windows of a replica in a step": str(config.batch),
    }
    if form.layout is None:
        return facts
    schedule, executor = schedule_of(config), config.mesh.executor
    timed = schedule.simulate(lockstep=executor == "one_program")
    stages = [
        " and ".join(f"{start} to {end - 1}" for start, end in ranges)
        for ranges in parts_of(config, schedule)
    ]
    return facts | {
        "microbatches": str(schedule.num_microbatches),
        "layers of each stage": "; ".join(stages),
        "schedule": schedule.name,
        "executor": executor,
        "bubble, equal costs": f"{timed.bubble:.1%}",
        "microbatches that a stage holds": ", ".join(map(str, schedule.stash)),
    }


def _on_a_device(tree: Any, placement: RunDevices, config: TrainConfig) -> int:
    """Return the bytes of arrays on the first device, or of one virtual replica."""
    leaves = jax.tree.leaves(tree)
    if placement.is_virtual:
        return sum(x.nbytes for x in leaves) // config.replicas
    shards = [x.addressable_shards[0].data for x in leaves]
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in shards)
