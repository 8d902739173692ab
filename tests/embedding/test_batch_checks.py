"""Ids that are in no table, and more of them than slots: on the host and on devices."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxslowmo as js


def emb_of(axis_name=None, **options) -> js.Embeddings:
    tables = {"user": js.Table(300, 2, features=("buyer", "seller")), "item": js.Table(1, 2)}
    return js.embeddings(tables, axis_name=axis_name, optimizer=js.rowwise_sgd(0.1), **options)


@pytest.mark.parametrize(
    ("bags", "message"),
    [
        (
            {"seller": np.array([[1, 2], [7, 300]])},
            r"'seller' has the id 300 in row 1, place 1 .* table 'user' has 300 rows, 0 to 299 \(1",
        ),
        ({"item": np.array([0, 1, 1])}, r"'item' has the id 1 in row 1 .* 1 rows.*\(2 such ids"),
        ({"buyer": np.array([2**32 + 1])}, r"'buyer' has the id 4294967297 in row 0"),
        ({"buyer": js.Bags(np.array([[2**64 - 1]], np.uint64))}, r"the id 18446744073709551615"),
    ],
)
def test_ids_of_the_host_that_are_in_no_table_are_named(bags, message):
    emb = emb_of()
    for look in (emb.check, emb.exchange_ids):
        with pytest.raises(ValueError, match=message):
            look(bags)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64, np.uint64])
def test_ids_of_any_type_are_those_rows(dtype):
    """A table of 300 rows is more than uint8 can count."""
    emb = emb_of()
    table = np.arange(600, dtype=np.float32).reshape(300, 2)
    stored = emb.write({"user": table, "item": np.zeros((1, 2))})
    ids = np.array([3, 0, 127, 255 if dtype == np.uint8 else 5]).astype(dtype)
    requests = emb.exchange_ids({"buyer": ids})
    found = emb.pooled(emb.lookup(stored, requests), requests)["buyer"]
    np.testing.assert_array_equal(found, table[ids.astype(int)])


def test_negative_ids_are_padding_whatever_their_number():
    emb = emb_of()
    requests = emb.exchange_ids({"buyer": np.array([-1, -(2**40), -300])})
    assert requests.slots["buyer"].tolist() == [-1, -1, -1]
    assert int(emb.metrics(requests)["embeddings/user/invalid"]) == 0


def test_padding_that_devices_would_take_for_an_id_is_refused():
    """As what NumPy makes of NaN: of its 64 bits jax keeps the last 32, which are a 0."""
    ids = np.array([[3, np.iinfo(np.int64).min]])
    with pytest.raises(ValueError, match=r"'buyer' has the id -9223372036854775808, .*: use -1"):
        emb_of().check({"buyer": ids})
    emb_of().check({"buyer": np.maximum(ids, -(2**31))})


def test_on_devices_they_are_counted_and_the_counts_are_refused():
    emb = emb_of()
    ids = {"buyer": jnp.array([300, 5]), "seller": jnp.array([2**31 - 1, -1])}
    metrics = emb.metrics(emb.exchange_ids(ids))
    assert int(metrics["embeddings/user/invalid"]) == 2
    assert int(metrics["embeddings/user/asked"]) == 1
    assert "embeddings/item/invalid" not in metrics
    with pytest.raises(ValueError, match=r"2 ids of feature 'buyer', feature 'seller' .* 'user'"):
        emb.refuse({"loss": 1.0, **metrics})
    emb.refuse({"loss": 1.0})


def test_a_capacity_that_does_not_suffice_is_refused_on_the_host():
    emb = emb_of("shard", capacity=2).over(2)
    # Of 12 rows in two parts each owner has three of every six.
    bags = {"buyer": np.arange(12), "item": np.zeros(12, int)}
    assert emb.slots_needed(bags, num_parts=2) == {"user": 3, "item": 1}
    message = r"'user' is 2 slots .* part 0 of 2 of the batch has 3 distinct ids of one, 1 too many"
    with pytest.raises(ValueError, match=message):
        emb.check(bags, num_parts=2)
    emb.check(bags, num_parts=4)
    emb_of("shard", capacity=2, overflow="drop").over(2).check(bags, num_parts=2)
    emb_of("shard", capacity={"user": 3}).over(2).check(bags, num_parts=2)
    with pytest.raises(ValueError, match=r"'user' is split into 5 equal parts.*has 12 rows"):
        emb.check(bags, num_parts=5)
    with pytest.raises(ValueError, match="`num_parts` must be an int >= 1, got 0"):
        emb.check(bags, num_parts=0)


def test_bags_that_are_all_empty_need_a_slot():
    """What `slots_needed` says is a capacity."""
    emb = emb_of()
    needed = emb.slots_needed({"buyer": np.full((4, 3), -1)})
    assert needed == {"user": 1}
    emb_of(capacity=needed).check({"buyer": np.full((4, 3), -1)})


@pytest.mark.parametrize("overflow", ["error", "drop"])
def test_ids_without_a_slot_are_zeros_and_counted(overflow):
    emb = emb_of(capacity=2, overflow=overflow)
    stored = emb.write({"user": np.ones((300, 2)), "item": np.ones((1, 2))})
    requests = emb.exchange_ids({"buyer": jnp.array([7, 3, 9, 3]), "item": jnp.zeros(4, int)})
    found = emb.pooled(emb.lookup(stored, requests), requests)
    assert found["buyer"].sum() == 6  # three of four ids, one of them twice
    assert found["item"].sum() == 8
    metrics = emb.metrics(requests)
    assert int(metrics["embeddings/user/asked"]) == 3
    assert int(metrics["embeddings/user/overflow"]) == 1
    if overflow == "drop":
        emb.refuse(metrics)
    else:
        with pytest.raises(ValueError, match=r"1 distinct ids of table 'user' had no slot.* is 2 "):
            emb.refuse(metrics)
