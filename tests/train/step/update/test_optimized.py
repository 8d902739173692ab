"""Optimizers that want to know the loss: `value`, `grad` and `value_fn`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from support.promotion import promoting
from train.step.problem import BATCHES, PARAMS, loss, trained

BATCHES = BATCHES[:4, :16]
KINDS = {"devices": js.make_mesh, "virtual": js.virtual_mesh}
PLATEAU = optax.chain(
    optax.sgd(0.1),
    promoting(optax.contrib.reduce_on_plateau(factor=0.5, patience=1, cooldown=1, rtol=0.5)),
)
BACKTRACKING = optax.chain(
    optax.sgd(1.0), optax.scale_by_backtracking_linesearch(max_backtracking_steps=5)
)
polyak, average = optax.polyak_sgd(), js.all_reduce_gradients("replica")
local = js.local_sgd("replica", sync_every=99)


def noisy(params, batch):
    """Another value in every batch, however the parameters are."""
    return loss(params, batch) + jnp.mean(batch)


def by_hand(optimizer, batches, fn=noisy, parts=1):
    """Train one replica on its own; `parts` microbatches are averaged."""
    optimizer = optax.with_extra_args_support(optimizer)

    @jax.jit
    def update(params, state, batch):
        def value_fn(p):
            return sum(fn(p, part) for part in np.split(batch, parts)) / parts

        value, grad = jax.value_and_grad(value_fn)(params)
        updates, state = optimizer.update(
            grad, state, params, value=value, grad=grad, value_fn=value_fn
        )
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, optimizer.init(PARAMS)
    for batch in batches:
        params, state = update(params, state, batch)
    return params, state


def all_gathered(axis):
    """Averages as the types do not tell: gathered values differ for all they know."""

    def update(updates, state, params=None):
        mean = jax.tree.map(lambda g: jax.lax.all_gather(g, axis).mean(0), updates)
        return mean, state

    return optax.GradientTransformation(optax.init_empty_state, update)


TWO = {"replica": 2}
GATHERED = js.gradient_transform(all_gathered("replica"))
# Mesh, the optimizer that is meant, options of the step. Replicas see one big batch, or ("search")
# each its own part of it.
CASES = {
    "reduce_on_plateau": ("virtual", {"replica": 4}, PLATEAU, {"gradients": average}),
    "all_gather": ("devices", TWO, polyak, {"gradients": GATHERED}),
    "search": ("devices", TWO, BACKTRACKING, {"sync": local, "accumulate": 2, "fn": loss}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_loss_is_averaged_as_gradients_are(name):
    """Parameters and optimizer states are those of runs of one replica by hand."""
    kind, axes, optimizer, options = CASES[name]
    given = {"optimizer": optimizer, "fn": noisy, "batches": BATCHES, **options}
    state = trained(mesh=KINDS[kind](axes), **given)
    parts = options.get("accumulate", 1) if name == "search" else 1
    for replica in range(axes["replica"]):
        batches = (
            np.split(BATCHES, axes["replica"], axis=1)[replica] if name == "search" else BATCHES
        )
        expected = by_hand(optimizer, batches, options.get("fn", noisy), parts)
        found = state.params, state.opt_state
        rtol = 1e-3 if "fn" in options else 2e-5
        for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            np.testing.assert_allclose(a[replica], b, rtol=rtol, atol=1e-6)
    if name == "reduce_on_plateau":
        assert state.opt_state[1].scale[0] < 1


def test_only_the_optimizer_is_told_and_it_may_take_no_more_than_it_knows():
    seen = []

    def recording(tx):
        def update(updates, state, params=None, **extra):
            seen.append(sorted(extra))
            return tx.update(updates, state, params, **extra)

        return optax.GradientTransformationExtraArgs(tx.init, update)

    optimizer, gradients, mesh = recording(optax.sgd(0.1)), recording(average), js.virtual_mesh(TWO)
    step = js.make_train_step(loss, optimizer, gradients=gradients, mesh=mesh)
    state = step.init(PARAMS)
    seen.clear()  # of the look at what they exchange
    step(state, BATCHES[0], [1, 2])
    # The step does not see how `recording` averages, so there is no average of the loss.
    assert seen == [["weight"], ["grad", "value_fn", "weight"]]


def test_what_is_not_used_is_not_sent():
    """The loss travels where gradients do, and nowhere else."""
    found = []
    for optimizer in (optax.adam(0.1), polyak):
        step = js.make_train_step(noisy, optimizer, gradients=average, mesh=js.make_mesh(TWO))
        report = js.comm_report(step, step.init(PARAMS), BATCHES[0])
        rows = report.select(axis="replica", level="emitted")
        found.append((sum(row.count for row in rows), sum(row.bytes for row in rows)))
    size = sum(4 * x.size for x in PARAMS.values())
    assert found == [(1, size), (2, size + 4)]
