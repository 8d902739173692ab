"""The gradient transform as a tuple, and one made of a user's own."""

import copy
import dataclasses

import jax
import numpy as np
import optax
import pytest

import jaxslowmo as js

PARAMS = {"w": np.ones((4, 2), np.float32)}
mean = js.all_reduce_gradients("replica")


def test_it_is_a_transform_of_optax_of_two_items():
    assert isinstance(mean, optax.GradientTransformationExtraArgs)
    init, update = mean
    assert (init, update) == (mean.init, mean.update)
    assert optax.with_extra_args_support(mean) is mean


def test_copies_keep_the_spec():
    assert copy.copy(mean).spec is copy.deepcopy(mean).spec is mean.spec


def test_replacing():
    other = mean._replace(init=lambda params: optax.EmptyState())
    assert isinstance(other, js.GradientTransform)
    assert other.spec is mean.spec
    unknown = mean._replace(update=optax.trace(0.5).update)
    assert type(unknown) is optax.GradientTransformationExtraArgs
    local = js.GradientTransform(*mean, dataclasses.replace(mean.spec, axes=()))
    assert local.spec.axes == ()


def test_no_spec():
    with pytest.raises(ValueError, match=r"GradientTransform: `spec` must be a js\.Gr"):
        js.GradientTransform(*mean, None)


@pytest.mark.parametrize(
    ("tx", "options", "message"),
    [
        (js.local_sgd("replica"), {}, "`tx` must be an optax transform of gradients"),
        (3, {}, "`tx` must be an optax transform of gradients, got 3"),
        (optax.identity(), {"axes": 3}, "`axes` must be the name of a mapped axis"),
        (optax.identity(), {"due": True}, "`due` must be a function of the state"),
    ],
)
def test_what_makes_none(tx, options, message):
    with pytest.raises(ValueError, match=f"gradient_transform: {message}"):
        js.gradient_transform(tx, **options)


def by_hand(axis):
    def update(updates, state, params=None):
        return jax.lax.pmean(updates, axis), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def loss(params, batch):
    return ((batch @ params["w"]) ** 2).mean() + batch.mean()


@pytest.mark.parametrize("kind", [js.make_mesh, js.virtual_mesh])
def test_a_mean_by_hand_is_as_good_as_ours(kind):
    """With an optimizer that asks for the loss, and in a chain before it."""
    batch = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    mesh = kind({"replica": 2})
    results = []
    for tx in (mean, js.gradient_transform(by_hand("replica"), axes="replica")):
        step = js.make_train_step(loss, js.chain(tx, optax.polyak_sgd()), mesh=mesh)
        results.append(step(step.init(PARAMS), batch)[0].params["w"])
    np.testing.assert_allclose(*results, rtol=1e-6)
    np.testing.assert_array_equal(results[1][0], results[1][1])
