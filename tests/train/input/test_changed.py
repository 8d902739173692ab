"""Arrays that are filled again are seen, whatever their layout, dtype and size."""

import array

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import jaxslowmo as js
from jaxslowmo.train.input import _changed
from jaxslowmo.train.input._changed import refuse_changed, sample_of


def is_seen(batch, change) -> bool:
    """Whether a change is an error, and no change none."""
    sample = sample_of(batch)
    refuse_changed(batch, sample)
    change()
    try:
        refuse_changed(batch, sample)
    except ValueError:
        return True
    return False


LAYOUTS = {
    "C": lambda x: x,
    "Fortran": lambda x: x.T,
    "every other": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    "reversed": lambda x: x[..., ::-1],
    "inner axes swapped": lambda x: x.swapaxes(0, -1) if x.ndim > 2 else x.T,
    "a window": lambda x: np.pad(x, 1)[tuple(slice(1, -1) for _ in x.shape)],
}
DTYPES = ["?", "i1", "u2", "<i4", ">i4", "i8", "f2", "f4", "c16", "M8[s]", "S3", "U2", "bfloat16"]
DTYPES += ["float8_e4m3fn", "int4", "i4,f8,(2,)u1"]


def dtype_of(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)


def element(dtype: np.dtype, byte: int) -> np.ndarray:
    """() of which this is the first byte, and all others are 0."""
    content = np.zeros(dtype.itemsize, np.uint8)
    content[0] = byte
    return content.view(dtype)[0]


@given(
    name=st.sampled_from(DTYPES),
    shape=hnp.array_shapes(min_dims=1, max_dims=4, max_side=9),
    layout=st.sampled_from(list(LAYOUTS)),
    seed=st.integers(0, 2**32 - 1),
)
def test_one_other_element_is_seen(name, shape, layout, seed):
    random, dtype = np.random.default_rng(seed), dtype_of(name)
    values = np.stack([element(dtype, byte) for byte in (0, 1)])
    x = LAYOUTS[layout](values[random.integers(0, 2, shape)])
    place = tuple(int(random.integers(n)) for n in x.shape)
    before = x[place].tobytes()
    other = next(y for y in (element(dtype, 0), element(dtype, 1)) if y.tobytes() != before)

    def change():
        x[place] = other

    assert is_seen({"x": x}, change)


@given(
    name=st.sampled_from(DTYPES),
    shape=hnp.array_shapes(min_dims=1, max_dims=4, min_side=3, max_side=9),
    layout=st.sampled_from(list(LAYOUTS)),
)
def test_other_content_is_seen_where_pieces_are_read(name, shape, layout):
    dtype = dtype_of(name)
    x = LAYOUTS[layout](np.full(shape, element(dtype, 0), dtype))

    def change():
        x[...] = element(dtype, 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_changed, "_WHOLE_BYTES", 0)
        patch.setattr(_changed, "_PIECES", 5)
        patch.setattr(_changed, "_PIECE_BYTES", 2)
        assert is_seen({"x": x}, change)


def test_a_change_of_one_part_in_a_thousand_of_a_large_array():
    """Wherever the pieces lie: a part holds one of them."""
    x = np.zeros((1024, 2048), np.float32)

    def change():
        x[700:702] = 1  # two rows are a part, wherever it begins

    assert is_seen(x, change)


@pytest.mark.parametrize("made", [lambda i: jnp.full(3, i), lambda i: np.full(3, i), float])
def test_a_dict_that_gets_other_leaves_each_time(made):
    """The last ones were trained again and again; silently, where they were none of NumPy."""

    def batches():
        batch = {}
        for i in range(5):
            batch["x"] = made(float(i))
            yield batch

    def first_number(state, batch):
        return state, float(np.ravel(batch["x"])[0])

    pipeline = js.TrainPipeline(first_number, {}, batches())
    assert [result.metrics for result in pipeline] == [0, 1, 2, 3, 4]


def test_objects_and_fields_and_what_cannot_change():
    texts = np.array(["a", "b"], object)
    fields = np.array([(1, object()), (2, object())], [("a", "i4"), ("b", object)])
    raw = array.array("i", [1, 2])
    assert is_seen([texts], lambda: texts.__setitem__(1, "another text"))
    assert is_seen([fields], lambda: fields["a"].__setitem__(1, 3))
    assert is_seen([fields], lambda: fields["b"].__setitem__(0, object()))
    assert is_seen([raw], lambda: raw.__setitem__(1, 3))
    batch = [np.zeros((0, 3)), np.zeros(3, "V0"), jnp.ones(3), 1.0, "text", None, b"bytes"]
    refuse_changed(batch, sample_of(batch))
