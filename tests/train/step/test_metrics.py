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
    odd = step_of(lambda batch: {"odd": {"deep": [jax.random.key(0)]}})
    with pytest.raises(ValueError, match=r"`loss_fn`.* metrics .*'odd.* key<fry>"):
        odd.evaluate(odd.init(PARAMS), BATCH)


@pytest.mark.parametrize(
    ("how", "kind"), [("microbatches", "auto"), ("devices", "auto"), ("weights", "virtual")]
)
def test_means_of_all_kinds(how, kind):
    """A mean of integers is a float, and one of complex numbers has both parts."""
    axes = {"replica": 2} | ({"device": 2} if how == "devices" else {})
    options = {"accumulate": 2} if how == "microbatches" else {}
    if how == "devices":
        options["gradients"] = js.all_reduce_gradients("device")

    def metrics(batch):
        total = batch.sum()
        return {
            "a": {"n": total.astype(jnp.int32)},
            "c": total.astype(jnp.complex64) * (1 + 2j),
            "half": total > 40,
        }

    step = step_of(metrics, kind, axes, **options)
    state = step.init(PARAMS)
    parts = BATCH.reshape(2, 2, -1).sum(2)  # by replica
    shares = np.float32([[1, 1], [1, 1]])
    if how == "weights":  # of two batches in a window
        window, shares = None, np.float32([[1, 3], [2, 0]])
        for i in range(2):
            batch = BATCH.reshape(2, 2, 2, 3)[:, i].reshape(4, 3)
            window, _ = step.collect(state, batch, shares[:, i], window=window)
        found = step.apply(state, window)[1]
    else:
        found = step(state, BATCH)[1]
    mean = lambda x: (x * shares).sum(1) / shares.sum(1)  # noqa: E731
    np.testing.assert_allclose(found["a"]["n"], mean(parts), rtol=1e-6)
    np.testing.assert_allclose(found["c"], mean(parts * (1 + 2j)), rtol=1e-6)
    np.testing.assert_allclose(found["half"], mean(parts > 40), rtol=1e-6)
    with pytest.raises(ValueError, match=r"`loss_fn`.*'weight'"):  # names of the step are taken
        step_of(lambda batch: {"weight": batch.sum()}).evaluate(state, BATCH)
    mean = js.host_mean(found["a"]["n"])  # of one array, as `pmap` returns
    assert mean == js.host_mean({"loss": found["a"]["n"]})["loss"]
    assert isinstance(mean, float)
