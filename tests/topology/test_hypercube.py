"""The hypercube: partners by bits, exact after one rotation."""

import numpy as np
import pytest

from jaxslowmo import topology


@pytest.mark.parametrize("bits", range(6))
def test_partners_differ_in_one_bit_and_swap(bits):
    graph = topology.hypercube(2**bits)
    assert graph.num_rounds == max(1, bits)
    assert graph.is_regular
    for step in range(bits):
        out = graph.out_peers(step)
        assert [peer for (peer,) in out] == [node ^ (1 << step) for node in range(2**bits)]
        assert out == graph.in_peers(step)
    product = np.eye(2**bits)
    for step in range(bits):
        product = topology.mixing_matrix(graph, None, step) @ product
    np.testing.assert_allclose(product, np.full_like(product, 2.0**-bits))


def test_two_peers_per_step():
    graph = topology.hypercube(8, peers_per_step=2)
    assert [graph.out_peers(step)[0] for step in range(3)] == [(1, 2), (4, 1), (2, 4)]


@pytest.mark.parametrize("size", [3, 6, 12])
def test_other_sizes_are_refused(size):
    message = f"hypercube: `num_nodes` must be a power of 2.*got {size}"
    with pytest.raises(ValueError, match=message):
        topology.hypercube(size)
