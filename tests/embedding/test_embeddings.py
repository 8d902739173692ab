"""Lookups, gradients and updates are those of whole tables, however devices share them.

The oracle is NumPy and goes through a batch id by id. Tables, bags, optimizers and meshes are
random: all ways to share and to pool, weights, positions, repeated and wrong ids, half precision.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxslowmo as js
from embedding.oracle import embedded, gradients, host, kept_at_first, updated
from embedding.worlds import LAYOUTS, bags_of, program_of, slopes_of, world_of
from support.exhaustive import sweep

UPDATES, IDLE = 3, 1  # of three updates the second is not active


def reader_of(emb):
    """Return `(stored, accumulators) -> (tables, kept)`: each row's, wherever it is stored."""

    @jax.jit
    def read(stored, accumulators):
        by_part = {}
        for store, arrays in accumulators.items():
            parts = arrays._asdict() if isinstance(arrays, tuple) else {"": arrays}
            for part, x in parts.items():
                by_part.setdefault(part, {})[store] = x
        return emb.read(stored), {part: emb.read(arrays) for part, arrays in by_part.items()}

    return lambda *arrays: jax.tree.map(host, read(*arrays))


class Replica:
    """The tables of one replica in NumPy."""

    def __init__(self, world, read, rng):
        self.world, self.read, self.tables, self.kept = world, read, {}, {}
        for name, table in world.emb.tables.items():
            values = rng.normal(size=(table.num_rows, table.dim))
            self.tables[name] = host(jnp.asarray(values, table.dtype))
            self.kept[name] = kept_at_first(world.rules[name], values.shape)

    def compare(self, found, bags, slopes, count):
        """Hold the results of an update to those in NumPy; `count` None: it was not active."""
        new, state, vectors, of_params, metrics = found
        emb, world, of_leaves = self.world.emb, self.world, {}
        read, kept = self.read(new, state.accumulators)
        for name, table in emb.tables.items():
            tolerance = 2e-2 if table.dtype == jnp.bfloat16 else 1e-4
            close = {"rtol": tolerance, "atol": tolerance, "err_msg": f"{name} of {emb.tables}"}
            grads = []
            for feature in table.features_of(name):
                case = self.tables[name], bags[feature], table.pooling
                assert vectors[feature].dtype == table.dtype
                np.testing.assert_allclose(host(vectors[feature]), embedded(*case), **close)
                grads.append(gradients(*case, slopes[feature]))
                if leaf := world.leaves.get(feature):
                    of_leaves[leaf] = of_leaves.get(leaf, 0) + grads[-1].positions
            if count is not None:
                before = self.tables[name], self.kept[name]
                after = updated(*before, grads, world.rules[name], count)
                self.tables[name], self.kept[name] = after
            np.testing.assert_allclose(read[name], self.tables[name], **close)
            assert {part for part, x in kept.items() if name in x} == self.kept[name].keys()
            for part, wanted in self.kept[name].items():
                np.testing.assert_allclose(kept[part][name], wanted, **close)
            # Rows in half precision are rounded after each update.
            self.tables[name] = read[name]
            self.count(name, bags, metrics)
        for leaf, wanted in of_leaves.items():
            of_devices = host(of_params["towers"][leaf]).sum(axis=0)
            np.testing.assert_allclose(of_devices, wanted, rtol=1e-3, atol=1e-3)

    def count(self, name, bags, metrics):
        """Count the distinct rows of a table that each device needs, and ids that are in none."""
        table = self.world.emb.tables[name]
        ids = [bags[f].ids.reshape(self.world.parts, -1) for f in table.features_of(name)]
        ids = np.concatenate([x.astype(np.int64) for x in ids], axis=1)
        real = [len({i for i in part if 0 <= i < table.num_rows}) for part in ids.tolist()]
        np.testing.assert_array_equal(metrics[f"embeddings/{name}/asked"], real)
        invalid = (ids >= table.num_rows).sum(axis=1)
        np.testing.assert_array_equal(metrics[f"embeddings/{name}/invalid"], invalid)
        assert not np.asarray(metrics[f"embeddings/{name}/overflow"]).any()


@pytest.mark.parametrize("seed", sweep(range(60), lambda seed: seed < len(LAYOUTS)))
def test_random_tables_are_those_of_numpy(seed):
    world, rng = world_of(seed), np.random.default_rng(seed)
    emb, program, reference = world.emb, program_of(world), jax.jit(world.emb.reference)
    read = reader_of(emb)
    replicas = [Replica(world, read, rng) for _ in range(world.replicas or 1)]
    stored = [emb.write(replica.tables) for replica in replicas]
    tables, state = world.together(stored), world.together(map(emb.init_optimizer, stored))
    for t in range(UPDATES):
        bags = [bags_of(world, rng) for _ in replicas]
        given = [{f: js.embedding.Bags(b.ids, b.weights) for f, b in own.items()} for own in bags]
        params = [
            {"towers": {n: own[f].positions for f, n in world.leaves.items()}} for own in bags
        ]
        slopes = [slopes_of(world, own, rng) for own in bags]
        of_devices = [jax.tree.map(lambda x: np.stack([x] * world.parts), p) for p in params]
        if t == 0:
            exact = world.together(map(reference, stored, given, params))
        tables, state, found, of_params, metrics = program(
            tables,
            state,
            *map(world.together, (given, of_devices, slopes)),
            world.together([np.bool_(t != IDLE)] * len(replicas)),
        )
        if t == 0:  # the order of a sum is the compiler's
            for feature in emb.features:
                found_here, alone = host(found[feature]), host(exact[feature])
                np.testing.assert_allclose(found_here, alone, rtol=4e-7, atol=1e-6)
        for i, replica in enumerate(replicas):
            own = world.of_replica((tables, state, found, of_params, metrics), i)
            replica.compare(own, bags[i], slopes[i], None if t == IDLE else t - (t > IDLE))
        np.testing.assert_array_equal(state.count, t + 1 - (t >= IDLE))
