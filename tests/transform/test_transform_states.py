"""Stacked state on the host, for other numbers of replicas."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType

from jaxslowmo.transform import StatePlacement, carry_leaf, carry_plainly, replica_average, stacked

FOUR = StatePlacement(4, {"replica": 4})
TWO = StatePlacement(2, {"replica": 2})


def test_sizes_along_axes():
    at = StatePlacement(6, {"node": 3, "replica": 2, "fsdp": 4}, frozenset({"fsdp"}))
    names = [None, "node", ("node", "replica"), "elsewhere", ("fsdp", "elsewhere")]
    assert [at.size(name) for name in names] == [1, 3, 6, 1, 4]
    mesh = at.mesh()
    assert dict(mesh.shape) == at.axis_sizes
    assert mesh.axis_types == (AxisType.Manual, AxisType.Manual, AxisType.Auto)


def test_names_inside_of_a_field_are_those_after_it():
    names = ("base/anchor/w", "1/base/base/x", "anchor/base", "database/y")
    assert StatePlacement(1, {}, names=names).inside("base").names == ("anchor/w", "base/x")


@given(
    values=st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=5),
    dtype=st.sampled_from(["float32", "float64", "bfloat16", "int32"]),
)
def test_an_average_is_taken_in_float64_and_exact_where_replicas_agree(values, dtype):
    """What is no float is replica 0's."""
    x = np.asarray(values).astype(jnp.dtype(dtype))
    found = replica_average(x)
    assert found.dtype == x.dtype
    is_kept = dtype == "int32" or np.all(x == x[0])
    assert found == (x[0] if is_kept else np.mean(x.astype(np.float64)).astype(x.dtype))


class State(NamedTuple):
    count: np.ndarray
    value: np.ndarray


def test_leaves_are_averaged_only_where_their_number_changes():
    state = State(np.full(4, 7, np.int32), np.float32([1, 2, 3, 6]))
    assert carry_leaf(state.value, FOUR, FOUR) is state.value
    moved = carry_plainly(state, None, FOUR, TWO)
    assert (moved.notes, type(moved.state)) == ((), State)
    assert [x.tolist() for x in moved.state] == [[7, 7], [3, 3]]
    assert stacked(np.arange(3), TWO).strides[0] == 0  # one for all is a view
