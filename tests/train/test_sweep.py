"""`js.Sweep`: equal to the training step of each setting and seed, and its errors."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js

REPLICAS, STEPS, SEEDS = 4, 13, 2
SETTINGS = {"rate": [0.1, 0.02, 0.1], "momentum": [0.0, 0.4, 0.6], "outer": [1.0, 0.7, 0.5]}


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2)


def parameters(seed):
    draws = np.random.default_rng(seed)
    shapes = {"w": (3, 5), "v": (5,)}
    return {k: draws.normal(size=s).astype(np.float32) for k, s in shapes.items()}


def batches(seed):
    draws = np.random.default_rng([seed, 1])
    x = draws.normal(size=(STEPS, REPLICAS, 6, 3)).astype(np.float32)
    return x, np.sin(x[..., 0])


def stacked(make):
    return jax.tree.map(lambda *x: np.stack(x), *map(make, range(SEEDS)))


def slowmo(s, base, **options):
    return js.slowmo(
        "replica",
        base=base,
        momentum=s["momentum"],
        slow_learning_rate=s["outer"],
        learning_rate=s["rate"],
        **options,
    )


SYNCS = {
    "local_sgd": lambda s: js.local_sgd("replica", sync_every=3),
    "sgp": lambda s: js.sgp("replica"),
    "sgp, late": lambda s: js.sgp("replica", overlap=2),
    "slowmo": lambda s: slowmo(s, js.local_sgd("replica", sync_every=3), sync_every=6),
    "slowmo over sgp": lambda s: slowmo(s, js.sgp("replica"), sync_every=5),
    "slowmo, not exact": lambda s: slowmo(s, js.sgp("replica"), sync_every=4, exact_average=False),
    "diloco": lambda s: js.diloco(
        "replica",
        sync_every=4,
        outer_optimizer=optax.sgd(s["outer"], momentum=s["momentum"], nesterov=True),
    ),
    "local_sgd, only finite, in 16 bits": lambda s: js.only_finite(
        js.local_sgd("replica", sync_every=3, codec=js.codecs.float16())
    ),
    "slowmo, sharded, delayed to the next": lambda s: slowmo(s, None, sync_every=5, delay=4),
    "diloco, spread": lambda s: js.diloco(
        "replica",
        sync_every=6,
        outer_optimizer=optax.sgd(s["outer"], momentum=s["momentum"]),
        fragments=2,
        delay=2,
        merge=0.5,
    ),
}


def chain_of(name):
    def make(s):
        if name == "all_reduce":
            return js.chain(
                js.all_reduce_gradients("replica"), optax.adam(s["rate"], b1=s["momentum"])
            )
        return js.chain(optax.sgd(s["rate"], momentum=0.9), SYNCS[name](s))

    return make


def swept(make, *, parts=(STEPS,), **options):
    sweep = js.Sweep(loss_fn=loss_fn, make=make, settings=SETTINGS, replicas=REPLICAS, **options)
    state, losses, begin = sweep.init(stacked(parameters)), [], 0
    for part in parts:
        now = jax.tree.map(lambda x: x[:, begin : begin + part], stacked(batches))  # noqa: B023
        state, loss = sweep.run(state, now)
        losses.append(np.asarray(loss))
        begin += part
    assert state.count == STEPS
    return sweep.consensus(state), np.concatenate(losses, axis=-1)


def trained(transform, seed):
    mesh = js.virtual_mesh({"replica": REPLICAS})
    step = js.make_train_step(loss_fn, transform, mesh=mesh)
    state, losses = step.init(parameters(seed)), []
    for batch in zip(*batches(seed), strict=True):
        rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
        state, metrics = step(state, rows)
        losses.append(np.mean(metrics["loss"]))
    return step.consensus(state), np.array(losses)


@pytest.mark.filterwarnings("ignore:.*no multiple", "ignore:slowmo without")
@pytest.mark.parametrize("name", ["all_reduce", *SYNCS])
def test_each_run_equals_a_training_step_of_its_setting(name):
    models, losses = swept(chain_of(name), parts=(5, 5, 3), at_once=2)
    assert losses.shape == (3, SEEDS, STEPS)
    for number in range(3):
        setting = {key: values[number] for key, values in SETTINGS.items()}
        for seed in range(SEEDS):
            model, expected = trained(chain_of(name)(setting), seed)
            np.testing.assert_allclose(losses[number, seed], expected, rtol=2e-5)
            for leaf, values in models.items():
                np.testing.assert_allclose(values[number, seed], model[leaf], rtol=1e-4, atol=1e-6)


def test_one_call_or_several_and_any_number_at_once_give_equal_losses():
    make = chain_of("slowmo")
    _, losses = swept(make)
    for options in ({"parts": (1, 12)}, {"at_once": 1}, {"at_once": 7}):
        np.testing.assert_allclose(swept(make, **options)[1], losses, rtol=1e-6)


def test_an_update_runs_the_branch_of_its_own_exchange_alone():
    """A select would run all of them; the conditional stays one under three maps."""
    make = chain_of("slowmo")
    sweep = js.Sweep(loss_fn=loss_fn, make=make, settings=SETTINGS, replicas=REPLICAS)
    state = sweep.init(stacked(parameters))
    kinds = ((), ("average",), ("slow",))
    which = np.zeros(STEPS, np.int32)
    models = state.params, state.opt_state
    program = sweep._steps.lower(models, stacked(batches), which, sweep._values, kinds=kinds)
    assert program.as_text().count("stablehlo.case") == 1


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "vectors of one length"),
        ({"rate": []}, "vectors of one length"),
        ({"rate": 0.1}, r"'rate': \(\)"),
        ({"rate": [0.1, 0.2], "momentum": [0.5]}, r"'rate': \(2,\), 'momentum': \(1,\)"),
    ],
)
def test_settings_that_are_no_vectors_of_one_length(settings, said):
    with pytest.raises(ValueError, match=f"Sweep: `settings`.*{said}"):
        js.Sweep(
            loss_fn=loss_fn, make=lambda s: optax.sgd(0.1), settings=settings, replicas=REPLICAS
        )


@pytest.mark.parametrize("options", [{"replicas": 0}, {"replicas": 2.5}, {"at_once": 0}])
def test_numbers_out_of_range(options):
    (name,) = options
    given = {"settings": SETTINGS, "replicas": REPLICAS, **options}
    with pytest.raises(ValueError, match=f"Sweep: `{name}`"):
        js.Sweep(loss_fn=loss_fn, make=lambda s: optax.sgd(s["rate"]), **given)


def test_every_setting_is_checked_as_it_is_without_a_sweep():
    settings = {"rate": [0.1] * 2, "momentum": [0.5, 1.5], "outer": [1.0] * 2}
    with pytest.raises(ValueError, match=r"`momentum` must lie in .* got 1\.5"):
        js.Sweep(loss_fn=loss_fn, make=chain_of("slowmo"), settings=settings, replicas=REPLICAS)


@pytest.mark.parametrize(
    "make",
    [
        lambda s: js.sgp("replica"),
        lambda s: optax.chain(optax.sgd(s["rate"]), js.sgp("replica")),
        lambda s: js.chain(optax.chain(optax.sgd(s["rate"]), js.sgp("replica"))),
    ],
)
def test_a_parameter_transform_that_the_sweep_would_not_see_is_refused(make):
    sweep = js.Sweep(loss_fn=loss_fn, make=make, settings=SETTINGS, replicas=REPLICAS)
    with pytest.raises(ValueError, match=r"`make` must return a js\.chain that ends in its"):
        sweep.init(stacked(parameters))


def test_batches_of_another_number_of_replicas_or_seeds():
    sweep = js.Sweep(
        loss_fn=loss_fn, make=lambda s: optax.sgd(s["rate"]), settings=SETTINGS, replicas=3
    )
    state = sweep.init(stacked(parameters))
    with pytest.raises(ValueError, match=r"shape \(2, steps, 3, .*got .*13, 4, 6, 3"):
        sweep.run(state, stacked(batches))
    sweep = js.Sweep(
        loss_fn=loss_fn, make=lambda s: optax.sgd(s["rate"]), settings=SETTINGS, replicas=REPLICAS
    )
    one_seed = jax.tree.map(lambda x: x[:1], stacked(batches))
    with pytest.raises(ValueError, match=r"shape \(2, steps, 4, .*for 2 seeds"):
        sweep.run(sweep.init(stacked(parameters)), one_seed)
