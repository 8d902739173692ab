"""One object of each kind serves two models in turn as two objects do, each with its own.

What an object remembers of the model that it saw last would show here.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from support.strict import assert_equal_bits
from support.transforms import PARAMETER, TRANSFORMS

NUM_UPDATES = 7
# Of other names and shapes; a function divides one into two fragments, the other into three.
SMALL = {"w0": np.full((4, 3), 0.1, np.float32), "w1": np.ones(3, np.float32)}
LARGE = {
    "w0": np.full((4, 5), -0.1, np.float32),
    "w1": np.ones(5, np.float32),
    "w2": np.zeros((2, 5), np.float32),
}
MODELS = {"small": SMALL, "large": LARGE}
BATCHES = np.random.default_rng(0).normal(size=(NUM_UPDATES, 8, 4)).astype(np.float32)


def fragment(name):
    return int(name[-1])


def slowmo_over(base, **options):
    return js.slowmo("replica", base=base, sync_every=6, momentum=0.5, **options)


# One for each way in which something is known of a model; those of `TRANSFORMS` come beside them.
SYNCS = {
    "fragments": lambda: js.diloco("replica", sync_every=6, fragments=fragment),
    "fragments with a delay": lambda: js.diloco(
        "replica", sync_every=6, fragments=fragment, delay=1, shard_state=False
    ),
    "fragments of slowmo": lambda: slowmo_over(
        js.local_sgd("replica", sync_every=2), fragments=fragment
    ),
    "fragments of local_sgd": lambda: js.local_sgd("replica", sync_every=6, fragments=fragment),
    "only finite fragments": lambda: js.only_finite(
        js.diloco("replica", sync_every=6, fragments=fragment)
    ),
    "masked": lambda: js.diloco(  # element-wise for one of the two alone
        "replica",
        sync_every=2,
        outer_optimizer=optax.masked(
            optax.sgd(0.5), lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)
        ),
    ),
} | {name: TRANSFORMS[name] for name in PARAMETER if name not in ("hierarchical_local_sgd",)}
# What takes gradients, or wraps an optimizer.
CHAINS = {
    name: lambda make=make: js.chain(make(), optax.sgd(0.1))
    for name, make in TRANSFORMS.items()
    if name not in PARAMETER
    and name not in ("dynamic_loss_scale", "skip_unused", "slow_momentum", "sum_tied_gradients")
    and name != "accumulate"  # for loops without a step
    and "rows" not in name
    and name != "clip_by_global_norm"  # of leaves that are sharded over replicas
}
CHAINS |= {
    "dynamic_loss_scale": lambda: js.dynamic_loss_scale(optax.adam(0.1), initial=2.0),
    "skip_unused": lambda: js.gradients.skip_unused(optax.sgd(0.1, momentum=0.9), "replica"),
    "powersgd": lambda: js.chain(
        js.all_reduce_gradients("replica", hook=js.hooks.powersgd(1)), optax.sgd(0.1)
    ),
    "in buckets": lambda: js.chain(
        js.all_reduce_gradients("replica", bucket_bytes=32, first_bucket_bytes=8), optax.sgd(0.1)
    ),
    "labelled": lambda: js.chain(
        js.all_reduce_gradients("replica"),
        optax.partition(
            {"matrix": optax.sgd(0.1), "vector": optax.sgd(0.01, momentum=0.9)},
            lambda tree: jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "vector", tree),
        ),
    ),
}


def loss_fn(params, batch):
    y = batch @ params["w0"] + params["w1"][None]
    if "w2" in params:
        y = y * jnp.mean(jnp.square(params["w2"] - 1), axis=0)[None]
    return jnp.mean(jnp.square(y))


def trained(chains, mode, sync="given"):
    """Return what came of two steps in turn; `chains` has optimizer and sync of each."""
    steps = [
        js.make_train_step(
            loss_fn, optimizer, sync=sync, mesh=js.make_mesh({"replica": 4}), mode=mode
        )
        for optimizer, sync in chains
    ]
    states = [step.init(params) for step, params in zip(steps, MODELS.values(), strict=True)]
    found = []
    for batch in BATCHES:
        for i, step in enumerate(steps):
            found.append(step.next_phase(states[i]))
            states[i], metrics = step(states[i], batch)
            found.append(jax.tree.map(np.asarray, metrics))
    return found, [jax.tree.map(np.asarray, x.params) for x in states]


def assert_alike(found, expected):
    assert [x for x in found[0] if isinstance(x, tuple)] == [
        x for x in expected[0] if isinstance(x, tuple)
    ]
    assert_equal_bits(found[1], expected[1])


@pytest.mark.parametrize(
    ("name", "mode"),
    [(x, "host") for x in SYNCS] + [(x, "traced") for x in SYNCS if x not in PARAMETER],
)
def test_one_algorithm(name, mode):
    once = SYNCS[name]()
    found = trained([(optax.sgd(0.1), once)] * 2, mode)
    assert_alike(found, trained([(optax.sgd(0.1), SYNCS[name]()) for _ in MODELS], mode))


@pytest.mark.parametrize("name", CHAINS)
def test_one_chain(name):
    once = CHAINS[name]()
    found = trained([(once, "none")] * 2, "host")
    assert_alike(found, trained([(CHAINS[name](), "none") for _ in MODELS], "host"))


@pytest.mark.parametrize("make_mesh", [js.make_mesh, js.virtual_mesh])
def test_one_step_is_of_one_model(make_mesh):
    """Fragments, and where results lie, are those of its first state."""
    mesh, (first, second) = make_mesh({"replica": 4}), MODELS.values()
    options = {"sync": SYNCS["fragments"](), "mesh": mesh}
    step, other = (js.make_train_step(loss_fn, optax.sgd(0.1), **options) for _ in range(2))
    state, another = step.init(first), other.init(second)
    for use in (step.init, step.next_phase, lambda x: step(x, BATCHES[0])):
        with pytest.raises(ValueError, match=r"only one of the two has \['w2'\]"):
            use(second if use == step.init else another)
    step(state, BATCHES[0])
    other(another, BATCHES[0])


TABLES = {"small": (10, 3), "large": (64, 2)}
TABLE_OPTIMIZERS = {
    "rowwise_sgd": lambda: js.rowwise_sgd(0.1, momentum=0.5),
    "rowwise_adagrad": lambda: js.rowwise_adagrad(0.1),
    "rowwise_adam": lambda: js.rowwise_adam(0.1, per_row=True),
}


def tables_trained(optimizers):
    """Return the rows of two models' tables after updates in turn."""
    steps = []
    for optimizer, (rows, dim) in zip(optimizers, TABLES.values(), strict=True):
        embeddings = js.embeddings(
            {"t": js.Table(rows, dim, pooling=None, features=["id"])},
            axis_name=None,
            inputs=lambda ids: {"id": ids},
            optimizer=optimizer,
        )
        steps.append(
            js.make_train_step(
                lambda params, ids, *, embedded: jnp.mean((embedded["id"] - params["b"]) ** 2),
                optax.sgd(0.1),
                gradients=js.all_reduce_gradients("replica"),
                mesh=js.make_mesh({"replica": 4}),
                embeddings=embeddings,
            )
        )
    states = [step.init({"b": np.float32(1)}) for step in steps]
    for t in range(3):
        for i, step in enumerate(steps):
            states[i], _ = step(states[i], np.arange(8, dtype=np.int32) % (3 + t))
    tables = [step.consensus(x).tables for step, x in zip(steps, states, strict=True)]
    return [step.embeddings.read(x) for step, x in zip(steps, tables, strict=True)]


@pytest.mark.parametrize("name", TABLE_OPTIMIZERS)
def test_one_optimizer_of_tables(name):
    make = TABLE_OPTIMIZERS[name]
    once = make()
    assert_equal_bits(tables_trained([once, once]), tables_trained([make(), make()]))
