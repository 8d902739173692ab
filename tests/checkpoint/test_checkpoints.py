"""A folder of checkpoints: what is kept, what is refused, and in which words."""

import json
import logging
import shutil
import zlib
from pathlib import Path

import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from checkpoint.runs import MODEL_STATE, PARAMS, leaf_bytes, make_step
from jaxslowmo.checkpoint import CheckpointError, Checkpoints
from jaxslowmo.checkpoint._record import FORMAT


def restore(folder, train_step, **options):
    return Checkpoints(folder).restore(train_step, PARAMS, model_state=MODEL_STATE, **options)


def test_the_newest_are_kept_beside_other_files(step, state, tmp_path):
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "plots").mkdir()
    with Checkpoints(tmp_path, keep=2, asynchronous=False) as checkpoints:
        assert checkpoints.steps() == ()
        for t in (1, 5, 10):
            checkpoints.save(t, state)
        assert checkpoints.steps() == (5, 10)
        with pytest.raises(CheckpointError, match=r"no checkpoint of step 1: .* of steps 5, 10"):
            restore(tmp_path, step, step=1)
        # Back to 5, and on: what came after it is of another course of the run.
        checkpoints.save(5, state, extra={"again": True})
        assert checkpoints.steps() == (5,)
        assert restore(tmp_path, step).extra == {"again": True}
        assert (tmp_path / "10.set-aside" / "record").exists()
        checkpoints.close()
        checkpoints.save(11, state)
        assert checkpoints.steps() == (5, 11)
        checkpoints.save(7, state)
        checkpoints.save(11, state)
        checkpoints.save(8, state)
        assert checkpoints.steps() == (7, 8)
        assert (tmp_path / "11.set-aside1").exists()
    assert (tmp_path / "run.json").exists()
    assert (tmp_path / "plots").exists()


def test_one_that_is_not_complete_is_not_seen(step, state, tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, wait=True)
        shutil.copytree(tmp_path / "1", tmp_path / "2.orbax-checkpoint-tmp")
        assert checkpoints.steps() == (1,)
        assert restore(tmp_path, step).step == 1
        checkpoints.save(2, state, wait=True)
        assert checkpoints.steps() == (1, 2)


def test_nothing_there(step, tmp_path):
    missing = tmp_path / "nowhere"
    with pytest.raises(CheckpointError, match="nowhere has no complete checkpoint"):
        restore(missing, step)
    assert not missing.exists()
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(CheckpointError, match="file is a file: give the folder"):
        restore(file, step)


def test_it_cannot_be_written(state, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with (
        Checkpoints(file / "below") as checkpoints,
        pytest.raises(CheckpointError, match=r"step 3 could not be written .*Is there space"),
    ):
        checkpoints.save(3, state)


def test_of_another_library(step, tmp_path):
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        item = ocp.args.PyTreeSave({"w": np.ones(2)})
        checkpointer.save(tmp_path / "7", args=ocp.args.Composite(default=item))
        other = ocp.args.Composite(default=item, record=ocp.args.JsonSave({"format": 1}))
        checkpointer.save(tmp_path / "8", args=other)
    with pytest.raises(CheckpointError, match="8 was not written by jaxslowmo"):
        restore(tmp_path, step)
    with pytest.raises(CheckpointError, match=r"7 has no file record/metadata.*not written by"):
        restore(tmp_path, step, step=7)


def rewritten(path: Path, without: tuple[str, ...] = (), **changes) -> None:
    value = json.loads(path.read_text()) | changes
    value = {k: v for k, v in value.items() if k not in without}
    content = {k: v for k, v in value.items() if k not in ("jaxslowmo_checkpoint", "crc32")}
    value["crc32"] = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    path.write_text(json.dumps(value))


def test_a_record_is_checked(step, state, tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state, extra={"position": 21})
    record = tmp_path / "3" / "record" / "metadata"
    whole = record.read_text()
    record.write_text(whole.replace("21", "22"))
    with pytest.raises(CheckpointError, match="record is not as it was written"):
        restore(tmp_path, step)
    record.write_text(whole)
    rewritten(record, leaves=[["key", "name"]])
    with pytest.raises(CheckpointError, match="damaged record"):
        restore(tmp_path, step)
    rewritten(record, jaxslowmo_checkpoint=FORMAT + 1)
    said = rf"has format {FORMAT + 1}, written by .*reads format {FORMAT}:"
    with pytest.raises(CheckpointError, match=said):
        restore(tmp_path, step, fallback=True)


def test_a_record_may_lack_what_older_versions_did_not_note_and_have_what_newer_ones_do(
    step, state, tmp_path
):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state)
    rewritten(tmp_path / "3" / "record" / "metadata", ("shards", "layout"), of_tomorrow=[1])
    found = restore(tmp_path, step)
    assert found.is_exact
    assert leaf_bytes(found.state) == leaf_bytes(state)


def test_another_model_optimizer_or_algorithm(step, state, tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state)
    mesh = step.mesh
    more = {**PARAMS, "w": np.ones((4, 40), np.float32), "c": np.ones(2, np.float32)}
    more |= {f"x{i}": np.ones(2, np.float32) for i in range(4)}
    with pytest.raises(CheckpointError) as caught:
        Checkpoints(tmp_path).restore(step, more, model_state=MODEL_STATE)
    for words in (
        "params/c is missing in the checkpoint and float32[2] in this run",
        "params/w is float32[5,40] in the checkpoint and float32[4,40] in this run",
        "and 1 more",
    ):
        assert words in str(caught.value)
    other = make_step("local_sgd", mesh, optimizer=optax.sgd(0.1, momentum=0.9))
    with pytest.raises(CheckpointError, match="opt_state/1/0/trace/b is missing in the checkpoint"):
        restore(tmp_path, other)
    other = make_step("sgp", mesh)
    with pytest.raises(CheckpointError, match="opt_state/2/weight is missing in the checkpoint"):
        restore(tmp_path, other)
    assert leaf_bytes(restore(tmp_path, step).state) == leaf_bytes(state)


def test_arguments_are_checked(state, tmp_path):
    with pytest.raises(ValueError, match="`keep` must be an int >= 1, got 0"):
        Checkpoints(tmp_path, keep=0)
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ValueError, match=r"`state` must be .*, got dict; orbax"):
            checkpoints.save(1, {"params": PARAMS})
        with pytest.raises(ValueError, match="`step` must be an int >= 0, got -1"):
            checkpoints.save(-1, state)
        with pytest.raises(ValueError, match="`extra` must be plain JSON"):
            checkpoints.save(1, state, extra={"array": np.ones(1)})
        assert checkpoints.steps() == ()


def test_orbax_is_quiet(step, state, tmp_path, caplog, capfd):
    with caplog.at_level(logging.DEBUG):
        with Checkpoints(tmp_path) as checkpoints:
            for t in range(3):
                checkpoints.save(t, state)
        restore(tmp_path, step)
        logging.getLogger("absl").warning("not orbax")
    assert [r.message for r in caplog.records if r.name == "absl"] == ["not orbax"]
    assert capfd.readouterr().out == ""
