"""What the recipes leave, once they have run, is what the pages say: numbers, files, placement."""

import struct
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tensorboardX.proto.event_pb2 import Event

import jaxslowmo as js
from jaxslowmo.models import GPTConfig, gpt_loss_fn, gpt_param_specs, gpt_rules, init_gpt
from jaxslowmo.tree import leaf_names
from recipes.doc_blocks import (
    LOAD_IN_TORCH,
    LOOP,
    MAPPED,
    SETTING,
    fresh,
    of_recipe,
    outputs,
    run,
    sections,
)

MULTI_STEPS = "optax.MultiSteps"
MASKED = "optax.masked: leaves that stay local, leaves that are no floats"
NOT_FINITE = "Skipping steps that are not finite"
FSDP = "FSDP by jit and NamedSharding"


def recipe(title: str) -> dict[str, Any]:
    return run("recipes", SETTING, LOOP, MAPPED, title)


def assert_close(tree: Any, expected: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), tree, expected
    )


def spread(leaf: Any) -> float:
    """How far replicas are apart."""
    return float(np.max(np.ptp(np.asarray(leaf), axis=0)))


def test_the_loops_and_the_training_step_agree():
    found = recipe("The training step of the library")
    for other in ("by_pmap", "by_vmap"):
        assert_close(found[other], found["stacked"])
    assert_close(found["train"](found["tx"], check_vma=False)[0], found["stacked"])
    assert_close(found["state"].params, found["stacked"])
    averaged = jax.tree.map(lambda x: np.mean(x, axis=0), found["state"].params)
    assert_close(found["final"], averaged)


@pytest.mark.parametrize(
    ("title", "name", "by_pmap"), [(MULTI_STEPS, "tx", True), (NOT_FINITE, "tx", False)]
)
def test_executions_agree(title, name, by_pmap):
    found = recipe(title)
    expected, _ = found["train_mapped"](found[name], found["vmap"])
    results = [found["train"](found[name], check_vma=c) for c in (True, False)]
    if by_pmap:
        results.append(found["train_mapped"](found[name], found["pmap"]))
    for params, _ in results:
        assert_close(params, expected)
    assert max(map(spread, expected.values())) < 1e-5


def test_two_levels_equal_the_training_step():
    found = recipe("Two levels in shard_map")
    step = js.make_train_step(
        found["loss_fn"], optax.sgd(0.1), sync=found["sync"], mesh=found["two_levels"]
    )
    state = step.init(found["params"])
    for batch in found["batches"]:
        state, _ = step(state, batch)
    assert_close(found["stacked"], state.params)


def test_where_clipping_goes():
    """Gradients of each replica before their mean, or the mean, by hand."""
    found = fresh("recipes", SETTING, LOOP, "Gradient clipping")
    shares = jax.tree.map(lambda b: b.reshape(4, -1, *b.shape[1:]), found["batches"][0])
    grads = jax.vmap(jax.grad(found["loss_fn"]), in_axes=(None, 0))(found["params"], shares)

    def clipped(grad):
        norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(grad)))
        assert norm > 1
        return jax.tree.map(lambda g: np.asarray(g) / norm, grad)

    def mean(trees):
        return jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *trees)

    each = [jax.tree.map(lambda g, i=i: g[i], grads) for i in range(4)]
    expected = {"clip_each": mean(map(clipped, each)), "clip_mean": clipped(mean(each))}
    found["batches"][1:] = []
    for name, gradient in expected.items():
        params, _ = found["train"](found[name])
        assert_close(params, jax.tree.map(lambda g: np.stack([-0.1 * g] * 4), gradient))


