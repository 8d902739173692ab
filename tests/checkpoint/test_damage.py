"""Whatever file is missing, cut, changed or old: an error or the same bits, never other ones."""

import asyncio
import gc
import warnings

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from checkpoint.runs import MODEL_STATE, PARAMS, batch, leaf_bytes, make_step
from jaxslowmo.checkpoint import CheckpointError, Checkpoints
from jaxslowmo.checkpoint._record import fingerprints, host_fingerprint


def restored(folder, step, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = Checkpoints(folder).restore(step, PARAMS, model_state=MODEL_STATE, **options)
    said = [w.filename for w in caught if "Using the checkpoint" in str(w.message)]
    return found.step, leaf_bytes(found.state), said


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with steps 1, 2, 3; steps of 2 and 3 replicas, and what they restore of each."""
    folder = tmp_path_factory.mktemp("checkpoints")
    steps = {replicas: make_step("diloco", replicas) for replicas in (2, 3)}
    state, known = steps[2].init(PARAMS, model_state=MODEL_STATE), {}
    with Checkpoints(folder) as checkpoints:
        for t in (1, 2, 3):
            state, _ = steps[2](state, batch(t, 2))
            checkpoints.save(t, state, wait=True)
            known[2, t] = leaf_bytes(state)
            known[3, t] = restored(folder, steps[3])[1]
    return folder, steps, known


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def damaged(data, how, at, older):
    """Return the bytes of a damaged file, whose length may be 0; None if it is gone."""
    place = int(at * max(len(data) - 1, 0))
    if how == "one bit":
        return data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :] if data else data
    return {"gone": None, "cut": data[:place], "of an older one": older}[how]


@settings(max_examples=16)
@given(st.data())
def test_no_damage_passes_for_a_checkpoint(saved, data):
    folder, steps, known = saved
    file = data.draw(st.sampled_from(files_of(folder / "3")))
    how = data.draw(st.sampled_from(["gone", "cut", "one bit", "of an older one"]))
    replicas = data.draw(st.sampled_from([2, 3]))
    fallback = data.draw(st.booleans())
    before, twin = file.read_bytes(), folder / "2" / file.relative_to(folder / "3")
    older = twin.read_bytes() if twin.exists() else None
    after = damaged(before, how, data.draw(st.floats(0, 1)), older)
    file.unlink()
    if after is not None:
        file.write_bytes(after)
    try:
        step, found, said = restored(folder, steps[replicas], fallback=fallback)
    except CheckpointError as error:
        assert not fallback
        assert error.older_step == 2  # noqa: PT017
    else:
        assert found == known[replicas, step]
        assert said == [__file__] * (3 - step)
        assert step == 3 or fallback
    finally:
        file.write_bytes(before)


def test_a_failed_read_leaves_nothing_that_complains_later(saved):
    folder, steps, _ = saved
    kept = {
        file: file.read_bytes()
        for file in files_of(folder / "3" / "state")
        if file.parent.name == "d"
    }
    for file, content in kept.items():
        file.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match="3 is damaged"):
        restored(folder, steps[2])
    # Orbax's event loop has ended; pytest fails some later test if one of its reads has not.
    assert not [x for x in gc.get_objects() if isinstance(x, asyncio.Task) and not x.done()]
    for file, content in kept.items():
        file.write_bytes(content)


def test_what_cannot_be_read_is_set_aside_by_the_next_save(saved):
    folder, steps, known = saved
    checkpoints = Checkpoints(folder)
    for t in (3, 2):
        (folder / str(t) / "record" / "metadata").write_text("{")
    assert checkpoints.extra(fallback=True) == {}
    with pytest.raises(CheckpointError, match="3"):
        checkpoints.extra()
    step, found, said = restored(folder, steps[2], fallback=True)
    assert (step, found, len(said)) == (1, known[2, 1], 2)
    state = Checkpoints(folder).restore(steps[2], PARAMS, model_state=MODEL_STATE, step=1).state
    state, _ = steps[2](state, batch(2, 2))
    checkpoints.save(2, state, wait=True)
    assert checkpoints.steps() == (1, 2)
    assert (folder / "3.set-aside").exists()
    assert restored(folder, steps[2])[:2] == (2, known[2, 2])


def test_fingerprints_are_those_that_older_checkpoints_hold():
    x = np.random.default_rng(0).normal(size=3 << 20).astype(np.float32)
    assert host_fingerprint(x) == [2149482881, 3123539245]
    with jax.enable_x64(True):
        for x in (np.arange(15.0).reshape(3, 5) / 3, np.arange(-7, 8)):
            assert [host_fingerprint(x)] == fingerprints([jnp.asarray(x)])
