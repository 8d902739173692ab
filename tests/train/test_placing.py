"""Batches and weights on the devices that use them."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from train.step.problem import KINDS, PARAMS, loss


def step_of(mesh, donate=False):
    return js.make_train_step(loss, optax.sgd(0.1), sync="none", mesh=mesh, donate=donate)


class Tensor:
    """Of another library, on the CPU."""

    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        return np.array(self.values, dtype)


def test_what_is_placed_ahead_is_what_a_call_would_place():
    """What lies there already stays; arrays of other libraries are NumPy's."""
    step = step_of(js.make_mesh({"replica": 4}))
    state, batch = step.init(PARAMS), np.arange(64.0).reshape(8, 8)  # float64
    placed, weight = step.place(batch, [1, 0, 2, 3])
    assert isinstance(placed, jax.Array)
    assert (placed.dtype, weight.dtype, weight.tolist()) == (np.float32, np.float32, [1, 0, 2, 3])
    again = step.place(placed, weight)
    assert again[0] is placed
    assert again[1] is weight
    assert placed.sharding == weight.sharding == NamedSharding(step.mesh, P(("replica",)))
    wanted, metrics = step(state, batch, [1, 0, 2, 3])
    for given in (placed, Tensor(batch.tolist())):
        found, told = step(state, given, weight)
        jax.tree.map(np.testing.assert_array_equal, (found.params, told), (wanted.params, metrics))
    assert step.ready_order(state, Tensor(batch)) == step.ready_order(state, batch)
    assert step.place({"x": batch}, None)[1] is None


@pytest.mark.parametrize("kind", ["explicit", "virtual"])
def test_what_all_examples_share_is_whole_everywhere(kind):
    """A key, too; a batch that is placed is placed, and one row for each part is not shared."""
    step = step_of(KINDS[kind]({"replica": 4}))
    shared = {"gate": np.ones((1, 8)), "rate": 0.5, "count": np.int64(3), "key": jax.random.key(7)}
    placed, _ = step.place({"x": np.ones((8, 8)), "own": np.arange(4), **shared})
    types = [f"{placed[name].dtype}{list(placed[name].shape)}" for name in ("x", "own", *shared)]
    assert types[:3] == ["float32[8, 8]", "int32[4]", "float32[1, 8]"]
    assert types[3:] == ["float32[]", "int32[]", "key<fry>[]"]
    assert placed["rate"].weak_type, "as in a program of one device"
    if kind != "virtual":
        assert {placed[name].sharding for name in shared} == {NamedSharding(step.mesh, P())}
        assert placed["own"].sharding.spec == P(("replica",))
        again = step.place(placed)[0]
        assert all(again[name] is x for name, x in placed.items())


def test_a_batch_is_split_over_all_axes_but_those_of_the_parameters(mesh_of):
    """Before the first call a step knows of no layout: a state tells it."""
    mesh = mesh_of({"replica": 2, "model": 2})
    step, other = step_of(mesh), step_of(mesh, donate=True)
    first, _ = step.place(np.ones((8, 8), np.float32))
    assert first.sharding == NamedSharding(mesh, P(("replica", "model")))
    lies = NamedSharding(mesh, P("model", None))
    state = other.init({**PARAMS, "w": jax.device_put(PARAMS["w"], lies)})
    assert step.place(first, state=state)[0] is first  # it is split finer than it must be
    batch, _ = step.place(np.ones((8, 8), np.float32), state=state)
    assert batch.sharding.spec == P(("replica",))
    assert step.place(batch)[0] is batch
    other(state, batch)
    assert state.step.is_deleted()
    assert step.place(batch, state=state)[0] is batch  # only its layout is used