def test_a_replica_that_skips_its_step_still_synchronises():
    found = fresh("recipes", SETTING, LOOP, NOT_FINITE)
    x, y = found["batches"][4]
    found["batches"][4] = (x, np.where(np.arange(64) // 16 == 1, np.nan, y))
    for tx in (found["tx"], found["tx_reduced"]):
        params, _ = found["train"](tx)
        assert max(spread(leaf) for leaf in params.values()) < 1e-5
        assert all(np.all(np.isfinite(leaf)) for leaf in params.values())


def test_masked_leaves_stay_as_they_are_and_a_rate_of_zero_leaves_finite_state():
    found = recipe(MASKED)
    np.testing.assert_array_equal(found["state"].model_state["order"], [[2, 0, 1]] * 4)
    found = recipe("Learning-rate schedules")
    assert found["schedule"](0) == found["schedule"](18) == 0
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(found["train"](found["tx"])))


def test_the_mean_of_emas_is_the_ema_of_the_consensus():
    found = recipe("EMA, the exponential moving average of parameters")
    step, expected = found["step"], found["params"]
    state = step.init(expected)
    for batch in found["batches"]:
        passed_by = js.consensus(state.params, mesh=found["mesh"])
        expected = optax.incremental_update(passed_by, expected, 0.1)
        state, _ = step(state, batch)
    assert_close(found["averaged"], expected)
    # Replicas, and with them their EMAs, are apart meanwhile.
    assert spread(found["ema"]["w"]) > 1e-3


def test_weight_decay_sees_one_copy():
    found, mesh = recipe("Weight decay"), js.virtual_mesh({"replica": 3})
    step = js.make_train_step(
        lambda params, batch: 0.0 * params["b"], found["decayed"], sync=found["slow"](), mesh=mesh
    )
    state = step.init({"w": jnp.ones(3), "b": jnp.ones(())})
    for _ in range(2):
        state, _ = step(state, np.zeros((3, 1), np.float32))
    assert_close(state.params, {"w": np.full((3, 3), (1 - 0.05 * 0.5) ** 2), "b": np.ones(3)})


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


@pytest.mark.parametrize("title", ["flax nnx, as functions", "Equinox", "Haiku"])
def test_models_train_alike_in_both_modes(title, monkeypatch):
    found = recipe(title)
    names = dict(run("recipes", SETTING, LOOP, MAPPED))
    assert isinstance(names["mesh"], jax.sharding.Mesh)  # of devices
    monkeypatch.setattr(js, "make_train_step", partial(js.make_train_step, mode="host"))
    of_host = fresh("recipes", title, names=names)
    assert of_host["step"].mode == "host"
    for part in ("params", "model_state"):
        trees = (getattr(names["state"], part) for names in (of_host, found))
        assert_close(*([x for x in jax.tree.leaves(tree) if _is_float(x)] for tree in trees))


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def test_batch_norm_of_equinox_in_its_default_mode_names_what_works():
    """The error on devices says what to do; the model trains on a virtual mesh."""
    import equinox as eqx

    norm = eqx.nn.BatchNorm(3, axis_name="batch", channelwise_affine=False, mode="ema")
    norm, statistics = eqx.nn.make_with_state(lambda: norm)()

    def loss_fn(params, x, *, model_state):
        model = jax.vmap(norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        y, model_state = model(x * params["w"], model_state)
        return jnp.mean(y), ({}, model_state)

    def update(mesh):
        step = js.make_train_step(loss_fn, optax.sgd(0.1), sync="none", mesh=mesh)
        return step(step.init({"w": jnp.ones(3)}, model_state=statistics), np.ones((8, 3), "f"))

    with pytest.raises(ValueError, match="Old and new values") as error:
        update(js.make_mesh({"replica": 4}))
    (note,) = [x for x in error.value.__notes__ if "loss_fn" in x]
    assert 'mode="batch"' in note
    assert "js.virtual_mesh" in note
    update(js.virtual_mesh({"replica": 4}))


@pytest.mark.parametrize("title", ["Equinox", "Haiku", "Dropout and seeds"])
def test_the_consensus_has_learnt(title):
    found = recipe(title)
    error = jnp.mean((found["predicted"] - found["y"][0]) ** 2)
    assert error < (0.5 if title.startswith("Dropout") else 0.3) * jnp.var(found["y"][0])


def test_statistics_are_averaged_with_the_parameters():
    means = recipe("Haiku")["state"].model_state["batch_norm/~/mean_ema"]["average"]
    assert means.shape == (4, 1, 3)
    assert spread(means) == 0
    assert np.any(np.asarray(means) != 0)
    found = recipe("flax nnx, as functions")
    x, y = found["x"][0], found["y"][0]
    assert jnp.mean((found["model"](x) - y) ** 2) < 0.5 * jnp.var(y)


def test_a_train_state_of_flax_under_pmap_ends_together():
    found = recipe("flax linen: TrainState under pmap")
    state = found["state"]
    np.testing.assert_array_equal(state.step, [24] * 4)
    kernel, bias = state.params["kernel"], state.params["bias"]
    np.testing.assert_allclose(kernel.reshape(4, 3), [[1, -2, 3]] * 4, atol=1.5)
    assert max(map(spread, (kernel, bias))) < 2e-6  # after the last slow step
    assert_close(found["train_linen"](mapper=found["vmap"]).params, state.params)


TOKENS = ["Losses per token", "Exchanges weighted by tokens"]


def of_tokens() -> dict[str, Any]:
    return run("accumulation", SETTING, *TOKENS)


def trained_on_whole_batches(found, batches, loss, *, accumulate=1):
    """Plain jax: parameters after Adam on the whole batches, and the losses."""
    params, optimizer, losses = found["words"], optax.adam(0.01), []
    state = optimizer.init(params)
    for rows in np.reshape(batches, (-1, accumulate * batches.shape[1], batches.shape[2])):
        value, grads = jax.value_and_grad(loss)(params, rows)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(value))
    return params, losses


@of_recipe("accumulation")
def test_a_sum_and_its_number_train_as_plain_jax_does_on_the_whole_batch():
    found = of_tokens()
    expected, losses = trained_on_whole_batches(found, found["text"], found["token_loss"])
    np.testing.assert_allclose(found["pair_losses"], losses, rtol=1e-5)
    stacked = found["pair_state"].params
    assert_close(jax.tree.map(lambda leaf: leaf[0], stacked), expected, atol=1e-5)


def token_step(found: dict[str, Any], divide_by: Any = "active", **options: Any) -> Any:
    """A step that averages gradients by the weights of replicas."""
    gradients = js.all_reduce_gradients("replica", divide_by=divide_by)
    return js.make_train_step(
        found["token_loss"], optax.adam(0.01), gradients=gradients, mesh=found["mesh"], **options
    )


@of_recipe("accumulation")
def test_with_tokens_as_weights_batches_of_an_update_count_by_them():
    found = of_tokens()
    text, step = found["text"], token_step(found)
    expected, _ = trained_on_whole_batches(found, text, found["token_loss"], accumulate=3)
    weighted = (js.train.WeightedBatch(rows, found["tokens_of"](rows)) for rows in text)
    *_, last = js.train_loop(step, step.init(found["words"]), weighted, accumulate=3)
    assert_close(jax.tree.map(lambda leaf: leaf[0], last.state.params), expected, atol=1e-5)


@of_recipe("accumulation")
@pytest.mark.parametrize("without", ["nothing", "weight", "active", "one batch"])
def test_each_part_of_the_recipe_for_tokens_counts(without):
    """Plain jax on the whole batch is missed by more than rounding without any one of them."""
    found = of_tokens()
    step = token_step(
        found,
        divide_by="initial" if without == "active" else "active",
        accumulate=2 if without == "one batch" else 1,
    )
    state = step.init(found["words"])
    for rows in found["text"]:
        state, _ = step(state, rows, None if without == "weight" else found["tokens_of"](rows))
    expected, _ = trained_on_whole_batches(found, found["text"], found["token_loss"])
    missed = np.abs(np.asarray(state.params["out"][0] - expected["out"])).max()
    assert missed < 1e-5 if without == "nothing" else missed > 1e-3


@of_recipe("accumulation")
def test_a_rare_exchange_weighs_replicas_by_the_tokens_of_its_own_step():
    found = of_tokens()
    replicas, optimizer = [found["words"]] * 4, optax.adam(0.01)
    states = [optimizer.init(found["words"])] * 4
    for t, rows in enumerate(found["text"], start=1):
        for r, share in enumerate(rows.reshape(4, 8, 9)):
            if found["tokens_of"](share, 1)[0] == 0:
                continue  # a replica of weight 0 keeps its parameters and its optimizer's state
            grads = jax.grad(found["token_loss"])(replicas[r], share)
            updates, states[r] = optimizer.update(grads, states[r], replicas[r])
            replicas[r] = optax.apply_updates(replicas[r], updates)
        if t % 3 == 0:
            tokens = found["tokens_of"](rows)
            leaves = {name: [params[name] for params in replicas] for name in replicas[0]}
            mean = {name: np.average(x, axis=0, weights=tokens) for name, x in leaves.items()}
            replicas = [jax.tree.map(np.float32, mean)] * 4
    stacked = found["result"].state.params
    assert_close(jax.tree.map(lambda leaf: leaf[0], stacked), replicas[0], atol=1e-5)


def test_loggers_have_every_record():
    found = recipe("Logging: TensorBoard, wandb, tqdm")
    step = js.make_train_step(
        found["loss_fn"], optax.adam(0.05), sync=found["slow"](), mesh=found["mesh"]
    )
    results = js.train_loop(step, step.init(found["params"]), found["batches"])
    losses = {r.step: js.host_mean(r.metrics)["loss"] for r in results}
    assert found["bar"].n == found["bar"].total == 24
    assert f"loss={losses[24]:.3g}" in found["bar"].postfix
    assert "phase=slow" in found["bar"].postfix

    (file,) = Path(found["logs"]).iterdir()
    data, scalars = file.read_bytes(), {}
    while data:  # length, its checksum, an event, its checksum
        (size,) = struct.unpack("<Q", data[:8])
        event = Event.FromString(data[12 : 12 + size])
        scalars |= {(v.tag, event.step): v.simple_value for v in event.summary.value}
        data = data[16 + size :]
    due = [6, 12, 18, 24]
    assert scalars.keys() == {(name, t) for name in ("loss", "consensus_loss") for t in due}
    assert [scalars["loss", t] for t in due] == pytest.approx([losses[t] for t in due])


def reading_state() -> dict[str, Any]:
    titles = [title for title, blocks in sections("reading-state").items() if blocks]
    return run("reading-state", *[title for title in titles if title != LOAD_IN_TORCH])


@of_recipe("reading-state")
def test_an_export_is_the_model_in_jax_and_flax():
    found = reading_state()
    titles = ["", "The consensus", "Parameters, anchor, momentum, counters"]
    before = run("reading-state", *titles, "What an update exchanges")
    consensus = before["step"].consensus(before["state"])
    for loaded in (found["loaded"], found["tensors"]):
        jax.tree.map(np.testing.assert_array_equal, loaded, consensus)
    np.testing.assert_array_equal(found["nnx_model"].kernel[...], found["trained"]["kernel"][...])


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


@of_recipe("reading-state")
def test_parameters_of_all_replicas_fail_as_the_page_says():
    found = reading_state()
    batch = found["x"][0], found["y"][0]
    with pytest.raises(TypeError) as error:
        found["loss_fn"](jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), found["averaged"]), batch)
    (shown,) = outputs("reading-state", "Errors about shapes")
    assert f"TypeError: {error.value}" in shown


