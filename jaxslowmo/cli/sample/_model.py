"""The model of a run: the consensus of a checkpoint, or what was exported."""

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxslowmo as js
from jaxslowmo.checkpoint import CheckpointError, Checkpoints, load_consensus
from jaxslowmo.models import (
    GPT_PRESETS,
    GPTConfig,
    gpt_loss_fn,
    gpt_preset,
    init_gpt,
    num_parameters,
)

from .._errors import CommandError
from ..processes._restarts import saved_steps
from ..run._model import Form, config_of
from ..run._moved import config_then, saved_form
from ..run._recipes import build_algorithm

# What the library says of a damaged checkpoint that is not the only one.
_OLDER = re.compile(r"`fallback=True` takes that of step (\d+)")


def find_model(run: Path, step: int | None) -> tuple[GPTConfig, Any]:
    """Shape and parameters of a run's model.

    Args:
      run: folder of a run, whose newest checkpoint is taken, else what it has exported; or of an
        exported model.
      step: of the checkpoint; None is the newest.

    Raises:
      CommandError: there is none, or it cannot be read.
    """
    if not run.is_dir():
        raise CommandError(f"RUN must be the folder of a run or of an exported model, got {run}")
    try:
        if step is not None or saved_steps(run):
            return _of_checkpoint(run / "checkpoints", step)
        for folder in (run, run / "model"):
            if (folder / "record").is_dir() and (folder / "state").is_dir():
                return _of_export(folder)
    except CheckpointError as error:
        raise CommandError(_OLDER.sub(r"--step \1 takes the one before", str(error))) from error
    raise CommandError(
        f"{run} holds no model: neither checkpoints (train with --checkpoint-every) nor an "
        "exported one (--export)"
    )


def _of_checkpoint(folder: Path, step: int | None) -> tuple[GPTConfig, Any]:
    with Checkpoints(folder) as checkpoints:
        extra = checkpoints.extra(step=step)
        if "config" not in extra:
            raise CommandError(f"the checkpoints in {folder} are not of jaxslowmo train")
        config = config_then(extra)
        form = Form(config_of(config))
        model = form.config
        # Its replicas, each on one device: whatever shared the model.
        sizes = {"replica": config.replicas, "device": config.devices_per_replica}
        algorithm = build_algorithm(config)
        mesh = js.virtual_mesh({name: n for name, n in sizes.items() if n > 1 or name == "replica"})
        train_step = js.make_train_step(
            gpt_loss_fn(model),
            algorithm.optimizer,
            sync=algorithm.sync,
            gradients=algorithm.gradients,
            mesh=mesh,
            accumulate=config.accumulate,
        )
        then = functools.partial(saved_form, now=form)
        found = checkpoints.restore(train_step, init_gpt(model), step=step, saved_form=then)
        state = found.state
    return model, train_step.consensus(state)


def _of_export(folder: Path) -> tuple[GPTConfig, Any]:
    """An export is of parameters alone; their number tells the preset."""
    size = sum(np.size(leaf) for leaf in jax.tree.leaves(load_consensus(folder)))
    for model in map(gpt_preset, GPT_PRESETS):
        for tied in (False, True):
            shape = dataclasses.replace(model, tied=tied)
            if num_parameters(shape) == size:
                return shape, load_consensus(folder, like=init_gpt(shape))
    raise CommandError(f"{folder} is no model of jaxslowmo train: no preset has {size} parameters")
