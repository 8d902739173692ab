"""Half precision is summed in float32; tables of several optimizers share no array.

The rules themselves are compared with NumPy in `test_embeddings.py`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import jaxslowmo as js

SGD = js.rowwise_sgd(0.1)


def test_half_precision_is_summed_in_float32():
    """In bfloat16 256 + 1 is 256, so a sum of ones would end there; and so would its gradient."""
    table = js.Table(8, 3, dtype=jnp.bfloat16)
    emb = js.embeddings({"t": table}, axis_name=None, optimizer=SGD)
    stored = emb.write({"t": np.concatenate([[[256, 1, 1]], np.ones((7, 3))])})
    requests = emb.exchange_ids({"t": jnp.array([[0] + [1] * 255])})

    def loss(vectors):
        out = emb.pooled(vectors, requests)["t"]
        return jnp.sum(out.astype(jnp.float32) ** 2) / 2, out

    grads, out = jax.grad(loss, has_aux=True)(emb.lookup(stored, requests))
    assert out.dtype == grads["t"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(out.astype(np.float32), [[512, 256, 256]])
    # Row 1 occurs 255 times, each with the gradient `out`.
    want = jnp.asarray([255 * 512, 255 * 256, 255 * 256], jnp.bfloat16)
    np.testing.assert_array_equal(grads["t"][1], want)


@dataclasses.dataclass
class Falling:
    """A schedule without a hash."""

    first: float

    def __call__(self, count):
        return self.first / (1.0 + count)


def test_tables_of_several_optimizers_share_no_array():
    """Names say which tables do, since a checkpoint must not be restored in another order."""

    def names_of(**own):
        tables = {n: js.Table(8, 4, shard="table", optimizer=own.get(n)) for n in "abc"}
        return set(js.embeddings(tables, axis_name="s", optimizer=SGD).over(2).specs)

    assert names_of(a=js.rowwise_sgd(0.1)) == {"tables_float32_4_over_2"}
    assert len(names_of(a=js.rowwise_sgd(Falling(1.0)), b=js.rowwise_sgd(Falling(1.0)))) == 2
    a, b = names_of(a=js.rowwise_sgd(0.2)), names_of(b=js.rowwise_sgd(0.2))
    assert (len(a), len(b), len(a | b)) == (2, 2, 4)