@of_recipe("reading-state")
def test_an_exported_step_has_no_container_that_jax_cannot_write():
    found = reading_state()

    def kinds(tree):
        data = tree.node_data()
        return {data and data[0]}.union(*map(kinds, tree.children()))

    exported, step, batch = found["exported"], found["step"], (found["x"][0], found["y"][0])
    for tree in (exported.in_tree, exported.out_tree):
        assert kinds(tree) <= {None, tuple, list, dict}
    state, metrics = step(step.init(found["params"]), batch)
    assert_close(found["state"].params, state.params)
    assert_close(found["metrics"], metrics)


@of_recipe(FSDP)
def test_fsdp_agrees_with_whole_leaves_and_keeps_leaves_sharded():
    found = recipe(FSDP)
    whole = js.make_train_step(
        found["autoencoder_loss"],
        optax.adam(1e-2),
        sync=js.slowmo("replica", base=js.local_sgd("replica", sync_every=3), sync_every=6),
        mesh=js.virtual_mesh({"replica": 2}),
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


def with_local_sgd(found: dict[str, Any]) -> tuple[js.train.TrainStep, js.TrainState]:
    """The step that the page makes of a jit step, and the state that it leaves."""
    step = js.make_train_step(
        found["autoencoder_loss"],
        found["optimizer"],
        sync=js.local_sgd("replica", sync_every=3),
        mesh=found["fsdp_mesh"],
    )
    state = step.init(found["sharded"])
    for batch in found["inputs"]:
        state, _ = step(state, jax.device_put(batch, found["rows"]))
    return step, state


@of_recipe(FSDP)
@pytest.mark.parametrize("sizes", [{"data": 2, "fsdp": 4}, {"data": 2}], ids=["fsdp", "whole"])
def test_replicas_are_along_the_axis_that_a_jit_step_has(sizes):
    found = recipe(FSDP)
    mesh = js.make_mesh(sizes)
    specs = found["specs"] if "fsdp" in sizes else dict.fromkeys(found["specs"], P())
    params = {
        name: jax.device_put(np.asarray(leaf), NamedSharding(mesh, specs[name]))
        for name, leaf in found["sharded"].items()
    }
    sync = js.local_sgd("data", sync_every=3)
    step = js.make_train_step(
        found["autoencoder_loss"], found["optimizer"], sync=sync, mesh=mesh, axis_name="data"
    )
    state = step.init(params)
    for batch in found["inputs"]:
        state, _ = step(state, jax.device_put(batch, NamedSharding(mesh, P(tuple(sizes)))))
    assert_close(state.params, with_local_sgd(found)[1].params, rtol=1e-4, atol=1e-5)


@of_recipe(FSDP)
def test_partitioned_parameters_train_without_their_boxes():
    found = recipe(FSDP)
    base = js.local_sgd("replica", sync_every=3)
    whole = js.make_train_step(
        found["boxed_loss"],
        optax.adam(1e-2),
        sync=js.slowmo("replica", base=base, sync_every=6, learning_rate=1e-2),
        mesh=js.virtual_mesh({"replica": 2}),
    )
    state = whole.init(jax.tree.map(np.asarray, found["unboxed"]))
    for batch in found["inputs"]:
        state, _ = whole(state, batch)
    params = found["boxed_state"].params
    assert_close(params, state.params, rtol=1e-4, atol=1e-5)
    assert params["Dense_1"]["kernel"].sharding.spec == P("replica", None, "fsdp")

    # Boxes name axes that a mesh does not have; on one that has them parameters may be whole.
    for mesh in (js.make_mesh({"replica": 4}), found["fsdp_mesh"]):
        step = js.make_train_step(found["boxed_loss"], optax.adam(1e-2), sync="none", mesh=mesh)
        if mesh is found["fsdp_mesh"]:
            step(step.init(found["boxed"]), found["inputs"][0])
            continue
        with pytest.raises(ValueError, match="fsdp") as raised:
            step(step.init(found["boxed"]), found["inputs"][0])
        assert any("flax" in str(frame.path) for frame in raised.traceback)


@of_recipe(FSDP)
def test_bytes_of_fsdp_are_those_of_blocks():
    found = recipe(FSDP)
    batch = jax.device_put(found["inputs"][0], NamedSharding(found["fsdp_mesh"], P("replica")))
    lowered = found["own_fsdp_step"].lower(found["stacked"], found["state"], batch)
    report = js.comm_report_of(lowered, compile=False)
    sent = {r.collective: r.bytes for r in report.select(axis="replica", kind="slow")}
    # A quarter of both matrices, and the bias, in float32.
    block = 4 * (64 * 32 // 4 * 2 + 64)
    assert sent == {"reduce-scatter": block, "all-gather": block}
    # The step gathers nothing where it averages.
    batch = jax.device_put(found["inputs"][0], found["rows"])
    report = js.comm_report(*with_local_sgd(found), batch)
    moved: dict[tuple[str, str], int] = {}
    for row in report.select(level="compiled"):
        moved[row.kind, row.axis] = moved.get((row.kind, row.axis), 0) + row.bytes
    assert moved["average", "fsdp"] == moved["local", "fsdp"]
    assert ("local", "replica") not in moved


def test_a_gpt_by_rules_trains_as_a_whole_one():
    mesh = js.make_mesh({"replica": 2, "fsdp": 2, "tensor": 2})
    gpt = GPTConfig(num_layers=1, num_heads=2, embed_dim=16, context_length=8, qkv_by_head=True)
    text = np.random.default_rng(0).integers(0, 256, (4, 8, 9)).astype(np.uint8)

    def trained(loss_fn, mesh, params):
        sync = js.slowmo("replica", base=js.local_sgd("replica", sync_every=2), sync_every=4)
        step = js.make_train_step(loss_fn, optax.adam(1e-2), sync=sync, mesh=mesh)
        state = step.init(params)
        for batch in text:
            state, _ = step(state, batch)
        return state.params

    sharded = jax.tree.map(
        lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)),
        init_gpt(gpt),
        gpt_param_specs(gpt, mesh),
    )
    params = trained(gpt_loss_fn(gpt, gpt_rules(mesh)), mesh, sharded)
    whole = trained(gpt_loss_fn(gpt), js.virtual_mesh({"replica": 2}), init_gpt(gpt))
    assert_close(params, whole, rtol=1e-4, atol=1e-4)
    kernel = params["blocks"][0]["expand"]["kernel"]
    assert kernel.sharding.spec == P("replica", "fsdp", "tensor")


