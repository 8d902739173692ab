"""Every optimizer of optax on stages: equal to none, or refused since it takes all leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from recipes.optax_cases import CASES
from support.exhaustive import sweep
from support.promotion import promoting

STEPS, TOLERANCE = 20, 1e-5
# What takes norms, distances or losses of all parameters, or joins them.
MIXES = {
    *["apply_if_finite", "clip_by_global_norm", "flatten", "lbfgs"],
    *["normalize_by_update_norm", "polyak_sgd", "scale_by_backtracking_linesearch"],
    *["scale_by_lbfgs", "scale_by_polyak"],
    *["scale_by_zoom_linesearch", "dadapt_adamw", "dog", "dowg", "mechanize", "momo", "momo_adam"],
    *["normalize", "prodigy", "sam", "measure_with_ema", "monitor", "snapshot"],
}
# Those of the table that are made for parameters of another form, or for gradients per example.
OTHERS = {
    *["freeze", "lookahead", "masked", "multi_transform", "partition", "selective_transform"],
    *["set_to_zero", "stateless", "scale_by_muon", "differentially_private_aggregate", "dpsgd"],
}
EVERY = {f"{m}.{n}": case for m, cases in CASES.items() for n, case in cases.items()}
NAMES = [name for name in EVERY if name.rpartition(".")[2] not in OTHERS]
USUAL = {"optax.optimistic_adam", "optax.add_noise"}
RANDOM = np.random.default_rng(0).normal
PARAMS = [{"w": np.float32(RANDOM(size=(5, 3))), "b": np.float32(RANDOM(size=3))} for _ in range(3)]
MODEL = js.LayeredModel([lambda p, x: x] * 3, lambda x, batch: jnp.mean(x))


def trained(tx, params, formed):
    """Return the parameters after updates by drawn gradients, with the arguments of a step."""
    tx = optax.with_extra_args_support(tx)
    state = tx.init(params)

    @jax.jit
    def update(params, state, grads, value):
        told = {"value": value, "grad": grads, "value_fn": loss}
        try:
            updates, state = tx.update(grads, state, params, **told)
        except TypeError:  # it takes no more than it knows
            updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    draw = np.random.default_rng(1).normal
    for i in range(STEPS):
        grads = jax.tree.map(lambda x: np.float32(0.1 * draw(size=x.shape)), PARAMS)
        params, state = update(params, state, formed(grads), jnp.float32(1 / (i + 1)))
    return params


def loss(params):
    return sum(jnp.sum(x**2) for x in jax.tree.leaves(params))


@pytest.mark.parametrize("name", sweep(NAMES, lambda name: name in USUAL))
@pytest.mark.filterwarnings("ignore")  # deprecations of optax
def test_all_of_the_table(mesh_of, name):
    schedule, parts = js.schedules.gpipe(2, 2), [[(0, 1)], [(1, 3)]]
    pipe = js.pipelined(MODEL, PARAMS, schedule, mesh=mesh_of({"stage": 2}), parts=parts)
    stack = pipe.layout.stack
    tx = promoting(EVERY[name].make())
    if name.rpartition(".")[2] in MIXES:
        with pytest.raises(ValueError, match="depends on leaves of other stages"):
            js.chain(tx).init(stack(PARAMS))
        return
    found = pipe.layout.unstack(trained(js.chain(tx), stack(PARAMS), stack))
    known = trained(tx, PARAMS, lambda grads: grads)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=TOLERANCE, atol=TOLERANCE), found, known
    )
