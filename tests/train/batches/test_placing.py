"""Batches and weights on the devices that use them."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.train.batches._placing import placed_batch, placed_weight
from train.step.problem import PARAMS, loss

VIRTUAL = js.virtual_mesh({"replica": 4})


def test_a_batch_is_split_and_what_is_split_so_stays(mesh_of):
    mesh = mesh_of({"replica": 2, "device": 2})
    axes = ("replica", "device")
    batch = {"x": np.arange(8.0).reshape(8, 1), "y": jax.ShapeDtypeStruct((4,), np.float32)}
    found = placed_batch(batch, mesh, axes)
    wanted = NamedSharding(mesh, P(axes))
    assert found["x"].sharding == found["y"].sharding == wanted
    np.testing.assert_array_equal(found["x"], batch["x"])
    again = placed_batch(found, mesh, axes)
    assert again["x"] is found["x"]
    finer = jax.device_put(batch["x"], NamedSharding(mesh, P(("replica", "device"))))
    assert placed_batch(finer, mesh, ("replica",)) is finer
    assert placed_batch(batch, js.virtual_mesh(dict(mesh.shape)), axes) is batch


class Tensor:
    """Of another library, on the CPU."""

    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        return np.array(self.values, dtype)


@pytest.mark.parametrize("kind", ["devices", "virtual"])
def test_arrays_of_other_libraries_are_numpys(mesh_of, kind):
    mesh = mesh_of({"replica": 4}) if kind == "devices" else VIRTUAL
    step = js.make_train_step(loss, optax.sgd(0.1), sync="none", mesh=mesh, donate=False)
    state, batch = step.init(PARAMS), np.arange(64, dtype=np.float32).reshape(8, 8)
    wanted, _ = step(state, batch)
    found, _ = step(state, Tensor(batch.tolist()))
    assert jax.tree.all(jax.tree.map(np.array_equal, found.params, wanted.params))
    assert step.ready_order(state, Tensor(batch)) == step.ready_order(state, batch)


def test_a_weight_stands_with_its_replica(mesh_of):
    mesh = mesh_of({"replica": 4})
    assert placed_weight(None, mesh, "replica") is None
    found = placed_weight([1, 0, 2, 3], mesh, "replica")
    assert found.sharding == NamedSharding(mesh, P(("replica",)))
    assert (found.dtype, found.tolist()) == (np.float32, [1, 0, 2, 3])
    assert placed_weight([1, 0, 2, 3], VIRTUAL, "replica").tolist() == [1, 0, 2, 3]


def test_batches_that_do_not_split():
    step = js.make_train_step(
        loss,
        optax.sgd(0.1),
        sync="none",
        mesh=js.make_mesh({"replica": 2, "device": 2}),
        accumulate=3,
    )
    state = step.init(PARAMS)
    for batch, shape in (
        ({"x": np.ones((6, 8), np.float32)}, r"\(6, 8\)"),
        ({"x": np.ones((0, 8), np.float32)}, r"\(0, 8\)"),
        ({"x": np.ones((), np.float32)}, r"\(\)"),
    ):
        message = rf"`batch`: .*multiple of 4, .*\('replica', 'device'\) together, got x {shape}"
        with pytest.raises(ValueError, match=message):
            step(state, batch)
    with pytest.raises(ValueError, match=r"`accumulate`=3 must divide .* got 2 examples"):
        step(state, np.ones((8, 8), np.float32))
    message = r"got x/0/0 \(\), .*, x/0/7 \(\) and 24 more; .* np\.asarray makes one\.$"
    with pytest.raises(ValueError, match=message):
        step(state, {"x": [[1.0] * 8] * 4})


@pytest.mark.parametrize("kind", ["devices", "virtual"])
def test_what_is_placed_ahead_is_what_a_call_would_place(mesh_of, kind):
    mesh = mesh_of({"replica": 4}) if kind == "devices" else VIRTUAL
    step = js.make_train_step(loss, optax.sgd(0.1), sync="none", mesh=mesh, donate=False)
    state, batch = step.init(PARAMS), np.arange(64.0).reshape(8, 8)  # float64
    placed, weight = step.place(batch, [1, 0, 2, 3])
    assert isinstance(placed, jax.Array)
    assert (placed.dtype, weight.dtype) == (np.float32, np.float32)
    again = step.place(placed, weight)
    assert kind == "virtual" or (again[0] is placed and again[1] is weight)
    wanted = step(state, batch, [1, 0, 2, 3])
    found = step(state, placed, weight)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.array_equal(one, other) or jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key)
    assert step.place({"x": batch}, None)[1] is None
    with pytest.raises(ValueError, match="positive multiple of 4"):
        step.place(batch[:3])


def test_a_batch_is_placed_for_parameters_that_are_sharded(mesh_of):
    """Before the first call a step knows of no layout: a state tells it."""
    mesh = mesh_of({"replica": 2, "model": 2})
    step = js.make_train_step(loss, optax.sgd(0.1), sync="none", mesh=mesh, donate=False)
    rows = NamedSharding(mesh, P("model", None))
    params = {**PARAMS, "w": jax.device_put(PARAMS["w"], rows)}
    other = js.make_train_step(loss, optax.sgd(0.1), sync="none", mesh=mesh, donate=False)
    batch, _ = step.place(np.ones((8, 8), np.float32), state=other.init(params))
    assert batch.sharding.spec == P(("replica",))
    assert step.place(batch)[0] is batch


def test_what_is_no_state():
    step = js.make_train_step(loss, optax.sgd(0.1), sync="none", mesh=VIRTUAL)
    with pytest.raises(ValueError, match=r"`state` must be a js\.TrainState, .* got dict\."):
        step(PARAMS, np.zeros((8, 8), np.float32))


@pytest.mark.parametrize(
    ("weight", "said"),
    [
        (np.ones(3), r"shape \(4,\), got shape \(3,\)"),
        (2.0, r"shape \(4,\), got shape \(\)"),
        ([1, 1, -1, 1], r">= 0 and finite, got \[1.0, 1.0, -1.0, 1.0\]"),
        ([1, np.inf, 1, 1], ">= 0 and finite"),
    ],
)
def test_wrong_weights(weight, said):
    step = js.make_train_step(loss, optax.sgd(0.1), sync="none", mesh=VIRTUAL)
    batch = np.zeros((8, 8), np.float32)
    with pytest.raises(ValueError, match=f"`weight` must .*{said}"):
        step(step.init(PARAMS), batch, weight)
