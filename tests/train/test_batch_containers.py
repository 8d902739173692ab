"""Containers in batches are cut where each leaf counts examples, else refused by name."""

import collections
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
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


class Pair(NamedTuple):
    x: Any
    y: Any


CUT = {
    "dataclass": lambda: Examples(X, Y),
    "dataclass with what all share": lambda: Examples(X, Y, np.float32(2)),
    "dataclass beside": lambda: {"examples": Examples(X, None), "y": Y},
    "in a dataclass": lambda: Examples({"x": X}, Pair(Y, None)),
    "frozen": lambda: FrozenDict(x=X, y=Y),
    "other sizes in a mapping": lambda: FrozenDict(x=X, y=np.tile(Y, 2)),
    "named tuple": lambda: Pair(X, np.tile(Y, 2)),
    "ordered": lambda: collections.OrderedDict(x=X, y=Y),
    "bags": lambda: {"x": X, "ids": js.embedding.bags([[1], [], [2, 3], [4]] * 2, max_length=2)},
    "jagged": lambda: js.embedding.jagged(
        [1, 2, 3, 1, 2, 3], features=["a"], lengths=[1, 0, 2, 0] * 2, max_length=2
    ),
}
REFUSED = {
    "sparse": lambda: {"x": sparse.BCOO.fromdense(X, nse=16), "y": Y},
    "sparse, a row an example": lambda: {"x": sparse.BCOO.fromdense(X, n_batch=1), "y": Y},
    "sparse, as many elements as rows": lambda: {
        "x": sparse.BCOO.fromdense(np.eye(ROWS, dtype=np.float32)),
        "y": Y,
    },
    "sparse alone": lambda: (sparse.BCOO.fromdense(X, nse=16),),
    "compressed": lambda: {"x": sparse.BCSR.fromdense(X, nse=16), "y": Y},
    "a shape beside": lambda: {"x": Padded(X, X.shape), "y": Y},
    "leaves of other sizes": lambda: {"x": Examples(X, np.tile(Y, 2)), "y": Y},
    "leaves that count something else": lambda: {"x": Examples(np.tile(X, (2, 1)), None), "y": Y},
    "deep inside": lambda: {"x": Examples({"a": sparse.BCOO.fromdense(X, nse=16)}, None), "y": Y},
}


def loss_fn(params, batch):
    leaves = [jnp.asarray(x, jnp.float32) for x in jax.tree.leaves(batch) if x.ndim]
    return params["w"] * sum(jnp.sum(x) / x.shape[0] for x in leaves)


def step_of(place, mode="traced"):
    return js.make_train_step(
        loss_fn, optax.sgd(0.1), sync="none", mesh=MESHES[place]({"replica": 4}), mode=mode
    )


@pytest.mark.parametrize("place", MESHES)
@pytest.mark.parametrize("name", CUT)
def test_leaves_that_count_examples_are_cut(name, place):
    batch, step = CUT[name](), step_of(place)
    _, metrics = step(step.init({"w": np.float32(1)}), batch)
    parts = [
        jax.tree.map(lambda x, i=i: jnp.asarray(np.split(x, 4)[i] if np.ndim(x) else x), batch)
        for i in range(4)
    ]
    expected = [loss_fn({"w": np.float32(1)}, part) for part in parts]
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-6)


@pytest.mark.parametrize("place", MESHES)
@pytest.mark.parametrize("name", REFUSED)
def test_what_replicas_cannot_share_out_is_named(name, place):
    step = step_of(place)
    state, batch = step.init({"w": np.float32(1)}), REFUSED[name]()
    kinds = "BCOO|BCSR|Padded|Examples"
    calls = {
        "step": lambda: step(state, batch),
        "evaluate": lambda: step.evaluate(state, batch),
        "collect": lambda: step.collect(state, batch),
        "place": lambda: step.place(batch),
        "compiled": lambda: step.compiled(state, batch),
    }
    for call in calls.values():
        with pytest.raises(ValueError, match=rf"`batch`: '(x|0)' is a ({kinds}), wh"):
            call()


def test_what_a_user_has_placed_is_looked_at_too():
    step = step_of("devices")
    state = step.init({"w": np.float32(1)})
    placed = jax.device_put(REFUSED["sparse"](), NamedSharding(step.mesh, P("replica")))
    with pytest.raises(ValueError, match="'x' is a BCOO"):
        step(state, placed)


@hypothesis.given(rows=st.sampled_from([4, 8, 16]), static=st.lists(st.integers(1, 20), max_size=3))
def test_other_static_numbers_do_not_matter(rows, static):
    """Only a shape of the leaves is one of the whole."""
    examples = Examples(
        np.ones((rows, 3), np.float32), np.ones(rows, np.float32), names=tuple(static)
    )
    place = step_of("virtual").place
    if tuple(static) in [(rows, 3), (rows,)]:
        with pytest.raises(ValueError, match="is a Examples"):
            place(examples)
    else:
        place(examples)


@pytest.mark.parametrize("place", MESHES)
@pytest.mark.parametrize(
    "leaf",
    [
        np.array(["a"] * ROWS),
        np.array(["a"] * ROWS, object),
        X.astype(">f4"),
        np.zeros(ROWS, "datetime64[s]"),
        np.zeros(ROWS, [("a", "f4")]),
        "text",
    ],
    ids=lambda x: str(np.asarray(x).dtype),
)
def test_a_leaf_that_is_no_array_to_jax_is_named(leaf, place):
    step = step_of(place)
    state = step.init({"w": np.float32(1)})
    with pytest.raises(ValueError, match=r"`batch`.* 'deep/leaf' of dtype") as error:
        step(state, {"deep": {"leaf": leaf}, "x": X})
    assert str(np.asarray(leaf).dtype) in str(error.value)


@pytest.mark.parametrize("place", MESHES)
@pytest.mark.parametrize(
    ("metric", "dtype"),
    [
        (lambda: "text", "<U4"),
        (lambda: jax.random.key(0), "key<fry>"),
        (lambda: object(), "object"),
        (lambda: {"deep": [jnp.ones(()), jax.random.key(0)]}, "key<fry>"),
    ],
    ids=["text", "key", "object", "deep"],
)
def test_a_metric_without_a_mean_is_named(metric, dtype, place):
    mesh = MESHES[place]({"replica": 4})
    step = js.make_train_step(
        lambda p, b: (jnp.mean(b) * p["w"], {"odd": metric()}),
        optax.sgd(0.1),
        sync="none",
        mesh=mesh,
    )
    with pytest.raises(ValueError, match=r"`loss_fn`.* metrics .*'odd") as error:
        step(step.init({"w": np.float32(1)}), X)
    assert dtype in str(error.value)
