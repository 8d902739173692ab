"""Files that are missing, cut short or changed: an error or the same bits, never other ones."""

from pathlib import Path

import jax
import numpy as np
import pytest
from etils import epath

import jaxslowmo as js
from checkpoint.runs import MODEL_STATE, PARAMS, batch, leaf_bytes, make_step, on_host
from jaxslowmo.checkpoint import CheckpointError, Checkpoints
from jaxslowmo.checkpoint._arrays import host_print, prints_of
from jaxslowmo.checkpoint._restore import Template, finished, read

DAMAGES = {
    "deleted": lambda data: None,
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "one bit": lambda data: (
        data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 16]) + data[len(data) // 2 + 1 :]
    ),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with steps 1, 2, 3, the training step, and its state after each."""
    folder = tmp_path_factory.mktemp("checkpoints")
    step = make_step("diloco", js.virtual_mesh({"replica": 2}))
    state = step.init(PARAMS, model_state=MODEL_STATE)
    states = {}
    with Checkpoints(folder) as checkpoints:
        for t in (1, 2, 3):
            state, _ = step(state, batch(t, 2))
            checkpoints.save(t, state)
            states[t] = leaf_bytes(state)
    return folder, step, states


def damage(file: Path, how: str) -> None:
    data = DAMAGES[how](file.read_bytes())
    file.unlink()
    if data is not None:
        file.write_bytes(data)


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("replicas", [2, 3])
def test_no_damage_passes_for_a_checkpoint(saved, replicas):
    folder, step, states = saved
    if replicas != 2:
        step = make_step("diloco", js.virtual_mesh({"replica": replicas}))
    template = Template(step, PARAMS, MODEL_STATE, 0)
    path = epath.Path(folder / "3")
    undamaged = leaf_bytes(finished(read(path, template))[0])
    assert (undamaged == states[3]) == (replicas == 2)
    errors = 0
    for file in files_of(folder / "3"):
        for how in DAMAGES:
            before = file.read_bytes()
            damage(file, how)
            try:
                found = finished(read(path, template))
            except CheckpointError:
                errors += 1
            else:
                assert leaf_bytes(found[0]) == undamaged, (file, how)
            finally:
                file.write_bytes(before)
    assert errors >= 3 * 4  # record, manifest, data; the manifest's node may lie with the data


def test_the_previous_one_is_used_if_asked(saved):
    folder, step, states = saved
    record = folder / "3" / "record" / "metadata"
    checkpoints = Checkpoints(folder)
    arguments = (step, PARAMS)
    try:
        damage(record, "half")
        said = r"no JSON.*`fallback=True` takes that of step 2"
        with pytest.raises(CheckpointError, match=said) as raised:
            checkpoints.restore(*arguments, model_state=MODEL_STATE)
        assert raised.value.older_step == 2
        with pytest.warns(UserWarning, match=r"/3 is damaged.*Using the checkpoint of step 2"):
            found = checkpoints.restore(*arguments, model_state=MODEL_STATE, fallback=True)
        assert (found.step, leaf_bytes(found.state)) == (2, states[2])
        damage(folder / "2" / "state" / "manifest.ocdbt", "half")
        with pytest.warns(UserWarning, match="damaged") as warned:
            found = checkpoints.restore(*arguments, model_state=MODEL_STATE, fallback=True)
        assert [w.filename for w in warned] == [__file__] * 2
        assert (found.step, leaf_bytes(found.state)) == (1, states[1])
        # The next save sets aside what could not be read; a later resume does not meet it again.
        state = found.state
        state, _ = step(state, batch(2, 2))
        checkpoints.save(2, state, wait=True)
        assert checkpoints.steps() == (1, 2)
        assert (folder / "3.set-aside").exists()
        assert (
            leaf_bytes(checkpoints.restore(*arguments, model_state=MODEL_STATE).state) == states[2]
        )
        record = folder / "1" / "record" / "metadata"
        damage(record, "deleted")
        damage(folder / "2" / "record" / "metadata", "deleted")
        with (
            pytest.warns(UserWarning, match="Using the checkpoint of step 1"),
            pytest.raises(CheckpointError, match="/1 has no file record/metadata"),
        ):
            checkpoints.restore(*arguments, model_state=MODEL_STATE, fallback=True)
    finally:
        checkpoints.close()


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float64", "complex64", "int8", "bool", "uint32", "float16"]
)
def test_fingerprints_of_host_and_device_agree(dtype):
    with np.errstate(all="ignore"):
        x = np.random.default_rng(0).normal(size=(3, 7)) * 100
    with jax.enable_x64(dtype == "float64"):
        on_device = jax.numpy.asarray(x).astype(dtype)
        assert prints_of([on_device, on_device[:, :0]]) == [
            host_print(on_host(on_device)),
            [0, 0],
        ]