@of_recipe(FSDP)
def test_a_contrastive_loss_over_all_replicas_is_that_of_the_whole_batch_under_jit():
    found = recipe(FSDP)

    @jax.jit
    def whole(params, batch):
        def loss(params):
            left, right = jnp.tanh(batch @ params["in"]), jnp.tanh(batch[:, ::-1] @ params["in"])
            logits = left @ right.T
            return optax.softmax_cross_entropy_with_integer_labels(
                logits, jnp.arange(len(batch))
            ).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    expected, loss = whole(found["sharded"], found["inputs"][0])
    for i in range(2):
        assert_close(jax.tree.map(lambda x, i=i: x[i], found["contrastive"].params), expected)
    assert_close(js.host_mean(found["of_replicas"])["loss"], float(loss))


def test_what_the_page_writes_for_the_whole_batch_gives_the_numbers_of_jit():
    """Normalised advantages, statistics and the gradient's norm; without the lines others."""
    draws = np.random.default_rng(3)
    batch = {
        "x": draws.normal(size=(16, 3)).astype(np.float32),
        "a": (draws.normal(size=16) + np.arange(16)).astype(np.float32),
    }
    params = {"w": np.float32([0.5, -1.0, 2.0])}

    def normalised(a):
        return (a - a.mean()) / (a.std() + 1e-8)

    def loss_fn(mean, advantages):
        def loss(params, batch):
            y = (batch["x"] - mean(batch["x"])[None]) @ params["w"]
            return jnp.mean(jnp.tanh(y) * advantages(batch["a"]))

        return loss

    def step_of(loss, batch):
        averaged = js.chain(js.all_reduce_gradients("replica"), js.clip_by_global_norm(0.01))
        step = js.make_train_step(
            loss, optax.sgd(1.0), gradients=averaged, mesh=js.make_mesh({"replica": 4})
        )
        return step(step.init(params), batch)[0].params["w"][0]

    of_batch = lambda x: x.mean(0)  # noqa: E731
    grads = jax.grad(loss_fn(of_batch, normalised))(params, batch)
    clip = optax.clip_by_global_norm(0.01)
    expected = params["w"] - clip.update(grads, clip.init(params))[0]["w"]
    mean = lambda x: jax.lax.pmean(x.mean(0), "replica")  # noqa: E731
    before = batch | {"a": normalised(batch["a"])}
    assert_close(step_of(loss_fn(mean, lambda a: a), before), expected)
    without = step_of(loss_fn(of_batch, normalised), batch)
    assert np.abs(without - expected).max() > 1e-3


def test_norms_are_logged():
    found = recipe("Norms of gradients, updates and parameters")
    assert [x["step"] for x in found["logged"]] == [6, 12, 18, 24]
    first = found["logged"][0]
    names = {"norm/gradients", "norm/updates", "norm/params"}
    assert names <= {*first}
    assert all(np.isfinite(first[name]) and first[name] > 0 for name in names)
    # Adam's first updates have the size of its rate in every element, of which there are four.
    assert first["norm/updates"] == pytest.approx(0.05 * 2, rel=0.3)


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


def ravelled(tree: Any) -> Any:
    return jax.flatten_util.ravel_pytree(tree)[0]
