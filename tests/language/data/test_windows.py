"""Batches: random windows that resume, fixed windows to evaluate on."""

import json

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxslowmo.data import TextBatches, validation_batches


def shares_of(*sizes: int) -> list[np.ndarray]:
    """Shares whose bytes tell the replica (high half) and count up (low half)."""
    return [(16 * i + np.arange(size) % 16).astype(np.uint8) for i, size in enumerate(sizes)]


def batches_of(*sizes: int, seed: int = 0, batch_size: int = 3, window: int = 5) -> TextBatches:
    return TextBatches(shares_of(*sizes), batch_size=batch_size, window=window, seed=seed)


@hypothesis.given(
    sizes=st.lists(st.integers(20, 99), min_size=1, max_size=5),
    seed=st.integers(0, 2**40),
    index=st.integers(0, 10**6),
)
def test_windows_are_stretches_of_the_replica_s_own_share(sizes, seed, index):
    batch = batches_of(*sizes, seed=seed).batch(index)
    assert batch.shape == (3 * len(sizes), 5)
    assert batch.dtype == np.uint8
    assert (batch // 16 == np.repeat(np.arange(len(sizes)), 3)[:, None]).all()
    assert (np.diff(batch.astype(int) % 16, axis=1) % 16 == 1).all()


def test_batches_depend_on_seed_replica_and_index_alone():
    together, alone = batches_of(40, 50, 60), batches_of(40)
    np.testing.assert_array_equal(together.batch(7)[:3], alone.batch(7))
    assert not np.array_equal(alone.batch(7), alone.batch(8))
    assert not np.array_equal(alone.batch(7), batches_of(40, seed=1).batch(7))
    same = TextBatches([np.arange(99, dtype=np.uint8)] * 2, batch_size=9, window=5, seed=0)
    assert not np.array_equal(same.batch(0)[:9], same.batch(0)[9:])


@pytest.mark.parametrize("replicas", [(0, 1), (2,), (0, 2)])
def test_a_process_makes_the_batches_of_its_own_replicas(replicas):
    sizes = (40, 50, 60)
    own = TextBatches(
        [shares_of(*sizes)[replica] for replica in replicas],
        batch_size=3,
        window=5,
        seed=0,
        replicas=replicas,
    )
    every = batches_of(*sizes).batch(7).reshape(3, 3, 5)
    np.testing.assert_array_equal(own.batch(7), every[list(replicas)].reshape(-1, 5))


def test_a_run_resumes_where_it_stopped():
    whole = batches_of(40, 50)
    expected = [next(whole) for _ in range(6)]
    first = batches_of(40, 50)
    for _ in range(4):
        next(first)
    resumed = batches_of(40, 50)
    resumed.set_state(json.loads(json.dumps(first.get_state())))
    np.testing.assert_array_equal(next(resumed), expected[4])
    np.testing.assert_array_equal(next(resumed), expected[5])


def test_the_state_of_another_iterator_is_refused():
    state = batches_of(40).get_state()
    with pytest.raises(ValueError, match="of an iterator with seed=1, got 0"):
        batches_of(40, seed=1).set_state(state)
    with pytest.raises(ValueError, match=r"next_batch'\]` must be an int >= 0, got -1"):
        batches_of(40).set_state({**state, "next_batch": -1})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": -1}, "`seed` must be >= 0, got -1"),
        ({"batch_size": 0}, "`batch_size` must be >= 1, got 0"),
        ({"window": 1}, "`window` must be >= 2, got 1"),
        ({"window": 17}, "3 windows of 17 bytes = 51 bytes; replica 1 of 2 got 50"),
    ],
)
def test_impossible_batches_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        batches_of(60, 50, **arguments)


@pytest.mark.parametrize("replicas", [(), (0,), (0, 1, 2), (-1, 0)])
def test_indices_that_are_not_one_per_share_are_refused(replicas):
    with pytest.raises(ValueError, match="`replicas` must be one index >= 0 for each of the 2"):
        TextBatches(shares_of(40, 40), batch_size=1, window=5, seed=0, replicas=replicas)


@hypothesis.given(size=st.integers(6, 500), count=st.integers(1, 9))
def test_validation_windows_cover_the_text_evenly(size, count):
    text = np.random.default_rng(0).integers(0, 256, size).astype(np.uint8)
    windows = validation_batches(text, num_batches=count, batch_size=2, window=6)
    assert windows.shape == (count, 2, 6)
    flat = windows.reshape(-1, 6)
    np.testing.assert_array_equal(flat[0], text[:6])
    np.testing.assert_array_equal(flat[-1], text[-6:])
    if size >= 7 * 2 * count:  # room for all: no two overlap
        starts = np.linspace(0, size - 6, 2 * count).astype(int)
        assert (np.diff(starts) >= 6).all()


def test_a_held_out_text_below_one_window_is_refused():
    with pytest.raises(ValueError, match="one window of 6 bytes for validation, got 5"):
        validation_batches(np.zeros(5, np.uint8), num_batches=1, batch_size=1, window=6)
