"""Containers in batches are cut where each leaf counts examples, else refused by name."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct
from flax.core import FrozenDict
from jax.experimental import sparse
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js

ROWS = 8
X = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
X[X < 0.3] = 0  # some are left, in other numbers per row
Y = np.arange(ROWS, dtype=np.float32)
MESHES = {"devices": js.make_mesh, "virtual": js.virtual_mesh}


@struct.dataclass
class Examples:
    x: Any
    y: Any
    scale: Any = None
    names: Any = struct.field(pytree_node=False, default=("x", "y"))


@jax.tree_util.register_pytree_node_class
class Padded:
    """Keeps the shape of the whole, which is no leaf."""

    def __init__(self, values, shape):
        self.values, self.of_all = values, shape

    def tree_flatten(self):
        return (self.values,), {"of": [self.of_all]}

    @classmethod
    def tree_unflatten(cls, static, children):
        return cls(*children, *static["of"])


def loss_fn(params, batch):
    leaves = [jnp.asarray(x, jnp.float32) for x in jax.tree.leaves(batch) if x.ndim]
    return params["w"] * sum(jnp.sum(x) / x.shape[0] for x in leaves)


def step_of(place, fn=loss_fn):
    mesh = MESHES[place]({"replica": 4})
    return js.make_train_step(fn, optax.sgd(0.1), sync="none", mesh=mesh)


CUT = {
    "dataclass": lambda: Examples(X, Y, np.float32(2)),  # which all share
    "other sizes in a mapping": lambda: FrozenDict(x=X, y=np.tile(Y, 2)),
    "bags": lambda: {"x": X, "ids": js.embedding.bags([[1], [], [2, 3], [4]] * 2, max_length=2)},
    "jagged": lambda: js.embedding.jagged(
        [1, 2, 3, 1, 2, 3], features=["a"], lengths=[1, 0, 2, 0] * 2, max_length=2
    ),
    "another static shape": lambda: Examples(X, Y, names=(4, ROWS)),
}


@pytest.mark.parametrize("name", CUT)
def test_leaves_that_count_examples_are_cut(name):
    batch, step = CUT[name](), step_of("devices")
    _, metrics = step(step.init({"w": np.float32(1)}), batch)
    parts = [
        jax.tree.map(lambda x, i=i: jnp.asarray(np.split(x, 4)[i] if np.ndim(x) else x), batch)
        for i in range(4)
    ]
    expected = [loss_fn({"w": np.float32(1)}, part) for part in parts]
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-6)


SPARSE = sparse.BCOO.fromdense(X, nse=16)
REFUSED = {
    "sparse": ({"x": SPARSE, "y": Y}, "'x' is a BCOO"),
    "sparse, a row an example": ({"x": sparse.BCOO.fromdense(X, n_batch=1), "y": Y}, "'x' is a BC"),
    "a shape beside": ({"x": Padded(X, X.shape), "y": Y}, "'x' is a Padded"),
    "leaves of other sizes": ({"x": Examples(X, np.tile(Y, 2)), "y": Y}, "'x' is a Examples"),
    "text": ({"deep": {"leaf": np.array(["a"] * ROWS)}, "x": X}, "'deep/leaf' of dtype <U1"),
    "big-endian": ({"x": X.astype(">f4"), "y": Y}, "'x' of dtype >f4"),
    "dates": ({"deep": {"leaf": np.zeros(ROWS, "datetime64[s]")}}, "'deep/leaf' of dtype datetime"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_replicas_cannot_share_out_is_named(name):
    batch, said = REFUSED[name]
    for place in MESHES:
        step = step_of(place)
        state = step.init({"w": np.float32(1)})
        uses = [step, step.evaluate, step.collect, lambda _, batch, step=step: step.place(batch)]
        if name == "sparse" and place == "devices":
            lies = NamedSharding(step.mesh, P("replica"))
            uses.append(lambda state, b, step=step, lies=lies: step(state, jax.device_put(b, lies)))
        for use in uses:
            with pytest.raises(ValueError, match=rf"`batch`.* {said}"):
                use(state, batch)
