"""Batches: random windows that resume, fixed windows to evaluate on."""

import json

import hypothesis
import numpy as np
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


def test_every_window_of_a_share_may_come():
    share = np.arange(9, dtype=np.uint8)
    batches = TextBatches([share], batch_size=1, window=5, seed=0)
    assert {int(next(batches)[0, 0]) for _ in range(80)} == {0, 1, 2, 3, 4}
    assert TextBatches([share[:5]], batch_size=1, window=5, seed=0).batch(3).tolist() == [
        [0, 1, 2, 3, 4]
    ]


def test_batches_depend_on_seed_replica_and_index_alone():
    together, alone = batches_of(40, 50, 60), batches_of(40)
    np.testing.assert_array_equal(together.batch(7)[:3], alone.batch(7))
    assert not np.array_equal(alone.batch(7), alone.batch(8))
    assert not np.array_equal(alone.batch(7), batches_of(40, seed=1).batch(7))
    same = TextBatches([np.arange(99, dtype=np.uint8)] * 2, batch_size=9, window=5, seed=0)
    assert not np.array_equal(same.batch(0)[:9], same.batch(0)[9:])


def test_a_process_makes_the_batches_of_its_own_replicas():
    shares = shares_of(40, 50, 60)
    options = {"batch_size": 3, "window": 5, "seed": 0, "replicas": (0, 2)}
    own = TextBatches([shares[0], shares[2]], **options)
    every = batches_of(40, 50, 60).batch(7).reshape(3, 3, 5)
    np.testing.assert_array_equal(own.batch(7), every[[0, 2]].reshape(-1, 5))


def test_a_run_begins_with_batch_0_and_resumes_where_it_stopped():
    first, resumed = batches_of(40, 50), batches_of(40, 50)
    for index in range(4):
        np.testing.assert_array_equal(next(first), batches_of(40, 50).batch(index))
    resumed.set_state(json.loads(json.dumps(first.get_state())))
    np.testing.assert_array_equal(next(resumed), next(first))


@hypothesis.given(size=st.integers(6, 500), count=st.integers(1, 9))
def test_validation_windows_cover_the_text_evenly(size, count):
    text = np.random.default_rng(0).integers(0, 256, size).astype(np.uint8)
    windows = validation_batches(text, num_batches=count, batch_size=2, window=6)
    assert windows.shape == (count, 2, 6)
    flat, last = windows.reshape(-1, 6), size - 6
    for i, window in enumerate(flat):
        start = last * i / (2 * count - 1)
        near = {int(start - 1e-9), int(start + 1e-9)}  # rounded as floats are
        assert any(np.array_equal(window, text[s : s + 6]) for s in near)
