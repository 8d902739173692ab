"""Ids that are in no table, and more of them than slots: on the host and on devices."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxslowmo as js


def emb_of(axis_name=None, **options) -> js.embedding.Embeddings:
    tables = {"user": js.Table(300, 2, features=("buyer", "seller")), "item": js.Table(1, 2)}
    return js.embeddings(tables, axis_name=axis_name, optimizer=js.rowwise_sgd(0.1), **options)


def test_an_id_of_the_host_that_is_in_no_table_is_named_with_its_place():
    emb = emb_of()
    emb.check({"seller": np.array([[1, 2], [7, 299]]), "item": np.zeros(3, np.int8)})
    for look in (emb.check, emb.exchange_ids):
        with pytest.raises(ValueError, match=r"'seller'.*'user'.* 300 in row 1, place 1 "):
            look({"seller": np.array([[1, 2], [7, 300], [300, 0]])})
    with pytest.raises(ValueError, match=r"'item'.* 1 in row 1 of"):
        emb.check({"item": np.array([0, 1, 1])})


def test_padding_that_devices_would_take_for_an_id_is_refused():
    """As what NumPy makes of NaN: of its 64 bits jax keeps the last 32, which are a 0."""
    emb_of().check({"buyer": np.array([[3, -(2**31)]])})
    for least in (-(2**31) - 1, np.iinfo(np.int64).min):
        with pytest.raises(ValueError, match=f"'buyer'.*{least}"):
            emb_of().check({"buyer": np.array([[3, least]])})


def test_a_capacity_that_does_not_suffice_is_refused_on_the_host():
    emb = emb_of("shard", capacity=2).over(2)
    # Of 12 rows in two parts each owner has three of every six.
    bags = {"buyer": np.arange(12), "item": np.zeros(12, int)}
    assert emb.slots_needed(bags, num_parts=2) == {"user": 3, "item": 1}
    # What it says is a capacity, of bags that are all empty, too.
    assert emb.slots_needed({"buyer": np.full((4, 3), -1)}) == {"user": 1}
    with pytest.raises(ValueError, match=r"'user' is 2 .*part 0 of 2 .* 3 distinct"):
        emb.check(bags, num_parts=2)
    emb.check(bags, num_parts=4)
    emb_of("shard", capacity=2, overflow="drop").over(2).check(bags, num_parts=2)
    emb_of("shard", capacity={"user": 3}).over(2).check(bags, num_parts=2)
    # Some of a table's ids are on devices: nobody can tell.
    mixed = {"buyer": np.arange(12), "seller": jnp.arange(12)}
    assert emb.slots_needed(mixed) == {}
    emb.check(mixed, num_parts=2)
