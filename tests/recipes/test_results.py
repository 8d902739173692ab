"""What the recipes leave, once they have run, is what the pages say: numbers, files, placement."""

import functools
from typing import Any

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.tree import leaf_names
from recipes.doc_blocks import (
    LOAD_IN_TORCH,
    LOOP,
    MAPPED,
    SETTING,
    fresh,
    of_recipe,
    run,
    sections,
)

FSDP = "FSDP by jit and NamedSharding"


def recipe(title: str) -> dict[str, Any]:
    return run("recipes", SETTING, LOOP, MAPPED, title)


def assert_close(tree: Any, expected: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), tree, expected
    )


def test_the_loops_and_the_training_step_agree():
    found = recipe("The training step of the library")
    for other in ("by_pmap", "by_vmap"):
        assert_close(found[other], found["stacked"])
    assert_close(found["train"](found["tx"], check_vma=False)[0], found["stacked"])
    assert_close(found["state"].params, found["stacked"])
    averaged = jax.tree.map(lambda x: np.mean(x, axis=0), found["state"].params)
    assert_close(found["final"], averaged)


def test_frozen_leaves_stay_the_others_train_alike_and_only_they_are_sent():
    found = recipe("Frozen layers")
    mesh, start = found["mesh"], found["params"]
    for frozen in (found["state"].params["b"], found["adapted"].model_state["b"]):
        np.testing.assert_array_equal(frozen, np.full(4, start["b"]))
    assert_close(found["whole"], js.consensus(found["state"].params, mesh=mesh))
    assert np.abs(np.asarray(found["whole"]["w"])).min() > 0.1
    lowered = found["step"].traced_by_phase(found["adapted"], found["batches"][0])[None].lower()
    report = js.comm_report_of(lowered, compile=False)
    assert sum(row.bytes for row in report.select(axis="replica", kind="average")) == 12


@pytest.mark.parametrize("title", ["Equinox", "Dropout and seeds"])
def test_the_consensus_has_learnt(title):
    found = recipe(title)
    error = jnp.mean((found["predicted"] - found["y"][0]) ** 2)
    assert error < (0.5 if title.startswith("Dropout") else 0.3) * jnp.var(found["y"][0])


def reading_state() -> dict[str, Any]:
    titles = [title for title, blocks in sections("reading-state").items() if blocks]
    return run("reading-state", *[title for title in titles if title != LOAD_IN_TORCH])


@of_recipe("reading-state")
def test_values_read_from_the_state():
    found = reading_state()
    assert found["updates"] == 24
    assert found["next_phase"] == ()
    assert np.float32(found["gamma"]) == np.float32(0.1)
    # Update 24 was a slow step: parameters are the anchor, on every replica.
    for name, anchor in found["anchor"].items():
        assert_close(found["first_replica"][name], anchor)
    assert found["loss"] < 0.5 * np.var(found["y"][24])


@of_recipe(FSDP)
def test_fsdp_agrees_with_whole_leaves_and_keeps_leaves_sharded():
    found = recipe(FSDP)
    whole = js.make_train_step(
        found["autoencoder_loss"],
        optax.adam(1e-2),
        sync=js.slowmo("data", base=js.local_sgd("data", sync_every=3), sync_every=6),
        mesh=js.virtual_mesh({"data": 2}),
        axis_name="data",
    )
    state = whole.init(jax.tree.map(np.asarray, found["sharded"]))
    for batch in found["inputs"]:
        state, _ = whole(state, batch)
    for other in (found["fsdp_state"].params, found["stacked"]):
        assert_close(other, state.params, rtol=1e-4, atol=1e-5)
    for name, spec in found["specs"].items():
        wanted = NamedSharding(found["fsdp_mesh"], P("replica", *spec))
        for leaf in (
            found["fsdp_state"].params[name],
            found["stacked"][name],
            found["fsdp_state"].opt_state[0].mu[name],
            found["state"][0][0].mu[name],
        ):
            assert leaf.sharding.is_equivalent_to(wanted, leaf.ndim), (name, leaf.sharding)
        one = NamedSharding(found["fsdp_mesh"], spec)
        assert found["model"][name].sharding.is_equivalent_to(one, found["model"][name].ndim)


STAGED = ["flax linen in stages", "flax nnx in stages"]


@pytest.mark.parametrize("title", [pytest.param(t, marks=of_recipe(t)) for t in STAGED])
def test_models_in_stages_are_the_models(title):
    """Masks count, dropout is drawn in training alone, and a tied table stays one."""
    found = run("model-parallel", "When not to pipeline", "One device per replica", title)
    drawn = np.random.default_rng(3).random(found["text"]["mask"].shape) < 0.7
    text = {**found["text"], "mask": drawn.astype(np.float32)}
    params, statistics = found["weights"], found["statistics"]
    assert not np.allclose(*map(ravelled, (statistics, found["averages"])))
    functions = found["pipe"], found["model"]
    assert_close(*[jax.jit(fn)(params, text, model_state=statistics)[0] for fn in functions])
    trained = found["trained"]
    assert not np.allclose(*map(ravelled, (params, trained)))
    for group in found["model"].tied:
        first, other = [
            dict(zip(leaf_names(trained[i]), jax.tree.leaves(trained[i]), strict=True))[name]
            for i, name in group
        ]
        np.testing.assert_array_equal(first, other)


