"""`jaxslowmo inspect config`: the devices and memory of a run, and what it would send."""

from typing import Any

import jax
import numpy as np
from rich.console import Console

from ._errors import usage_errors
from ._output import facts_table, format_bytes, format_count, say
from .config._commands import InspectConfigConfig
from .config._training import TrainConfig
from .run._division import RunDevices, Text, choose_mesh
from .run._job import Job
from .run._recipes import form_of, parts_of, schedule_of
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
    optimizer = _on_a_device(state.opt_state, placement, config)
    facts = {
        "devices": placement.description,
        "parameters": format_count(job.num_parameters),
        "parameters on a device": format_bytes(_on_a_device(state.params, placement, config)),
        "optimizer and algorithm on a device": format_bytes(optimizer),
        "windows of a replica in a step": str(config.batch),
    }
    if form.layout is not None:
        schedule, executor = schedule_of(config), config.executor
        timed = schedule.simulate(lockstep=executor == "one_program")
        stages = [
            " and ".join(f"{start} to {end - 1}" for start, end in ranges)
            for ranges in parts_of(config, schedule)
        ]
        facts |= {
            "microbatches": str(schedule.num_microbatches),
            "layers of each stage": "; ".join(stages),
            "schedule": schedule.name,
            "executor": executor,
            "bubble, equal costs": f"{timed.bubble:.1%}",
            "microbatches that a stage holds": ", ".join(map(str, schedule.stash)),
        }
    console.print(facts_table(facts, title=config.algorithm))
    batch = np.zeros((config.replicas * config.batch, form.config.context_length + 1), np.uint8)
    report = emitted(job.step, state, batch)
    say(console, "What a step sends, as bytes that go into each collective on one device:")
    console.print(str(report), highlight=False, soft_wrap=True, markup=False)
    return 0


def _on_a_device(tree: Any, placement: RunDevices, config: TrainConfig) -> int:
    """Return the bytes of arrays on the first device, or of one virtual replica."""
    leaves = jax.tree.leaves(tree)
    if placement.is_virtual:
        return sum(x.nbytes for x in leaves) // config.replicas
    return sum(x.addressable_shards[0].data.nbytes for x in leaves)
