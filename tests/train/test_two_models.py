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
from support.transforms import TRANSFORMS

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


# One for each way in which something is known of a model.
SYNCS = {
    "fragments with a delay": lambda: js.diloco(
        "replica", sync_every=6, fragments=fragment, delay=1, shard_state=False
    ),
    "fragments of slowmo": lambda: js.slowmo(
        "replica", base=js.local_sgd("replica"), sync_every=6, momentum=0.5, fragments=fragment
    ),
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
    "gossip": TRANSFORMS["sgp"],
    "sparta": TRANSFORMS["sparta"],
}
# What takes gradients, or wraps an optimizer.
CHAINS = {
    "demo": lambda: js.chain(js.demo("replica", top_k=2, chunk=4), optax.sgd(0.1)),
    "dynamic_loss_scale": lambda: js.dynamic_loss_scale(optax.adam(0.1), initial=2.0),
    "skip_unused": lambda: js.gradients.skip_unused(optax.sgd(0.1, momentum=0.9), "replica"),
    "powersgd": lambda: js.chain(
        js.all_reduce_gradients("replica", hook=js.hooks.powersgd(1)), optax.sgd(0.1)
    ),
    "in buckets": lambda: js.chain(
        js.all_reduce_gradients("replica", bucket_bytes=32, first_bucket_bytes=8), optax.sgd(0.1)
    ),
}


def loss_fn(params, batch):
    y = batch @ params["w0"] + params["w1"][None]
    if "w2" in params:
        y = y * jnp.mean(jnp.square(params["w2"] - 1), axis=0)[None]
    return jnp.mean(jnp.square(y))


def trained(chains, mode, sync="given"):
    """Return phases and parameters of two steps in turn, of pairs of optimizer and sync."""
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
            states[i], _ = step(states[i], batch)
    return found, [jax.tree.map(np.asarray, x.params) for x in states]


@pytest.mark.parametrize("name", [*SYNCS, *CHAINS])
def test_one_object_of_two_models(name):
    def pair():
        return (optax.sgd(0.1), SYNCS[name]()) if name in SYNCS else (CHAINS[name](), "none")

    once, mode = pair(), "traced" if name == "only finite fragments" else "host"
    (found, ends), (expected, wanted) = trained([once, once], mode), trained([pair(), pair()], mode)
    assert found == expected
    assert_equal_bits(ends, wanted)


def test_one_step_is_of_one_model():
    """Fragments, and where results lie, are those of its first state."""
    first, second = MODELS.values()
    options = {"sync": SYNCS["fragments with a delay"](), "mesh": js.make_mesh({"replica": 4})}
    step, other = (js.make_train_step(loss_fn, optax.sgd(0.1), **options) for _ in range(2))
    step.init(first)
    another = other.init(second)
    for use in (step.init, step.next_phase, lambda x: step(x, BATCHES[0])):
        with pytest.raises(ValueError, match=r"only one of the two has \['w2'\]"):
            use(second if use == step.init else another)


def rows_trained(*optimizers):
    """Return the rows of tables of two models after updates in turn."""
    steps, states, mesh = [], [], js.make_mesh({"replica": 4})
    for optimizer, size in zip(optimizers, [(10, 3), (64, 2)], strict=True):
        embeddings = js.embeddings(
            {"id": js.Table(*size, pooling=None)},
            axis_name=None,
            inputs=lambda ids: {"id": ids},
            optimizer=optimizer,
        )
        options = {"gradients": js.all_reduce_gradients("replica"), "embeddings": embeddings}
        steps.append(
            js.make_train_step(
                lambda params, ids, *, embedded: jnp.mean((embedded["id"] - params["b"]) ** 2),
                optax.sgd(0.1),
                mesh=mesh,
                **options,
            )
        )
        states.append(steps[-1].init({"b": np.float32(1)}))
    for t in range(3):
        for i, step in enumerate(steps):
            states[i], _ = step(states[i], np.arange(8, dtype=np.int32) % (3 + t))
    pairs = zip(steps, states, strict=True)
    return [step.embeddings.read(step.consensus(state).tables) for step, state in pairs]


@pytest.mark.parametrize("make", [js.rowwise_sgd, js.rowwise_adagrad, js.rowwise_adam])
def test_one_optimizer_of_tables(make):
    once = make(0.1)
    assert_equal_bits(rows_trained(once, once), rows_trained(make(0.1), make(0.1)))
