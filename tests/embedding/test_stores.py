"""Where rows lie: each in one place, alike for many numbers of devices, small ids apart."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

import jaxslowmo as js
from embedding.shared import embeddings_of_all_kinds

KEY = jax.random.key(3)


def emb_of(tables, size):
    return js.embeddings(tables, axis_name="shard", optimizer=js.rowwise_sgd(0.1)).over(size)


@pytest.mark.parametrize("size", [1, 3, 8, 64])
def test_every_row_has_a_place_of_its_own_and_neighbours_lie_apart(size):
    """Read off the arrays that are stored, block by block as devices hold them."""
    emb = emb_of({"t": js.Table(1000, 1)}, size)
    numbers = 1 + np.arange(1000.0)[:, None]
    stored = np.asarray(emb.write({"t": numbers})["t"])[:, 0]
    np.testing.assert_array_equal(emb.read({"t": stored[:, None]})["t"], numbers)
    assert len(stored) % (64 * size // np.gcd(64, size)) == 0
    assert len(stored) - 1000 < 64 * size
    assert sorted(stored[stored > 0]) == numbers[:, 0].tolist()
    owner = {int(x) - 1: i // (len(stored) // size) for i, x in enumerate(stored) if x}
    owners = np.array([owner[row] for row in range(1000)])
    if 64 % size == 0:
        assert all(len(set(owners[i : i + size])) == size for i in range(1000 - size))
    assert np.ptp(np.bincount(owners[:640], minlength=size)) <= 64 // size
    if 64 % size == 0:  # then these numbers of devices store a table alike
        whole = emb_of({"t": js.Table(1000, 1)}, 1).write({"t": numbers})["t"]
        np.testing.assert_array_equal(whole[:, 0], stored)


def test_tables_are_read_off_devices_with_explicit_axes(mesh_of):
    """Also without jit, where types tell how arrays lie."""
    mesh = mesh_of({"shard": 4}, explicit=True)
    assert AxisType.Explicit in mesh.axis_types
    emb = embeddings_of_all_kinds().over(mesh)
    whole = jax.jit(emb.init)(KEY)
    placed = {n: jax.device_put(x, NamedSharding(mesh, emb.specs[n])) for n, x in whole.items()}
    bags = {"t0": np.array([[0, 39], [-1, 7]])}
    used = jax.jit(lambda stored: (emb.write(emb.read(stored)), emb.reference(stored, bags)))
    jax.tree.map(np.testing.assert_array_equal, used(placed), used(whole))
    jax.tree.map(np.testing.assert_array_equal, emb.read(placed), emb.read(whole))


def test_a_device_makes_its_part_of_the_first_values_and_never_a_whole_table():
    own_values = jax.nn.initializers.constant(0.5)
    columns = js.Table(64 * 50, 16, shard="column", init=own_values)
    tables = {"t": js.Table(64 * 50, 16), "c": columns}
    emb, mesh = emb_of(tables, 8), js.make_mesh({"shard": 8})
    init = jax.shard_map(lambda: emb.init_local(KEY), mesh=mesh, in_specs=(), out_specs=emb.specs)
    program = jax.jit(init).lower().compile()
    jax.tree.map(np.testing.assert_array_equal, program(), emb.init(KEY))
    np.testing.assert_array_equal(emb.read(emb.init(KEY))["c"], np.full((64 * 50, 16), 0.5))
    memory = program.memory_analysis()
    own = 2 * 4 * 64 * 50 * 16 // 8
    assert memory.output_size_in_bytes < 1.01 * own
    assert memory.temp_size_in_bytes < 3 * own


def test_first_values_do_not_depend_on_how_a_table_is_shared_nor_on_other_tables():
    """They are uniform, those of other names and keys are others, and padding is zero."""
    shape, names = (100, 64), ("t", "other")
    kinds = [("row", 1), ("column", 2), ("table", 4)]

    @jax.jit
    def made(key):
        found = []
        for shard, size in kinds:
            tables = {n: js.Table(*shape, shard=shard) for n in (names if size > 1 else names[:1])}
            emb = emb_of(tables, size)
            found.append((emb.read(emb.init(key)), emb.init(key)))
        return found

    (alone, stored), *others = made(KEY)
    for found, _ in others:
        np.testing.assert_array_equal(found["t"], alone["t"])
        assert not np.any(found["other"] == alone["t"])
    assert not np.any(np.asarray(made(jax.random.key(4))[0][0]["t"]) == alone["t"])
    table = np.asarray(alone["t"])
    assert 0.095 < np.abs(table).max() <= 0.1
    assert abs(table.mean()) < 0.005
    assert sum(not row.any() for row in np.asarray(stored["t"])) == 28