@of_recipe(FSDP)
def test_a_contrastive_loss_over_all_replicas_is_that_of_the_whole_batch_under_jit():
    found = recipe(FSDP)

    def loss(params, batch):
        left, right = jnp.tanh(batch @ params["in"]), jnp.tanh(batch[:, ::-1] @ params["in"])
        own = jnp.arange(len(batch))
        return optax.softmax_cross_entropy_with_integer_labels(left @ right.T, own).mean()

    start = found["sharded"]
    value, grads = jax.jit(jax.value_and_grad(loss))(start, found["inputs"][0])
    for i in range(2):
        params = jax.tree.map(lambda x, i=i: x[i], found["contrastive"].params)
        assert_close(params, jax.tree.map(lambda p, g: p - 0.1 * g, start, grads))
    assert_close(js.host_mean(found["of_replicas"])["loss"], float(value))


def test_what_the_page_writes_for_the_whole_batch_gives_the_numbers_of_jit():
    """Normalised advantages, statistics and the gradient's norm; without the lines others."""
    draws = np.random.default_rng(3)
    x, a = draws.normal(size=(16, 3)).astype("f"), np.arange(16, dtype=np.float32) ** 2
    params = {"w": np.float32([0.5, -1.0, 2.0])}

    def normalised(a):
        return (a - a.mean()) / (a.std() + 1e-8)

    def loss_of(mean, advantages):
        def loss(params, batch):
            y = (batch["x"] - mean(batch["x"])[None]) @ params["w"]
            return jnp.mean(jnp.tanh(y) * advantages(batch["a"]))

        return loss

    def updated(loss, a):
        averaged = js.chain(js.all_reduce_gradients("replica"), js.clip_by_global_norm(0.01))
        mesh = js.make_mesh({"replica": 4})
        step = js.make_train_step(loss, optax.sgd(1.0), gradients=averaged, mesh=mesh)
        return step(step.init(params), {"x": x, "a": a})[0].params["w"][0]

    of_batch = lambda x: x.mean(0)  # noqa: E731
    of_all = lambda x: jax.lax.pmean(x.mean(0), "replica")  # noqa: E731
    grad = jax.grad(loss_of(of_batch, normalised))(params, {"x": x, "a": a})["w"]
    expected = params["w"] - grad * min(1.0, 0.01 / np.linalg.norm(grad))
    assert_close(updated(loss_of(of_all, lambda a: a), normalised(a)), expected)
    assert np.abs(updated(loss_of(of_batch, normalised), a) - expected).max() > 1e-3


def test_norms_are_logged():
    found = recipe("Norms of gradients, updates and parameters")["logged"]
    assert [x["step"] for x in found] == [6, 12, 18, 24]
    # Adam's first updates have the size of its rate in every element, of which there are four.
    assert found[0]["norm/updates"] == pytest.approx(0.05 * 2, rel=0.3)
    assert all(found[0][f"norm/{name}"] > 0 for name in ("gradients", "params"))


@pytest.mark.parametrize("title", ["flax nnx, as functions", "Equinox", "Haiku"])
def test_models_train_alike_in_both_modes(title, monkeypatch):
    found, names = recipe(title), dict(run("recipes", SETTING, LOOP, MAPPED))
    assert isinstance(names["mesh"], jax.sharding.Mesh)  # of devices
    monkeypatch.setattr(js, "make_train_step", functools.partial(js.make_train_step, mode="host"))
    of_host = fresh("recipes", title, names=names)
    assert of_host["step"].mode == "host"
    for part in ("params", "model_state"):
        trees = (jax.tree.leaves(getattr(x["state"], part)) for x in (of_host, found))
        assert_close(*([x for x in y if jnp.issubdtype(x.dtype, jnp.floating)] for y in trees))


def ravelled(tree: Any) -> Any:
    return jax.flatten_util.ravel_pytree(tree)[0]


def test_batch_norm_of_equinox_in_its_default_mode_names_what_works():
    import equinox as eqx

    norm = eqx.nn.BatchNorm(3, axis_name="batch", channelwise_affine=False, mode="ema")
    norm, statistics = eqx.nn.make_with_state(lambda: norm)()

    def loss_fn(params, x, *, model_state):
        model = jax.vmap(norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        y, model_state = model(x * params["w"], model_state)
        return jnp.mean(y), ({}, model_state)

    mesh = js.make_mesh({"replica": 4})
    step = js.make_train_step(loss_fn, optax.sgd(0.1), sync="none", mesh=mesh)
    with pytest.raises(ValueError, match="Old and new values") as error:
        step(step.init({"w": jnp.ones(3)}, model_state=statistics), np.ones((8, 3), "f"))
    (note,) = [x for x in error.value.__notes__ if "loss_fn" in x]
    assert 'mode="batch"' in note
    assert "js.virtual_mesh" in note
