"""What loggers, progress bars and files hold after the recipes, read back."""

import json
import struct
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors import safe_open
from tensorboardX.proto.event_pb2 import Event

import jaxslowmo as js
from recipes.doc_blocks import LOOP, MAPPED, SETTING, run
from support.waiting import wait_until

DUE = [6, 12, 18, 24]


def recipe(title: str) -> dict[str, Any]:
    return run("recipes", SETTING, LOOP, MAPPED, title)


@pytest.fixture(scope="module")
def losses():
    """Per step, of the run that all of these recipes log."""
    found = recipe("tqdm")
    step = js.make_train_step(
        found["loss_fn"], optax.adam(0.05), sync=found["slow"](), mesh=found["mesh"]
    )
    results = js.train_loop(step, step.init(found["params"]), found["batches"])
    return {r.step: js.host_mean(r.metrics)["loss"] for r in results}


def scalars(folder):
    """(name, step) and value of what a folder of TensorBoard holds."""
    (file,) = Path(folder).iterdir()
    data, found = file.read_bytes(), {}
    while data:  # length, its checksum, an event, its checksum
        (size,) = struct.unpack("<Q", data[:8])
        event = Event.FromString(data[12 : 12 + size])
        found |= {(v.tag, event.step): v.simple_value for v in event.summary.value}
        data = data[16 + size :]
    return found


def test_tensorboard_has_every_record(losses):
    found = scalars(recipe("TensorBoard")["logs"])
    assert found.keys() == {(name, t) for name in ("loss", "consensus_loss") for t in DUE}
    for t in DUE:
        assert found["loss", t] == pytest.approx(losses[t])


def test_the_file_of_wandb_has_every_record(losses):
    """Without a network. Its values are JSON; `run.finish()` may return before they are there."""
    (file,) = Path(recipe("Weights & Biases (wandb)")["run"].dir).parent.glob("*.wandb")
    values = {t: json.dumps(loss).encode() for t, loss in losses.items()}
    wait_until(lambda: values[24] in file.read_bytes())
    assert [t for t, value in values.items() if value in file.read_bytes()] == DUE


def test_the_bar_is_full_and_shows_the_loss(losses):
    bar = recipe("tqdm")["bar"]
    assert bar.n == bar.total == 24
    assert f"loss={losses[24]:.3g}" in bar.postfix
    assert "phase=slow" in bar.postfix


def test_safetensors_come_back():
    found = recipe("safetensors")
    jax.tree.map(np.testing.assert_array_equal, found["loaded"], found["consensus"])
    with safe_open(found["file"], framework="numpy") as file:
        assert sorted(file.keys()) == ["b", "w"]
        assert file.metadata() == {"algorithm": "slowmo", "step": "24"}


def test_names_are_paths_and_half_precision_stays(tmp_path):
    found = recipe("safetensors")
    kernel = jnp.arange(6.0, dtype=jnp.bfloat16).reshape(2, 3)
    tree = {"layers": [{"kernel": kernel}], "n": jnp.float32(2)}
    named = found["named"](tree)
    assert list(named) == ["layers.0.kernel", "n"]
    found["save_file"]({k: np.asarray(x) for k, x in named.items()}, tmp_path / "model")
    loaded = found["load"](tmp_path / "model", tree)
    assert loaded["layers"][0]["kernel"].dtype == jnp.bfloat16
    jax.tree.map(np.testing.assert_array_equal, loaded, tree)
