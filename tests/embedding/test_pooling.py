"""From vectors to one per bag: empty bags, weights, positions, what has no slot."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxslowmo as js

TABLE = np.arange(12, dtype=np.float32).reshape(4, 3) + 1


def emb_of(**options) -> js.Embeddings:
    table = js.Table(4, 3, **options)
    return js.embeddings({"t": table}, axis_name=None, optimizer=js.rowwise_sgd(0.1))


def looked_up(emb, bags, params=None, table=TABLE):
    """By way of requests and slots, and gradients of the sum of squares: of rows, of `params`."""

    @jax.jit
    def run(table, bags, params):
        stored = emb.write({"t": table})
        requests = emb.exchange_ids({"t": bags})

        def loss(vectors, params):
            out = emb.pooled(vectors, requests, params)["t"]
            return jnp.sum(out.astype(jnp.float32) ** 2), out

        grads, out = jax.grad(loss, argnums=(0, 1), has_aux=True)(
            emb.lookup(stored, requests), params or {}
        )
        return out, emb.reference(stored, {"t": bags}, params)["t"], grads

    out, reference, grads = run(table, bags, params)
    np.testing.assert_array_equal(reference, out)
    return np.asarray(out), (np.asarray(grads[0]["t"]), grads[1])


BAGS = np.array([[0, 2, -1], [-1, -1, -1], [3, 3, 1]])
SUM = np.array([[8, 10, 12], [0, 0, 0], [24, 27, 30]], np.float32)


@pytest.mark.parametrize("pooling", ["sum", "mean", None])
def test_padding_counts_as_nothing_and_duplicates_count(pooling):
    out, (grads, _) = looked_up(emb_of(pooling=pooling), jnp.asarray(BAGS))
    if pooling is None:
        np.testing.assert_array_equal(out.sum(axis=1), SUM)
        np.testing.assert_array_equal(out[2, 0], TABLE[3])
        assert not out[BAGS < 0].any()
    else:
        counts = np.array([[2], [1], [3]]) if pooling == "mean" else 1
        np.testing.assert_allclose(out, SUM / counts, rtol=1e-6)
    assert np.isfinite(grads).all()
    assert grads[:4].any(axis=1).all()
    assert not grads[4:].any()  # slots without a row


def test_weights_multiply_vectors_and_those_of_padding_do_not_count():
    weights = jnp.array([[2.0, 0.0, jnp.nan], [jnp.inf] * 3, [1.0, -1.0, 0.5]])
    out, (grads, _) = looked_up(emb_of(), js.Bags(jnp.asarray(BAGS), weights))
    want = [2 * TABLE[0], 0 * TABLE[0], 0.5 * TABLE[1]]
    np.testing.assert_allclose(out, want, rtol=1e-6)
    assert np.isfinite(grads).all()


def test_a_mean_divides_by_the_number_of_ids_whatever_the_weights():
    weights = jnp.array([[2.0, 0.0, 7.0], [1.0] * 3, [1.0, -1.0, 0.5]])
    out, _ = looked_up(emb_of(pooling="mean"), js.Bags(jnp.asarray(BAGS), weights))
    np.testing.assert_allclose(out, [TABLE[0], 0 * TABLE[0], TABLE[1] / 6], rtol=1e-6)


def test_one_id_each_gives_a_vector_each():
    for pooling in ("mean", None):
        out, _ = looked_up(emb_of(pooling=pooling), jnp.array([3, -1, 0], jnp.int8))
        np.testing.assert_array_equal(out, [TABLE[3], 0 * TABLE[0], TABLE[0]])


def test_ids_out_of_range_are_nan_and_never_another_row():
    ids = jnp.array([[4, 0], [2, 1], [2**31 - 1, -1]])
    out, (grads, _) = looked_up(emb_of(), ids)
    assert np.isnan(out[[0, 2]]).all()
    np.testing.assert_array_equal(out[1], TABLE[2] + TABLE[1])
    assert np.isnan(grads[0]).all()  # of row 0, which shares a bag with an id that is not there
    np.testing.assert_allclose(grads[1:3], 2 * np.stack([out[1], out[1]]))


def test_positions_weigh_and_have_a_gradient():
    emb = emb_of(position_weights="towers/position")
    params = {"towers": {"position": jnp.array([1.0, 2.0, 4.0]), "other": jnp.ones(1)}}
    out, (_, grads) = looked_up(emb, jnp.asarray(BAGS), params)
    want = [TABLE[0] + 2 * TABLE[2], 0 * TABLE[0], TABLE[3] + 2 * TABLE[3] + 4 * TABLE[1]]
    np.testing.assert_allclose(out, want, rtol=1e-6)
    first = 2 * (want[0] @ TABLE[0] + want[2] @ TABLE[3])
    np.testing.assert_allclose(grads["towers"]["position"][0], first, rtol=1e-6)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (None, r"leaf 'p' of the dense parameters, which are none"),
        ({"q": jnp.ones(3)}, r"leaf 'p' of the dense parameters, which are 'q'"),
        ({"p": jnp.ones(2)}, r"'p' of feature 't' must have the shape \(3,\).*\(2,\)"),
    ],
)
def test_position_weights_must_be_there_and_fit(params, message):
    emb = emb_of(position_weights={"t": "p"})
    with pytest.raises(ValueError, match=message):
        emb.reference(emb.write({"t": TABLE}), {"t": BAGS}, params)


def test_half_precision_is_summed_in_float32():
    """In bfloat16 256 + 1 is 256, so a sum of ones would end there; and so would its gradient."""
    emb = emb_of(dtype=jnp.bfloat16)
    table = np.array([[256, 1, 1]] + [[1, 1, 1]] * 3)
    out, (grads, _) = looked_up(emb, jnp.array([[0] + [1] * 255]), table=table)
    assert out.dtype == grads.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out.astype(np.float32), [[512, 256, 256]])
    # Row 1 occurs 255 times, each with the gradient 2 * out.
    want = jnp.asarray([255 * 2 * 512, 255 * 2 * 256, 255 * 2 * 256], jnp.bfloat16)
    np.testing.assert_array_equal(grads[1], want)
