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
    consensus_extra,
    export_consensus,
    load_consensus,
)
from support.refusals import Refusal, each

_FOLDER = tempfile.TemporaryDirectory()


@functools.cache
def folder():
    """A folder with a checkpoint of step 3, an export `model`, a file and another's folder."""
    path = Path(_FOLDER.name)
    step = make_step("local_sgd", 2)
    state = step.init(PARAMS, model_state=MODEL_STATE)
    for name, one in (("run", state), ("inside", inside(7).init(PARAMS))):
        with Checkpoints(path / name) as checkpoints:
            checkpoints.save(3, after(one, 3))
    export_consensus(path / "model", state.params, mesh=step.mesh)
    (path / "file").write_text("")
    (path / "thesis").mkdir()
    (path / "thesis" / "thesis.tex").write_text("")
    return path


def inside(replicas):
    """A step whose parameter transform is hidden in its optimizer."""
    sync = js.slowmo("replica", base=js.local_sgd("replica"), sync_every=3)
    mesh = js.virtual_mesh({"replica": replicas})
    return js.make_train_step(lambda p, b: (b @ p["w"]).sum() + p["b"].sum() * 1.0, sync, mesh=mesh)


def restored(name="run", step=None, params=PARAMS, model_state=MODEL_STATE, number=None):
    checkpoints = Checkpoints(folder() / name)
    step = step or make_step("local_sgd", 2)
    return checkpoints.restore(step, params, model_state=model_state, step=number)


def save(number=0, extra=None, state=None):
    step = make_step("local_sgd", 2)
    state = state or step.init(PARAMS, model_state=MODEL_STATE)
    Checkpoints(folder() / "run").save(number, state, extra=extra)


def exported(name, params):
    stacked = jax.tree.map(lambda x: np.stack([x, x]), params)
    export_consensus(folder() / name, stacked, mesh=js.virtual_mesh({"replica": 2}))


def best(metrics):
    checkpoints = Checkpoints(folder() / "best", keep_best=("loss", "min"))
    state = make_step("local_sgd", 2).init(PARAMS, model_state=MODEL_STATE)
    checkpoints.save(0, state, metrics=metrics)


def refused(call, argument, value=""):
    return Refusal(call, argument, value, CheckpointError)


ONE = np.ones(1, np.float32)
MORE = {**PARAMS, "w": np.ones((4, 40), np.float32), "c": np.ones(2, np.float32)}
MANY = MORE | {f"x{i}": np.ones(2, np.float32) for i in range(4)}
SGD = optax.sgd(0.1, momentum=0.9)
WIDE = {**PARAMS, "b": PARAMS["b"].astype(np.float32)}

ROWS = {
    "nothing to keep": Refusal(lambda: Checkpoints("x", keep=0), "`keep`", 0),
    "no patience": Refusal(lambda: Checkpoints("x", patience=0), "`patience`", 0),
    "a state of no step": Refusal(lambda: save(state={"params": 1}), "`state`", "dict"),
    "a step below 0": Refusal(lambda: save(-1), "`step`", -1),
    "a step that no counter reaches": Refusal(lambda: save(2**31), "`step`", 2**31),
    "another step than the state's": Refusal(lambda: save(5), "`step` is 5", "0", UserWarning),
    "an array as extra": Refusal(lambda: save(extra={"array": np.ones(1)}), "`extra`", "ndarray"),
    "no checkpoint": refused(lambda: restored("nowhere"), "nowhere"),
    "a file for a folder": Refusal(lambda: restored("file"), "file", "", NotADirectoryError),
    "a step as text": Refusal(lambda: restored(number="3"), "`step`", "'3'"),
    "no training step": Refusal(lambda: restored(step=len), "`train_step`", "builtin"),
    "no such step": refused(
        lambda: Checkpoints(folder() / "run").extra(step=1), "step 1", "steps 3"
    ),
    "a parameter more": refused(lambda: restored(params=MORE), "params/c", "float32[2]"),
    "a parameter of another shape": refused(lambda: restored(params=MORE), "[5,40]", "[4,40]"),
    "many parameters more": refused(lambda: restored(params=MANY), "1 more"),
    "a wider parameter": refused(lambda: restored(params=WIDE), "params/b", "bfloat16[40]"),
    "another optimizer": refused(
        lambda: restored(step=make_step("local_sgd", 2, optimizer=SGD)), "opt_state/0/trace/b"
    ),
    "another gradient transform": refused(
        lambda: restored(step=make_step("all_reduce", 2)), "exchange/gradients/hook/0", "missing"
    ),
    "a hidden transform on other replicas": refused(
        lambda: restored("inside", inside(8), model_state=None), "`sync`", "8 replicas"
    ),
    "no export to load": refused(lambda: load_consensus(folder() / "nowhere"), "nowhere"),
    "a checkpoint for an export": refused(lambda: consensus_extra(folder() / "run" / "3"), "3"),
    "an export of another model": refused(
        lambda: load_consensus(folder() / "model", like=MORE), "c is missing", "float32[4, 40]"
    ),
    "an export in another's folder": refused(
        lambda: exported("thesis", PARAMS), "thesis", "holds something else"
    ),
    "an export below a file": refused(lambda: exported("file/below", PARAMS), "file"),
    "an export of a dtype that safetensors lacks": refused(
        lambda: exported("int4", {"w": np.ones(2, "int4")}), "int4", "could not be written"
    ),
    "an export of two leaves of one name": Refusal(
        lambda: exported("twice", {"a/b": ONE, "a": {"b": ONE}}), "`params`", "a/b"
    ),
    "an export of tables that are none": Refusal(
        lambda: export_consensus(
            "x",
            {"w": ONE},
            mesh=js.virtual_mesh({"replica": 1}),
            embeddings=js.embeddings(
                {"a": js.Table(2, 1)}, axis_name=None, optimizer=js.rowwise_sgd(0.1)
            ),
        ),
        "`embeddings`",
        "dict",
    ),
    "an export of the name of safetensors": Refusal(
        lambda: exported("reserved", {"__metadata__": ONE}), "`params`", "__metadata__"
    ),
    "a metric without a mode": Refusal(
        lambda: Checkpoints("x", keep_best=("loss",)), "`keep_best`", "loss"
    ),
    "the best of another kind": Refusal(
        lambda: Checkpoints("x", keep_best=("loss", "least")), "`keep_best`", "least"
    ),
    "a save without the metric": Refusal(lambda: best({"accuracy": 1}), "`metrics`", "'loss'"),
    "a save without metrics": Refusal(lambda: best(None), "`metrics`", "'loss'"),
    "metrics that are no numbers": Refusal(lambda: best({"loss": [1, 2]}), "`metrics`", "[1, 2]"),
    "metrics that are text": Refusal(lambda: best({"loss": "low"}), "`metrics`", "'low'"),
    "metrics that are too large": Refusal(lambda: best({"loss": 10**400}), "`metrics`", "1000"),
    "the best of no metric": Refusal(lambda: Checkpoints("x").best_step(), "`keep_best`", "None"),
}


@each(ROWS)
def test_refused(refusal):
    refusal.check()
    assert (folder() / "thesis" / "thesis.tex").exists()
    assert not (folder() / "nowhere").exists()
