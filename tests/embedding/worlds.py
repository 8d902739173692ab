"""Random tables, who shares them, what looks them up, and a program that updates them."""

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from embedding.oracle import Bag, Rule

AXIS, BATCH = "shard", 12
SHARDS, POOLINGS = ("row", "column", "table"), ("sum", "mean", None)
# Devices that share a replica's tables, replicas (None: no axis of them), and whether types of
# shard_map are checked; no axis at all where there are no devices.
LAYOUTS = [(4, None, True), (None, None, True), (2, 2, True), (3, None, False)]
MAKERS = {"adagrad": js.rowwise_adagrad, "sgd": js.rowwise_sgd, "adam": js.rowwise_adam}


def both(kind: str, rate: Any, by_count: Any = None, **options: Any) -> tuple[Any, Rule]:
    """The optimizer and its rule in NumPy, whose rate is `by_count` where `rate` is a schedule."""
    return MAKERS[kind](rate, **options), Rule(kind, by_count or (lambda n: rate), **options)


FALLING, STEEP = optax.linear_schedule(0.2, 0.1, 2), optax.linear_schedule(0.4, 0.1, 3)
OPTIMIZERS = [
    both("adagrad", 0.3, eps=1e-3, initial=0.1),
    both("sgd", 0.3, weight_decay=0.1),
    both("adam", 0.1, b1=0.6, b2=0.9, eps=0.3, weight_decay=0.1),
    both("sgd", 0.2, momentum=0.7, nesterov=True, weight_decay=0.1),
    both("adam", FALLING, lambda n: max(0.1, 0.2 - n / 20), b2=0.9, eps=0.3, per_row=True),
    both("adagrad", lambda n: 0.5 / (n.astype(jnp.float32) + 1), lambda n: 0.5 / (n + 1)),
    both("sgd", 0.2, momentum=0.7),
    both("sgd", STEEP, lambda n: 0.4 - 0.1 * n),
]
# Signed and unsigned; of 8 bits there are fewer ids than rows, and of 64 jax keeps 32.
ID_TYPES = ["int32", "int8", "uint16", "int64"]


class World(NamedTuple):
    """Tables and everything that is fixed when their program is compiled."""

    emb: js.embedding.Embeddings
    rules: dict[str, Rule]
    mesh: jax.sharding.Mesh | None
    check_vma: bool
    lengths: dict[str, int | None]  # of a feature's bags; None: one id each, not in bags
    weighted: dict[str, bool]
    dtypes: dict[str, str]
    leaves: dict[str, str]  # the position weights of features

    @property
    def replicas(self) -> int | None:
        return self.mesh.shape.get("replica") if self.mesh else None

    @property
    def parts(self) -> int:
        return self.mesh.shape[AXIS] if self.mesh else 1

    def together(self, trees: Iterable[Any]) -> Any:
        """Trees of all replicas as one; the only tree where there is no axis of replicas."""
        trees = list(trees)
        if self.replicas is None:
            return trees[0]
        return jax.tree.map(lambda *x: np.stack([np.asarray(y) for y in x]), *trees)

    def of_replica(self, tree: Any, i: int) -> Any:
        return tree if self.replicas is None else jax.tree.map(lambda x: x[i], tree)


def world_of(seed: int) -> World:
    """Every kind of table, optimizer and layout occurs in few worlds; the rest is random.

    Two tables have optimizers of their own. One of them is that of all tables in every other world,
    made again: it is equal to it.
    """
    rng = np.random.default_rng(seed)
    parts, replicas, check_vma = LAYOUTS[seed % len(LAYOUTS)]
    chosen = [OPTIMIZERS[(2 * seed + i) % len(OPTIMIZERS)] for i in (0, 1, 2 * (seed % 2))]
    tables, lengths, leaves, rules = {}, {}, {}, {}
    for i, shard in enumerate(rng.permutation([*SHARDS, "table"])):
        features = [f"f{i}{j}" for j in range(1 + (i == 0))]
        length = None if rng.random() < 0.25 else int(rng.integers(1, 5))
        positions = None
        if i < 2:  # for all features of the table, or for one
            positions = f"towers/p{i}" if i else {features[-1]: f"towers/p{i}"}
            leaves |= dict.fromkeys(features if i else features[-1:], f"p{i}")
        lengths |= dict.fromkeys(features, length)
        number = (0, 1, 0, 2)[i]
        optimizer, rules[f"t{i}"] = chosen[number]
        tables[f"t{i}"] = js.Table(
            int(rng.choice([1, 5, 64, 100, 150])),
            24 if shard == "column" else int(rng.choice([1, 6])),
            shard=str(shard),
            pooling=POOLINGS[(seed + i) % 3],
            features=features,
            position_weights=positions,
            dtype=jnp.bfloat16 if i == 3 else jnp.float32,
            optimizer=dataclasses.replace(optimizer) if number else None,
        )
    emb = js.embeddings(tables, axis_name=AXIS if parts else None, optimizer=chosen[0][0])
    mesh = None
    if parts:
        sizes = {"replica": replicas, AXIS: parts} if replicas else {AXIS: parts}
        mesh = js.make_mesh(sizes, devices=jax.devices()[: parts * (replicas or 1)])
    features = list(emb.features)
    weighted = {f: bool(i % 2) for i, f in enumerate(features)}
    dtypes = {f: str(x) for f, x in zip(features, rng.choice(ID_TYPES, len(features)), strict=True)}
    return World(emb.over(mesh), rules, mesh, check_vma, lengths, weighted, dtypes, leaves)


