"""Small models, batches and meshes, and how parts are joined in every checkout."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxslowmo as js

MESHES = {
    "one level": {"replica": 4},
    "two levels": {"replica": 2, "device": 2},
    "virtual": {"replica": 4},
    "shards": {"replica": 2, "shard": 2},
    "one shard": {"replica": 2, "shard": 1},
}
HAS_SPECS = hasattr(js, "GradientTransform")
"""Whether gradient transforms say what they do, so that `js.chain` takes any of them."""


def joined(*transforms: Any) -> Any:
    """A chain whose parts a training step can see in this checkout."""
    return js.chain(*transforms) if HAS_SPECS else optax.chain(*transforms)


def mesh_of(name: str) -> Any:
    """The mesh of a name of `MESHES`."""
    sizes = MESHES[name]
    return js.virtual_mesh(sizes) if name == "virtual" else js.make_mesh(sizes)


def parameters(dtypes: str = "float32") -> dict[str, Any]:
    """One copy: a matrix, a vector, a scalar; with "mixed" the vector in bfloat16."""
    rng = np.random.default_rng(7)
    vector = jnp.asarray(rng.normal(size=5), "bfloat16" if dtypes == "mixed" else "float32")
    matrix = jnp.asarray(rng.normal(size=(6, 5)) / 2, jnp.float32)
    return {"in": {"bias": vector, "w": matrix}, "scale": jnp.float32(0.7)}


def batches(count: int, seed: int = 0, rows: int = 16) -> list[tuple[np.ndarray, np.ndarray]]:
    """`(x, y)` of shapes (rows, 6) and (rows,) in float32."""
    rng = np.random.default_rng(seed)
    return [
        (rng.normal(size=(rows, 6)).astype("f4"), rng.normal(size=rows).astype("f4"))
        for _ in range(count)
    ]


def loss(params: Any, batch: Any) -> Any:
    """Least squares of a small net."""
    x, y = batch
    hidden = jnp.tanh(x @ params["in"]["w"] + params["in"]["bias"])
    return jnp.mean((hidden.sum(-1) * params["scale"] - y).astype(jnp.float32) ** 2)


def loss_with_state(params: Any, batch: Any, *, rng: Any, model_state: Any) -> Any:
    """The same with noise, a running mean, a counter and a metric."""
    x, y = batch
    noise = 0.1 * jax.random.normal(rng, y.shape)
    mean = 0.9 * model_state["mean"] + 0.1 * jnp.mean(x, axis=0).astype(jnp.float32)
    state = {"mean": mean, "count": model_state["count"] + 1}
    value = loss(params, (x - mean.astype(x.dtype), y + noise.astype(y.dtype)))
    return value, ({"largest": jnp.max(x).astype(jnp.float32)}, state)


def model_state() -> dict[str, Any]:
    """One copy of what `loss_with_state` keeps."""
    return {"mean": jnp.zeros(6), "count": jnp.int32(0)}


ROWS = {"item": (40, 4), "user": (24, 4)}


def table_parameters() -> dict[str, Any]:
    """Dense parameters of `table_loss`."""
    return {"b": jnp.float32(0.1), "w": jnp.linspace(-1.0, 1.0, 8)}


def table_batches(count: int, seed: int = 0, rows: int = 16) -> list[dict[str, np.ndarray]]:
    """Bags of items, some empty, and a user each; frequent ids are frequent."""
    rng = np.random.default_rng(seed)
    return [
        {
            "item": np.where(
                rng.random((rows, 3)) < 0.3, -1, rng.integers(0, 40, (rows, 3)) ** 2 // 40
            ).astype("i4"),
            "user": rng.integers(0, 24, rows).astype("i4"),
            "y": rng.normal(size=rows).astype("f4"),
        }
        for _ in range(count)
    ]


def tables(shard: str = "row", optimizer: str = "adagrad") -> Any:
    """Two tables of one width over the axis "shard"."""
    made = {
        "item": js.Table(*ROWS["item"], shard=shard, pooling="mean"),
        "user": js.Table(*ROWS["user"], shard=shard),
    }
    rule = js.rowwise_adagrad(0.5) if optimizer == "adagrad" else js.rowwise_sgd(0.5)
    return js.embeddings(made, axis_name="shard", optimizer=rule)


def table_loss(params: Any, batch: Any, *, embedded: Any) -> Any:
    """Least squares of what was looked up."""
    vectors = jnp.concatenate([embedded["item"], embedded["user"]], axis=1)
    guess = jnp.tanh(vectors @ params["w"].astype(vectors.dtype) + params["b"])
    return jnp.mean((guess - batch["y"]).astype(jnp.float32) ** 2)
