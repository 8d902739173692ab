"""Rows for what lives at the same time."""

from hypothesis import given
from hypothesis import strategies as st

from jaxslowmo.pipeline.one_program._tick_table import Lifetime, rows_of


def test_a_row_is_free_again_after_the_last_read():
    lives = {"a": Lifetime(0, 2), "b": Lifetime(1, 5), "c": Lifetime(2, 3), "d": Lifetime(3, 3)}
    assert rows_of(lives) == ({"a": 0, "b": 1, "c": 2, "d": 0}, 3)
    assert rows_of({}) == ({}, 0)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)), max_size=30))
def test_rows_are_as_few_as_live_at_once_and_never_shared(spans):
    lives = {i: Lifetime(start, start + length) for i, (start, length) in enumerate(spans)}
    rows, count = rows_of(lives)
    at_once = [
        [key for key, life in lives.items() if life.start <= now <= life.end] for now in range(27)
    ]
    assert count == max(map(len, at_once))
    assert all(len({rows[key] for key in keys}) == len(keys) for keys in at_once)
