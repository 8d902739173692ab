"""Metrics of a loss function come out as they went in, and their means are means."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from support.meshes import MESHES

PARAMS = {"w": np.ones(3, np.float32)}
BATCH = np.arange(24, dtype=np.float32).reshape(8, 3)
LARGE = 2**24 + 1  # no float32


def step_of(metrics, kind="auto", axes=None, **options):
    def loss(params, batch):
        return jnp.mean(params["w"][None] * batch), metrics(batch)

    mesh = MESHES[kind](axes or {"replica": 2})
    return js.make_train_step(
        loss, optax.sgd(0.1), sync=js.local_sgd("replica"), mesh=mesh, **options
    )


def test_dtypes_and_nesting_are_kept():
    wanted = {
        "int32": np.full(2, LARGE, np.int32),
        "uint8": np.array([[0, 1, 2]] * 2, np.uint8),
        "inside": {"complex": np.full(2, 1 + 2j, np.complex64), "deeper": [np.full(2, 0.5)]},
    }
    with jax.enable_x64(True):
        step = step_of(lambda batch: jax.tree.map(lambda x: jnp.asarray(x[0]), wanted))
        state = step.init(PARAMS)
        for found in (step.evaluate(state, BATCH), step(state, BATCH)[1]):
            found.pop("loss")
            jax.tree.map(np.testing.assert_array_equal, found, wanted)
            kinds = jax.tree.map(lambda x, y: x.dtype == y.dtype, found, wanted)
            assert all(jax.tree.leaves(kinds)), kinds
        means = js.host_mean(found)
        assert (means["int32"], means["inside/complex"]) == (LARGE, 1 + 2j)
        assert means["inside/deeper/0"] == 0.5
    for value, kind in ((lambda: jax.random.key(0), "key<fry>"), (lambda: "text", "<U4")):
        odd = step_of(lambda batch, value=value: {"odd": {"deep": [value()]}})
        with pytest.raises(ValueError, match=rf"`loss_fn`.* metrics .*'odd.* {kind}"):
            odd(odd.init(PARAMS), BATCH)


def test_names_of_the_step_are_taken_and_the_mean_of_one_array():
    step = step_of(lambda batch: {"weight": batch.sum()})
    with pytest.raises(ValueError, match=r"`loss_fn`.*'weight'"):
        step(step.init(PARAMS), BATCH)
    mean = js.host_mean(jnp.arange(4.0))  # as `pmap` returns
    assert isinstance(mean, float)
    assert mean == 1.5
