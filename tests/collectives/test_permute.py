"""Neighbour exchange by partial permutations, in every execution."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.collectives import permute
from jaxslowmo.collectives._permute import complete_permutation
from support.executions import EXECUTIONS, lift

NODES = 4
PERMUTATIONS = {
    "whole": ((0, 1), (1, 2), (2, 3), (3, 0)),
    "swap": ((0, 2), (2, 0)),
    "path": ((0, 1), (1, 2), (2, 3)),
    "one": ((3, 1),),
    "to itself": ((0, 0), (1, 3)),
    "none": (),
}


def expected(x: np.ndarray, permutation) -> np.ndarray:
    out = np.zeros_like(x)
    for source, destination in permutation:
        out[destination] = x[source]
    return out


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.int32])
@pytest.mark.parametrize("name", PERMUTATIONS)
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_receives_what_the_source_sends_or_zeros(execution, name, dtype, strict_promotion):
    x = np.arange(1, 1 + 3 * NODES).reshape(NODES, 3).astype(dtype)
    permutation = PERMUTATIONS[name]
    program = lift(
        lambda v: permute(v, "replica", permutation), {"replica": NODES}, execution, (False,)
    )
    found = program(x)
    assert found.dtype == x.dtype
    np.testing.assert_array_equal(found, expected(x, permutation))


@pytest.mark.parametrize("axes", [("a", "b"), ("b", "a")])
@pytest.mark.parametrize("name", PERMUTATIONS)
def test_over_two_axes_of_vmap(name, axes):
    """Nodes count in the order in which the axes are named."""
    x = np.arange(1, 19, dtype=np.float32).reshape(2, 3, 3)  # axes a and b

    def exchange(v):
        return permute(v, axes, PERMUTATIONS[name])

    found = jax.vmap(jax.vmap(exchange, axis_name="b"), axis_name="a")(x)
    order = (0, 1, 2) if axes == ("a", "b") else (1, 0, 2)
    nodes = x.transpose(order).reshape(6, 3)
    np.testing.assert_array_equal(
        np.asarray(found).transpose(order).reshape(6, 3), expected(nodes, PERMUTATIONS[name])
    )


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_nothing_of_nodes_that_do_not_send_leaks(execution):
    """Not even NaN, where whole permutations take the place of partial ones."""
    x = np.full((NODES, 2), np.nan, np.float32)
    x[3] = 7
    program = lift(
        lambda v: permute(v, "replica", PERMUTATIONS["one"]),
        {"replica": NODES},
        execution,
        (False,),
    )
    np.testing.assert_array_equal(program(x), expected(x, PERMUTATIONS["one"]))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("order", [("node", "replica"), ("replica", "node")])
def test_nodes_of_several_axes_count_in_row_major_order(order, check_vma):
    axes = {"node": 2, "replica": 4}
    shape = tuple(axes[name] for name in order)
    permutation = tuple((i, (3 * i + 1) % 8) for i in range(8) if i != 5)
    x = np.arange(1.0, 9.0, dtype=np.float32)
    program = jax.shard_map(
        lambda v: permute(v, order, permutation),
        mesh=js.make_mesh(axes),
        in_specs=P(order),
        out_specs=P(order),
        check_vma=check_vma,
    )
    found = np.asarray(jax.jit(program)(x))
    np.testing.assert_array_equal(found, expected(x, permutation))
    assert np.prod(shape) == len(found)


@pytest.mark.parametrize("inner", ["replica", "device"])
def test_beside_another_mapped_axis(inner):
    """An axis of devices inside of a virtual one, and the other way round."""
    permutation = PERMUTATIONS["path"]
    x = np.arange(1.0, 9.0, dtype=np.float32).reshape(NODES, 2)
    program = lift(
        lambda v: permute(v, "replica", permutation),
        {"replica": NODES, "device": 2},
        "shard_map",
        (True,),
    )
    if inner == "device":  # virtual replicas on each device, virtual devices on each replica
        fn = lambda v: permute(v, "replica", permutation)  # noqa: E731
        program = jax.jit(jax.vmap(jax.vmap(fn, axis_name="device"), axis_name="replica"))
        np.testing.assert_array_equal(program(x), expected(x, permutation))
        return
    fn = jax.shard_map(
        lambda v: jax.vmap(lambda w: permute(w, "replica", permutation), axis_name="device")(v[0])[
            None
        ],
        mesh=js.make_mesh({"replica": NODES}),
        in_specs=P("replica"),
        out_specs=P("replica"),
    )
    np.testing.assert_array_equal(jax.jit(fn)(x), expected(x, permutation))


def emitted(execution: str, permutation) -> list[tuple[int, int]]:
    program = lift(
        lambda v: permute(v, "replica", permutation), {"replica": NODES}, execution, (False,)
    )
    text = program.lower(np.ones((NODES, 2), np.float32)).as_text()
    (numbers,) = re.findall(r"source_target_pairs = dense<(\[\[.*?\]\])>", text)
    found = [int(n) for n in re.findall(r"\d+", numbers)]
    return sorted(zip(found[::2], found[1::2], strict=True))


@pytest.mark.parametrize("execution", ["shard_map", "shard_map_unchecked", "pmap"])
@pytest.mark.parametrize("name", ["whole", "path", "one"])
def test_devices_send_only_existing_pairs(execution, name):
    assert emitted(execution, PERMUTATIONS[name]) == sorted(PERMUTATIONS[name])


@given(st.integers(1, 12), st.data())
def test_completed_permutations_are_permutations(size, data):
    count = data.draw(st.integers(0, size))
    sources, destinations = (data.draw(st.permutations(range(size)))[:count] for _ in range(2))
    partial = list(zip(sources, destinations, strict=True))
    whole = complete_permutation(partial, size)
    assert set(partial) <= set(whole)
    assert sorted(s for s, _ in whole) == sorted(d for _, d in whole) == list(range(size))
    idle = set(range(size)) - set(sources) - set(destinations)
    assert {(node, node) for node in idle} <= set(whole)
