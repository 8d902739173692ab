"""Updates that are made before it is known whether they stand: as those that are made after."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.gradients.clipping import clip_state
from jaxslowmo.reports.communication import parse_module
from support.exhaustive import sweep

R, LOCAL, STEPS = 2, 2, 6
RNG = np.random.default_rng(0)
PARAMS = {
    "w": RNG.normal(size=(4, 4)).astype(np.float32),
    "b": RNG.normal(size=4).astype(np.float32),
}
X = RNG.normal(size=(STEPS, R * LOCAL, 4)).astype(np.float32)
# Gradients are small and large in turn, so that some updates clip and some do not.
SIZES = np.array([0.1, 5.0, 0.2, 0.1, 8.0, 3.0], np.float32)
MEAN = js.all_reduce_gradients("replica")


def loss(params, batch):
    x, factor = batch
    return ((jnp.tanh(x @ params["w"]) + params["b"]).sum(-1) * factor).mean()


def batches(bad=None):
    """With an infinite example of replica 1 in update `bad`."""
    factors = np.repeat(SIZES[:, None], R * LOCAL, axis=1)
    if bad is not None:
        factors[bad, -1] = np.inf
    return list(zip(X, factors, strict=True))


def clip(max_norm=2.0):
    return js.clip_by_global_norm(max_norm)


def adam():
    return optax.adam(0.1)


# By name: what the step is made of, and in which update an example is infinite.
SETTINGS = {
    "in the optimizer": (
        {"optimizer": js.skip_unused(js.chain(clip(), adam()), "replica"), "gradients": MEAN},
        None,
    ),
    "in gradients": ({"optimizer": adam(), "gradients": js.chain(MEAN, clip())}, None),
    "with a loss scale": (
        {
            "optimizer": js.dynamic_loss_scale(js.chain(clip(), adam()), "replica"),
            "gradients": MEAN,
        },
        4,
    ),
    "loss scale behind": (
        {"optimizer": js.dynamic_loss_scale(adam()), "gradients": js.chain(MEAN, clip())},
        4,
    ),
    "a loss scale alone": (
        {"optimizer": js.dynamic_loss_scale(adam()), "sync": js.local_sgd("replica")},
        2,
    ),
    "each replica's own norm": (
        {
            "optimizer": js.dynamic_loss_scale(js.chain(clip(), adam())),
            "sync": js.slowmo("replica", base=js.local_sgd("replica", sync_every=2), sync_every=4),
        },
        1,
    ),
    "in windows of the optimizer": (
        {"optimizer": js.accumulate(js.chain(clip(), adam()), every=2), "gradients": MEAN},
        None,
    ),
}


def run(setting, validate, mesh=None, *, bad=None, weights=None, **options):
    step = js.make_train_step(
        loss, mesh=mesh or js.virtual_mesh({"replica": R}), validate=validate, **setting, **options
    )
    state, told, scales = step.init(PARAMS), [], []
    for t, batch in enumerate(batches(bad)):
        state, metrics = step(state, batch, None if weights is None else weights[t])
        told.append(metrics)
        found = clip_state(state.opt_state)
        scales.append(1.0 if found is None else float(found.clip_factor.min()))
    return state, [{**metrics, "scales": np.array(scales)} for metrics in told]


def assert_equal_runs(setting, **options):
    wanted, found = (run(setting, validate, **options) for validate in ("before", "after"))
    # In two programs the compiler may round the same arithmetic differently.
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(
            np.asarray(x, np.float64), np.asarray(y, np.float64), rtol=1e-5, atol=1e-6
        ),
        (found[0]._replace(rng=()), found[1]),
        (wanted[0]._replace(rng=()), wanted[1]),
    )
    return found


USUAL = {"in the optimizer", "in gradients", "with a loss scale"}


@pytest.mark.parametrize("name", sweep(SETTINGS, lambda name: name in USUAL))
def test_trajectories_are_equal(name):
    setting, bad = SETTINGS[name]
    state, told = assert_equal_runs(setting, bad=bad)
    if "windows" not in name and "alone" not in name:
        clipped = np.array([scale < 1 for scale in told[0]["scales"]])
        assert clipped.any()
        assert not clipped.all()
    if bad is not None:
        assert told[-1]["skipped_updates"].max() == 1
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))


def test_without_a_loss_scale_a_bad_value_does_what_it_does_before():
    state, _ = assert_equal_runs(SETTINGS["in the optimizer"][0], bad=2)
    assert all(np.isnan(x).all() for x in jax.tree.leaves(state.params))


HOST = {"mode": "host", "accumulate": 2}
WEIGHTS = np.array([[1, 2], [1, 0], [2, 1], [1, 1], [0, 1], [3, 1]], np.float32)


@pytest.mark.parametrize(
    ("axes", "options"),
    sweep(
        [
            ({"replica": R}, HOST),
            ({"replica": R}, {"weights": WEIGHTS}),
            ({"replica": R, "device": 2}, {}),
            ({"replica": R, "device": 2}, {**HOST, "weights": WEIGHTS, "accumulate": 1}),
        ],
        lambda axes, options: options == HOST,
    ),
)
def test_on_devices(axes, options):
    setting, bad = SETTINGS["each replica's own norm"]
    assert_equal_runs(setting, mesh=js.make_mesh(axes), bad=bad, **options)


SPECS = {"w": P("fsdp"), "b": P("fsdp")}


def in_parts(optimizer, validate, gradients=MEAN):
    """A step and its state, with parameters in parts over "fsdp", which the compiler has."""
    mesh = js.make_mesh({"replica": R, "fsdp": 2})
    options = {"gradients": gradients, "validate": validate, "donate": False}
    step = js.make_train_step(loss, optimizer, mesh=mesh, **options)
    params = {k: jax.device_put(x, NamedSharding(mesh, SPECS[k])) for k, x in PARAMS.items()}
    return step, step.init(params)


@pytest.mark.parametrize("validate", ["before", "after"])
def test_one_bad_value_on_one_shard_skips_everywhere(validate):
    optimizer = js.dynamic_loss_scale(js.chain(clip(), adam()))
    step, state = in_parts(optimizer, validate)
    assert state.params["w"].sharding.spec == P("replica", "fsdp")
    found = []
    for t, (x, factor) in enumerate(batches()[:3]):
        # In the second update the last row of the gradient of "w" is NaN on replica 1, and so is
        # its mean: on one device of each replica. The loss is finite.
        x = x.copy()
        x[-1, -1] = np.inf if t == 1 else x[-1, -1]
        state, metrics = step(state, (x, factor))
        found.append(jax.tree.map(np.asarray, (state.params, state.opt_state[1].inner)))
        assert np.isfinite(metrics["loss"]).all()
    np.testing.assert_array_equal(metrics["skipped_updates"], [1.0] * R)
    jax.tree.map(np.testing.assert_array_equal, found[1], found[0])
    assert all((x != y).all() for x, y in zip(*map(leaves_of_params, found[1:]), strict=True))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))


def leaves_of_params(found):
    return jax.tree.leaves(found[0])


def marked():
    """An optimizer whose arithmetic shows in a program: nothing else there has an atan2."""
    return optax.stateless(lambda u, _: jax.tree.map(lambda x: -0.1 * jnp.arctan2(x, 3.0), u))


@pytest.mark.parametrize(
    "place", sweep(["optimizer", "gradients", "loss scale"], lambda place: place != "optimizer")
)
def test_the_optimizer_does_not_wait_for_the_norm(place):
    """Read off what is compiled: no instruction of its arithmetic comes after the norm's exchange.

    But in the conditional, where clipped gradients are taken.
    """
    setting = {
        "optimizer": {"optimizer": js.chain(clip(), marked())},
        "gradients": {"optimizer": marked(), "gradients": js.chain(MEAN, clip())},
        "loss scale": {"optimizer": js.dynamic_loss_scale(js.chain(clip(), marked()))},
    }[place]
    waits = {}
    for validate in ("before", "after"):
        step, state = in_parts(validate=validate, **setting)
        waits[validate] = waiting(parse_module(step.compiled(state, batches()[0]).as_text()))
    assert waits["before"]
    assert all(waits["before"])
    assert waits["after"]
    assert not any(waits["after"])


def waiting(module):
    """Whether each instruction of the entry that holds an atan2 waits for an exchanged number."""
    entry = module.computations[module.entry].lines

    def holds(text):
        callees = re.findall(r"(?:calls|to_apply)=%?([\w.-]+)", text)
        inside = [x for name in callees for x in module.computations[name].lines.values()]
        return " atan2(" in text or any(map(holds, inside))

    # The norm, and whether something is not finite; gradients are no scalars.
    late = {n for n, x in entry.items() if re.match(r"\(?\w+\[\].* all-reduce\(", x)}
    assert any("clip_by_global_norm" in entry[name] for name in late)
    for name, text in entry.items():  # operands come before what uses them
        if late & set(re.findall(r"%([\w.-]+)", text)):
            late.add(name)
    return [name in late for name, text in entry.items() if holds(text)]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"optimizer": adam()}, r"and the step has neither \(optax.clip_by_global_norm cannot"),
        (
            {"optimizer": js.skip_unused(js.chain(clip(), clip(), adam()), "replica")},
            "takes one js.clip_by_global_norm, found 2",
        ),
        (
            {
                "optimizer": js.skip_unused(js.chain(clip(), adam()), "replica"),
                "gradients": js.chain(MEAN, clip()),
            },
            "takes one js.clip_by_global_norm, found 2",
        ),
        (
            {"optimizer": adam(), "gradients": js.chain(clip(), MEAN)},
            "in `gradients` js.clip_by_global_norm must be last",
        ),
    ],
)
def test_what_cannot_be_late(setting, message):
    step = js.make_train_step(
        loss,
        mesh=js.virtual_mesh({"replica": R}),
        validate="after",
        **{"gradients": MEAN, **setting},
    )
    with pytest.raises(ValueError, match=message):
        step.init(PARAMS)


def deaf(tx):
    return optax.GradientTransformation(tx.init, lambda u, s, p=None: tx.update(u, s, p))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            {"optimizer": js.dynamic_loss_scale(js.chain(MEAN, clip(), adam()))},
            r"here it exchanges over \['replica'\] by itself",
        ),
        (
            {"optimizer": optax.chain(clip(), adam()), "gradients": MEAN},
            "is inside a transform that the step does not know.* js.chain",
        ),
        (
            {"optimizer": optax.chain(js.dynamic_loss_scale(adam())), "gradients": MEAN},
            "is inside a transform that the step does not know.* js.chain",
        ),
        (
            {"optimizer": js.chain(deaf(clip()), adam()), "gradients": MEAN},
            "is inside a transform that the step does not know.* js.chain",
        ),
        (
            {"optimizer": adam(), "gradients": js.chain(MEAN, deaf(clip()))},
            "is inside a transform that the step does not know.* js.chain",
        ),
    ],
)
def test_what_the_step_must_know(setting, message):
    with pytest.raises(ValueError, match=message):
        run(setting, "after")


def test_before_or_after():
    with pytest.raises(ValueError, match=r"`validate` must be .* got 'later'"):
        js.make_train_step(loss, adam(), mesh=js.virtual_mesh({"replica": 1}), validate="later")
