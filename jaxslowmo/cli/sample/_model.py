"""The model of a run: the consensus of a checkpoint, or what was exported."""

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
from ..config._cluster import ClusterConfig
from ..config._fields import options_of
from ..config._train import TrainConfig, train_config
from ..processes._restarts import saved_steps
from ..run._alike import saved_values
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
        config = _without_processes(saved_values(extra["config"]))
        model = gpt_preset(config.preset, dtype=config.dtype)
        # Its replicas, on one device: what is sharded over them lies as it did.
        algorithm, mesh = build_algorithm(config), js.virtual_mesh(config.axes)
        train_step = js.make_train_step(
            gpt_loss_fn(model),
            algorithm.optimizer,
            sync=algorithm.sync,
            gradients=algorithm.gradients,
            mesh=mesh,
            accumulate=config.accumulate,
        )
        state = checkpoints.restore(train_step, init_gpt(model), step=step).state
    shares = algorithm.sync.shares(state.opt_state[-1]) if algorithm.sync else None
    return model, js.consensus(state.params, mesh=mesh, shares=shares)


def _without_processes(values: dict[str, Any]) -> TrainConfig:
    """What the state of a run follows from; where its processes were does not matter here."""
    unused = {*options_of(ClusterConfig), "resume", "overwrite"}
    return train_config({name: value for name, value in values.items() if name not in unused})


def _of_export(folder: Path) -> tuple[GPTConfig, Any]:
    """An export is of parameters alone; their number tells the preset."""
    size = sum(np.size(leaf) for leaf in jax.tree.leaves(load_consensus(folder)))
    for model in map(gpt_preset, GPT_PRESETS):
        if num_parameters(model) == size:
            return model, load_consensus(folder, like=init_gpt(model))
    raise CommandError(f"{folder} is no model of jaxslowmo train: no preset has {size} parameters")
