"""Many settings and seeds in one program, each equal to the training step of its own."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js

REPLICAS, STEPS, SEEDS = 4, 10, 2
SETTINGS = {"rate": [0.1, 0.02, 0.1], "momentum": [0.0, 0.4, 0.6], "outer": [1.0, 0.7, 0.5]}


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2)


def parameters(seed):
    draws = np.random.default_rng(seed)
    return {k: draws.normal(size=s).astype(np.float32) for k, s in (("w", (3, 5)), ("v", (5,)))}


def batches(seed):
    x = np.random.default_rng([seed, 1]).normal(size=(STEPS, REPLICAS, 6, 3)).astype(np.float32)
    return x, np.sin(x[..., 0])


def stacked(make):
    return jax.tree.map(lambda *x: np.stack(x), *map(make, range(SEEDS)))


def slowmo(s, base, **options):
    options |= {"momentum": s["momentum"], "slow_learning_rate": s["outer"]}
    return js.slowmo("replica", base=base, learning_rate=s["rate"], **options)


def diloco(s, **options):
    outer = optax.sgd(s["outer"], momentum=s["momentum"], nesterov=True)
    return js.diloco("replica", outer_optimizer=outer, **options)


SYNCS = {
    "slowmo, not exact": lambda s: slowmo(s, js.sgp("replica"), sync_every=4, exact_average=False),
    "diloco, spread": lambda s: diloco(
        s, sync_every=6, fragments=lambda name: int(name == "w"), delay=2, merge=0.5
    ),
}


def chain_of(name):
    def make(s):
        return js.chain(optax.sgd(s["rate"], momentum=0.9), SYNCS[name](s))

    return make


def one_run(make, setting, params, batches):
    """Train virtual replicas as docs/choosing.md does; return the last model and all losses."""
    tx, mesh = make(setting), js.virtual_mesh({"replica": REPLICAS})

    def update(replica, batch):
        params, state = replica
        loss, gradients = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = tx.update(gradients, state, params)
        return (optax.apply_updates(params, updates), state), loss

    over_replicas = partial(jax.vmap, axis_name="replica", axis_size=REPLICAS)
    replicas = over_replicas(lambda params: (params, tx.init(params)), in_axes=None)(params)
    (params, state), losses = jax.lax.scan(over_replicas(update), replicas, batches)
    sync = tx.parts[-1]
    return js.consensus(params, mesh=mesh, shares=sync.shares(state[-1])), losses.mean(1)


def trained(transform, seed):
    mesh = js.virtual_mesh({"replica": REPLICAS})
    step = js.make_train_step(loss_fn, transform, mesh=mesh)
    state, losses = step.init(parameters(seed)), []
    for batch in zip(*batches(seed), strict=True):
        rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
        state, metrics = step(state, rows)
        losses.append(np.mean(metrics["loss"]))
    return step.consensus(state), np.array(losses)


@pytest.mark.parametrize("name", SYNCS)
def test_each_run_of_many_equals_a_training_step_of_its_setting(name):
    """Hyperparameters may be traced, with other values in each run of one program."""
    settings = jax.tree.map(jnp.asarray, SETTINGS, is_leaf=lambda x: isinstance(x, list))
    over_seeds = jax.vmap(partial(one_run, chain_of(name)), in_axes=(None, 0, 0))
    over_settings = jax.jit(jax.vmap(over_seeds, in_axes=(0, None, None)))
    models, losses = over_settings(settings, stacked(parameters), stacked(batches))
    assert losses.shape == (3, SEEDS, STEPS)
    for number, seed in ((1, 1), (2, 0)):
        setting = {key: values[number] for key, values in SETTINGS.items()}
        model, expected = trained(chain_of(name)(setting), seed)
        np.testing.assert_allclose(losses[number, seed], expected, rtol=2e-5)
        for leaf, values in models.items():
            np.testing.assert_allclose(values[number, seed], model[leaf], rtol=1e-4, atol=1e-6)
