"""What checkpoints and exports refuse, and what the message names."""

import functools
import tempfile
from pathlib import Path

import jax
import numpy as np
import optax

import jaxslowmo as js
from checkpoint.runs import MODEL_STATE, PARAMS, after, make_step
from jaxslowmo.checkpoint import (
    CheckpointError,
    Checkpoints,
    export_consensus,
    load_consensus,
)
from support.refusals import Refusal, each

_FOLDER = tempfile.TemporaryDirectory()


@functools.cache
def folder():
    """A folder with a checkpoint of step 3, an export `model`, and another's folder."""
    path = Path(_FOLDER.name)
    step = make_step("local_sgd", 2)
    state = step.init(PARAMS, model_state=MODEL_STATE)
    with Checkpoints(path / "run") as checkpoints:
        checkpoints.save(3, after(state, 3))
    export_consensus(path / "model", state.params, mesh=step.mesh)
    (path / "thesis").mkdir()
    (path / "thesis" / "thesis.tex").write_text("")
    return path


def restored(name="run", step=None, params=PARAMS):
    step = step or make_step("local_sgd", 2)
    return Checkpoints(folder() / name).restore(step, params, model_state=MODEL_STATE)


def save(number=0, **options):
    state = make_step("local_sgd", 2).init(PARAMS, model_state=MODEL_STATE)
    keep_best = ("loss", "min") if "metrics" in options else None
    Checkpoints(folder() / "saved", keep_best=keep_best).save(number, state, **options)


def exported(name, params):
    stacked = jax.tree.map(lambda x: np.stack([x, x]), params)
    export_consensus(folder() / name, stacked, mesh=js.virtual_mesh({"replica": 2}))


def refused(call, argument, value=""):
    return Refusal(call, argument, value, CheckpointError)


MORE = {**PARAMS, "w": np.ones((4, 40), np.float32), "c": np.ones(2, np.float32)}

SGD = optax.sgd(0.1, momentum=0.9)


ROWS = {
    "nothing to keep": Refusal(lambda: Checkpoints("x", keep=0), "`keep`", 0),
    "another step than the state's": Refusal(lambda: save(5), "`step` is 5", "0", UserWarning),
    "no checkpoint": refused(lambda: restored("nowhere"), "nowhere"),
    "no such step": refused(
        lambda: Checkpoints(folder() / "run").extra(step=1), "step 1", "steps 3"
    ),
    "a parameter of another shape": refused(lambda: restored(params=MORE), "[5,40]", "[4,40]"),
    "another optimizer": refused(
        lambda: restored(step=make_step("local_sgd", 2, optimizer=SGD)), "opt_state/0/trace/b"
    ),
    "an export of another model": refused(
        lambda: load_consensus(folder() / "model", like=MORE), "c is missing", "float32[4, 40]"
    ),
    "an export in another's folder": refused(
        lambda: exported("thesis", PARAMS), "thesis", "holds something else"
    ),
    "a save without the metric": Refusal(
        lambda: save(metrics={"accuracy": 1}), "`metrics`", "'loss'"
    ),
}


@each(ROWS)
def test_refused(refusal):
    refusal.check()
    assert (folder() / "thesis" / "thesis.tex").exists()
    assert not (folder() / "nowhere").exists()