def bags_of(world: World, rng: np.random.Generator) -> dict[str, Bag]:
    """A batch of one replica: repeated ids, padding of any number, empty bags, few wrong ids."""
    bags = {}
    for feature, name in world.emb.features.items():
        num_rows, length = world.emb.tables[name].num_rows, world.lengths[feature]
        shape = (BATCH,) if length is None else (BATCH, length)
        dtype = np.dtype(world.dtypes[feature])
        least = -3 if dtype.kind == "i" else 0
        # Half of them of few rows, so that devices ask for the same ones.
        few = rng.integers(least, 4, shape)
        ids = np.where(rng.random(shape) < 0.5, few, rng.integers(least, num_rows, shape))
        ids = np.minimum(ids, num_rows - 1)
        ids = np.where(rng.random(shape) < 0.03, num_rows, ids)
        if dtype.kind == "i":
            ids[::5] = -1
        ids = np.minimum(ids, np.iinfo(dtype).max).astype(dtype)
        weights = None
        if world.weighted[feature]:
            weights = rng.normal(size=shape).astype(np.float32)
            weights[rng.random(shape) < 0.1] = 0  # looked up all the same
            weights[ids < 0] = rng.choice([np.nan, np.inf, 7.0])
        positions = None
        if feature in world.leaves:
            positions = rng.normal(size=length or 1).astype(np.float32)
        bags[feature] = Bag(ids, weights, positions)
    return bags


def slopes_of(world: World, bags: dict[str, Bag], rng: np.random.Generator) -> Any:
    """A random gradient of everything that is embedded, exact in the dtype of its table."""
    slopes = {}
    for feature, name in world.emb.features.items():
        table, ids = world.emb.tables[name], bags[feature].ids
        lead = ids.shape if table.pooling is None else ids.shape[:1]
        slope = jnp.asarray(rng.normal(size=(*lead, table.dim)), table.dtype)
        slopes[feature] = np.asarray(slope)
    return slopes


def program_of(world: World) -> Any:
    """`(tables, state, bags, params, slopes, active) -> (tables, state, embedded, ...)`.

    Besides, it returns the gradients of `params`, and metrics, both of each device. Arguments and
    results have a leading axis of replicas if there are any. Each device has its own `params`.
    """
    emb = world.emb

    def run(tables, state, bags, params, slopes, active):
        requests = emb.exchange_ids(bags)
        params = jax.tree.map(lambda x: x[0], params)

        def loss(vectors, params):
            found = emb.pooled(vectors, requests, params)
            products = [jnp.vdot(x, slopes[f]).astype(jnp.float32) for f, x in found.items()]
            return sum(products), found

        vectors = emb.lookup(tables, requests)
        grads, found = jax.grad(loss, (0, 1), has_aux=True)(vectors, params)
        rows = emb.send_back(grads[0], requests)
        tables, state = emb.apply(tables, state, rows, active=active)
        each = jax.tree.map(lambda x: x[None], (grads[1], emb.metrics(requests)))
        return tables, state, found, *each

    if world.mesh is None:
        return jax.jit(run)
    whole, split = (emb.specs, emb.optimizer_specs), P(AXIS)
    specs = (*whole, split, split, split, P()), (*whole, split, split, split)
    each = run
    if world.replicas:
        is_spec = lambda x: isinstance(x, P)  # noqa: E731
        specs = jax.tree.map(lambda spec: P("replica", *spec), specs, is_leaf=is_spec)

        def each(*args):
            return jax.tree.map(lambda x: x[None], run(*jax.tree.map(lambda x: x[0], args)))

    return jax.jit(
        jax.shard_map(
            each,
            mesh=world.mesh,
            in_specs=specs[0],
            out_specs=specs[1],
            check_vma=world.check_vma,
        )
    )
