"""Tests of a pipeline in one program: batches, keys, types, schedules without backward passes."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from support.layered import assert_close, assert_gradients_alike, language_model, tokens

SCHEDULE = js.schedules.one_f_one_b(2, 4)


def pipeline(mesh_of, schedule=SCHEDULE, num_blocks=2, sizes=None, **options):
    model, params = language_model(num_blocks)
    mesh = mesh_of(sizes or {"stage": schedule.num_stages})
    pipe = js.pipelined(model, params, schedule, mesh=mesh, **options)
    return pipe, pipe.layout.stack(params), model, params


def pipeline_of_layers(mesh_of, layers, loss, params, **options):
    mesh = mesh_of({"stage": 2})
    pipe = js.pipelined(js.LayeredModel(layers, loss), params, SCHEDULE, mesh=mesh, **options)
    return pipe, pipe.layout.stack(params)


def mean_of_output(output, batch):
    return jnp.mean(output)


def test_without_gradients_forward_passes_run_alone(mesh_of):
    pipe, stacked, model, params = pipeline(mesh_of)
    batch = tokens(8)
    assert_close(jax.jit(pipe.loss_fn)(stacked, batch), model(params, batch))
    program = jax.jit(pipe.loss_fn).lower(stacked, batch).as_text()
    assert program.count("stablehlo.collective_permute") == 1  # no cotangent travels

    only = js.schedules.one_f_one_b(2, 4, forward_only=True)
    pipe, stacked, *_ = pipeline(mesh_of, only)
    assert_close(jax.jit(pipe.loss_fn)(stacked, batch), model(params, batch))
    with pytest.raises(ValueError, match="forward passes alone"):
        jax.grad(pipe.loss_fn, has_aux=True)(stacked, batch)


def test_activations_may_be_trees_of_any_types(mesh_of):
    # bfloat16 values, integers and booleans travel; what has no cotangent gets none.
    def first(params, batch):
        x = (batch["x"] @ params["w"]).astype(jnp.bfloat16)
        return {"x": x, "count": jnp.arange(len(x)), "mask": (batch["x"][:, 0] > 0,)}

    def second(params, activations):
        x = jnp.where(
            activations["mask"][0][:, None], activations["x"].astype(jnp.float32) @ params["w"], 0
        )
        return x * activations["count"][:, None]

    params = [{"w": jnp.eye(3)}, {"w": 2 * jnp.eye(3)}]
    model = js.LayeredModel([first, second], mean_of_output)
    pipe, stacked = pipeline_of_layers(mesh_of, [first, second], mean_of_output, params)
    batch = {"x": np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)}
    loss, grads = jax.jit(jax.value_and_grad(pipe.loss_fn))(stacked, batch)

    def loss_without_stages(params):
        split = [{"x": batch["x"][2 * m : 2 * m + 2]} for m in range(4)]
        return sum(model(params, part) for part in split) / 4

    expected, expected_grads = jax.value_and_grad(loss_without_stages)(params)
    assert_close(loss, expected)
    assert_close(pipe.layout.unstack(grads), expected_grads, 1e-2)


def test_parameters_keep_their_dtypes_and_integers_get_no_gradient(mesh_of):
    def scaled(params, x):
        return (x["x"] if isinstance(x, dict) else x) * params["scale"] + params["offset"]

    leaf = {"scale": jnp.full(3, 2.0, jnp.bfloat16), "offset": jnp.arange(3)}
    params = [leaf, jax.tree.map(lambda x: x + 1, leaf)]
    pipe, stacked = pipeline_of_layers(mesh_of, [scaled, scaled], mean_of_output, params)
    batch = {"x": np.ones((8, 3), jnp.bfloat16)}
    grads = jax.jit(jax.grad(pipe.loss_fn, allow_int=True))(stacked, batch)
    expected_grads = jax.grad(js.LayeredModel([scaled, scaled], mean_of_output), allow_int=True)(
        params, batch
    )
    assert grads["bfloat16"].dtype == jnp.bfloat16
    assert grads["int32"].dtype == jax.dtypes.float0
    for actual, expected in zip(np.asarray(grads["bfloat16"]), expected_grads, strict=True):
        assert_close(actual.astype(np.float32), expected["scale"].astype(np.float32), 1e-2)


def test_layers_draw_the_same_keys_forward_and_backward_and_others_per_microbatch(mesh_of):
    def dropped(params, x, *, key):
        x = x["x"] if isinstance(x, dict) else x
        return x @ params["w"] * jax.random.bernoulli(key, 0.5, x.shape)

    params = [{"w": jnp.eye(3) + i} for i in range(4)]
    pipe, stacked = pipeline_of_layers(mesh_of, [dropped] * 4, mean_of_output, params)
    batch, key = {"x": np.ones((8, 3), np.float32)}, jax.random.key(5)
    loss, grads = jax.jit(jax.value_and_grad(pipe.loss_fn))(stacked, batch, rng=key)
    model = js.LayeredModel([dropped] * 4, mean_of_output)

    def loss_without_stages(params):
        parts = [{"x": batch["x"][2 * m : 2 * m + 2]} for m in range(4)]
        keys = [jax.random.fold_in(key, m) for m in range(4)]
        return sum(model(params, x, rng=k) for x, k in zip(parts, keys, strict=True)) / 4

    expected, expected_grads = jax.value_and_grad(loss_without_stages)(params)
    assert_close(loss, expected)
    assert_close(pipe.layout.unstack(grads), expected_grads)
    assert_close(jax.jit(pipe.loss_fn)(stacked, batch, rng=key), expected)


def test_layers_may_hold_loops_that_start_from_their_arguments(mesh_of):
    def recurrent(params, x):
        x = x["x"] if isinstance(x, dict) else x
        return jax.lax.scan(lambda h, v: ((h + v) * params["w"], h), jnp.zeros_like(x[0]), x)[1]

    params = [{"w": jnp.full(3, 0.5)}] * 2
    pipe, stacked = pipeline_of_layers(mesh_of, [recurrent] * 2, mean_of_output, params)
    batch = {"x": np.ones((8, 3), np.float32)}
    loss = jax.jit(pipe.loss_fn)(stacked, batch)
    alike = {"x": batch["x"][:2]}  # as every microbatch
    assert_close(loss, js.LayeredModel([recurrent] * 2, mean_of_output)(params, alike))


def test_layers_may_sort(mesh_of):
    # jax types the indices, which start equal on all stages, as varying by an equation of its own.
    def first(params, batch):
        return batch @ params["w"]

    def second(params, x):
        return jnp.sort(x @ params["w"]) * jnp.take_along_axis(x, jnp.argsort(x), 1)

    params = [{"w": jnp.diag(jnp.array([1.0, -2.0, 3.0]))}, {"w": jnp.ones((3, 3)) + jnp.eye(3)}]
    model = js.LayeredModel([first, second], mean_of_output)
    pipe, stacked = pipeline_of_layers(mesh_of, [first, second], mean_of_output, params)
    batch = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    loss_and_grads = jax.jit(jax.value_and_grad(pipe.loss_fn))(stacked, batch)
    loss, grads = jax.value_and_grad(model)(params, batch)
    assert_close((loss_and_grads[0], pipe.layout.unstack(loss_and_grads[1])), (loss, grads))


def test_small_gradients_of_float16_survive_with_a_scale(mesh_of):
    def scaled(params, x):
        x = x["x"] if isinstance(x, dict) else x
        return x * params["w"]

    params = [{"w": np.full(64, 0.01, np.float16)}, {"w": np.full(64, 0.01, np.float16)}]
    batch = {"x": np.full((64, 64), 0.01, np.float16)}

    def gradients(**options):
        pipe, stacked = pipeline_of_layers(mesh_of, [scaled] * 2, mean_of_output, params, **options)
        cotangent = lambda s: 1024 * pipe.loss_fn(s, batch).astype(jnp.float32)  # noqa: E731
        return np.asarray(jax.jit(jax.grad(cotangent))(stacked)["float16"], np.float32)

    exact = 1024 * 0.01 * 0.01 / 64
    assert np.abs(gradients() - exact).max() > 0.1 * exact
    np.testing.assert_allclose(gradients(gradient_scale=2.0**10), exact, rtol=0.02)


def test_the_cotangent_of_metrics_is_ignored(mesh_of):
    pipe, stacked, *_ = pipeline(mesh_of)
    batch = tokens(8)
    of_loss = jax.jit(jax.grad(lambda s: 3 * pipe.loss_fn(s, batch)[0]))(stacked)
    of_loss_and_metrics = jax.jit(
        jax.grad(lambda s: sum(map(jnp.sum, jax.tree.leaves(pipe.loss_fn(s, batch)))))
    )
    assert_close(of_loss, jax.tree.map(lambda g: 3 * g, of_loss_and_metrics(stacked)))


def test_gradients_are_those_of_parameters_once_or_twice_never_of_the_batch(mesh_of):
    def scaled(scale, x):
        return jnp.sin(x * scale)

    def steepness(loss):
        return lambda params, batch: jnp.sum(jax.grad(loss)(params, batch)["float32"] ** 2)

    layers, params = [scaled] * 2, [1.5, 0.5]  # numbers of Python, too
    batch = np.arange(8, dtype=np.float32)
    pipe, stacked = pipeline_of_layers(mesh_of, layers, mean_of_output, params)
    twice = jax.jit(jax.grad(steepness(pipe.loss_fn)))(stacked, batch)["float32"]
    model = js.LayeredModel(layers, mean_of_output)
    loss_without_stages = lambda of, batch: model(list(of["float32"][:, 0]), batch)  # noqa: E731
    assert_close(twice, jax.grad(steepness(loss_without_stages))(stacked, batch)["float32"])
    with pytest.raises(ValueError, match="`batch` must not depend on what is differentiated"):
        jax.jit(jax.grad(pipe.loss_fn, argnums=1))(stacked, batch)

    tied = js.LayeredModel(layers, mean_of_output, tied=[((0, "(root)"), (1, "(root)"))])
    pipe = js.pipelined(tied, params, SCHEDULE, mesh=mesh_of({"stage": 2}))
    with pytest.raises(ValueError, match="must not be differentiated twice where"):
        jax.grad(steepness(pipe.loss_fn))(pipe.layout.stack(params), batch)


def test_layers_may_all_be_without_parameters(mesh_of):
    layers = [lambda params, x: x + 1.0, lambda params, x: x * 2.0]
    pipe, stacked = pipeline_of_layers(mesh_of, layers, mean_of_output, [{}, None])
    loss, grads = jax.jit(jax.value_and_grad(pipe.loss_fn))(stacked, np.ones(8, np.float32))
    assert (loss, dict(grads.items())) == (4.0, {})


def test_a_program_does_not_grow_with_the_number_of_microbatches(mesh_of):
    def length(microbatches):
        pipe, stacked, *_ = pipeline(mesh_of, js.schedules.one_f_one_b(2, microbatches))
        step = jax.jit(jax.value_and_grad(pipe.loss_fn, has_aux=True))
        text = step.lower(stacked, tokens(2 * microbatches)).as_text()
        return len(re.sub(r"dense<[^>]*>", "", text).splitlines())

    assert length(64) == length(4)


@pytest.mark.parametrize("memory_kind", [None, "pinned_host"])
def test_microbatches_may_wait_in_host_memory(mesh_of, memory_kind):
    pipe, stacked, model, params = pipeline(mesh_of, batch_memory="host")
    batch = tokens(8)
    sharding = NamedSharding(mesh_of({"stage": 2}), P(), memory_kind=memory_kind)
    placed = jax.device_put(batch, sharding)
    program = jax.jit(pipe.loss_fn).trace(stacked, placed)
    # Microbatches are read from the host's memory alone; what is compiled for CPU, whose devices
    # have no other, does not tell.
    text = str(program.jaxpr)
    assert "i32<host>[1,2]" in text
    assert "i32[1,2]" not in text
    assert_close(program.lower().compile()(stacked, placed), model(params, batch))


def test_explicit_axes_give_the_gradients_of_the_model(mesh_of):
    model, params = language_model(2)
    specs = [P(None, "fsdp"), P(), P(), P(None, "fsdp")]
    mesh = mesh_of({"stage": 2, "fsdp": 2}, explicit=True)
    pipe = js.pipelined(model, params, SCHEDULE, mesh=mesh, data_axes=("fsdp",), param_specs=specs)
    assert_gradients_alike(pipe, model, params, tokens(16), pipe.layout.stack(params))


BLOCKED = {"parts": [[(0, 4)], [(4, 4)]]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": js.schedules.gpipe(4, 8), "sizes": {"stage": 2}}, "4 stages, and `mesh` 2"),
        ({"axis_name": "pipe"}, "'pipe' is not an axis of `mesh`, which has 'stage'"),
        ({"data_axes": ("fsdp",)}, "`data_axes` 'fsdp' is not an axis"),
        ({"data_axes": "fsdp"}, "`data_axes` 'fsdp' is not an axis"),
        ({"data_axes": ("stage",)}, "not that of the stages"),
        ({"schedule": js.schedules.gpipe(8, 8)}, "8 stages and the model 4 layers"),
        (BLOCKED, "a stage without layers"),
        ({"batch_memory": "disk"}, "`batch_memory` must be"),
        ({"gradient_scale": "1"}, "`gradient_scale` must be a number above 0, got '1'"),
        ({"gradient_scale": 0.0}, "`gradient_scale` must be a number above 0"),
        ({"param_specs": [P("stage"), P(), P(), P()]}, "`param_specs` names axis 'stage'"),
        ({"param_specs": [P("tensor"), P(), P(), P()]}, "`param_specs` names axis 'tensor'"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(mesh_of, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        pipeline(mesh_of, **options)


def test_parameters_that_do_not_fit_the_layers_are_refused(mesh_of):
    *_, model, params = pipeline(mesh_of)
    keyed = [{**params[0], "key": jax.random.key(0)}, *params[1:]]
    with pytest.raises(ValueError, match="must hold numbers, got '0/key' of type key<fry>"):
        js.pipelined(model, keyed, SCHEDULE, mesh=mesh_of({"stage": 2}))
    with pytest.raises(ValueError, match="`params` must be a sequence of one tree per layer"):
        js.pipelined(model, {"a": 1.0}, SCHEDULE, mesh=mesh_of({"stage": 2}))
    mesh = mesh_of({"replica": 2, "stage": 2})
    pipe = js.pipelined(model, params, SCHEDULE, mesh=mesh)
    step = js.make_train_step(pipe, optax.sgd(0.1), sync="none", mesh=mesh)
    with pytest.raises(ValueError, match="`params` must be a sequence of one tree per layer"):
        step.init({"a": np.ones(3)})
    counted = [{**params[0], "count": np.int32(1)}, *params[1:]]
    with pytest.raises(ValueError, match=r"floating-point leaves only, got 0/count \(int32\)"):
        step.init(counted)


def test_specs_of_tied_leaves_must_agree(mesh_of):
    specs = [P("fsdp"), P(), P(), P(None, "fsdp")]
    with pytest.raises(ValueError, match="`param_specs` must be equal for tied leaves"):
        pipeline(mesh_of, sizes={"stage": 2, "fsdp": 2}, param_specs=specs)


def test_models_schedules_and_meshes_of_other_types_are_refused(mesh_of):
    model, params = language_model(2)
    with pytest.raises(ValueError, match=r"`model` must be a js\.LayeredModel"):
        js.pipelined(model.layers, params, SCHEDULE, mesh=mesh_of({"stage": 2}))
    with pytest.raises(ValueError, match="`schedule` must be"):
        js.pipelined(model, params, "1f1b", mesh=mesh_of({"stage": 2}))
    with pytest.raises(ValueError, match="`mesh` must be"):
        js.pipelined(model, params, SCHEDULE, mesh=js.virtual_mesh({"stage": 2}))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (tokens(6), "4 microbatches, which must divide the batch of a replica, got 6"),
        (tokens(4), "of 1 examples in parts, which axis 'fsdp' of size 2"),
        ({"tokens": np.zeros((), int), "next": np.zeros((), int)}, "leading dimension counts its"),
        ({"tokens": np.zeros(8, int), "next": np.zeros(4, int)}, "next: 4, tokens: 8"),
        ({}, "got no leaves"),
        (tokens(0), "must divide the batch of a replica, got 0"),
    ],
)
def test_batches_that_cannot_be_split_are_refused(mesh_of, batch, message):
    sizes = {"stage": 2, "fsdp": 2}
    pipe, stacked, *_ = pipeline(mesh_of, sizes=sizes, data_axes=("fsdp",))
    with pytest.raises(ValueError, match=re.escape(message)):
        pipe.loss_fn(stacked, batch)


def test_parameters_that_were_not_stacked_are_refused(mesh_of):
    pipe, stacked, _, params = pipeline(mesh_of)
    with pytest.raises(ValueError, match="`params` must be a sequence of one tree per layer"):
        pipe.loss_fn(params[1:], tokens(8))
    with pytest.raises(ValueError, match="`stacked` must be one tree per layer, or parameters"):
        pipe.loss_fn(params[0], tokens(8))
    _, others, *_ = pipeline(mesh_of, num_blocks=4)
    with pytest.raises(ValueError, match="got those of another layout"):
        pipe.loss_fn(others, tokens(8))
    with pytest.raises(ValueError, match=r"buffers of \(stages, \.\.\., elements\), .* got \[1, 2"):
        pipe.loss_fn(jax.tree.map(lambda x: x[None], stacked), tokens(8))
    mapped = jax.shard_map(
        lambda s: pipe.loss_fn(s, tokens(8)),
        mesh=mesh_of({"stage": 2}),
        in_specs=P(),
        out_specs=P(),
    )
    with pytest.raises(ValueError, match="'stage' is mapped already"):
        jax.jit(mapped)(stacked)


def test_each_collective_sends_the_bytes_of_the_table(mesh_of):
    specs = [P(None, "fsdp"), {"up": P("fsdp"), "bias": P(), "down": P(None, "fsdp")}]
    pipe, stacked, *_ = pipeline(
        mesh_of,
        sizes={"stage": 2, "fsdp": 2},
        data_axes=("fsdp",),
        param_specs=[specs[0], specs[1], specs[1], specs[0]],
    )
    report = js.comm_report(jax.jit(jax.grad(pipe.loss_fn, has_aux=True)), stacked, tokens(16))
    emitted = {(row.axis, row.collective): row for row in report.rows if row.level == "emitted"}
    ticks, activation = len(SCHEDULE.ticks()), 2 * 4 * 4  # two examples of width 4, in float32
    permutes = emitted.pop(("stage", "collective-permute"))
    assert (permutes.count, permutes.bytes) == (2 * ticks, 2 * ticks * activation)
    assert not any(row.conditional for row in report.rows if row.axis == "stage")
    sharded = 4 * (8 * 4 + 2 * 4 * 6)  # bytes of a stage's table and block, but for its bias
    assert {key: (row.count, row.bytes) for key, row in emitted.items()} == {
        ("fsdp", "all-gather"): (1, sharded),
        ("fsdp", "reduce-scatter"): (1, sharded),
        ("fsdp", "all-reduce"): (1, 4 * 6),
        ("stage", "all-reduce"): (1, 4 * 8 * 4 // 2),  # the tied table, of which each has half
        ("stage,fsdp", "all-reduce"): (1, 4),  # the metric; nobody reads the loss
    }
    assert all(not row.in_loop for row in emitted.values())


@pytest.mark.parametrize("axes", [{"stage": 2}, {"replica": 2, "stage": 2}])
@pytest.mark.parametrize("stacks", [False, True])
@pytest.mark.parametrize("executor", ["one_program", "host"])
def test_explicit_meshes_take_the_models_own_tree(axes, stacks, executor):
    mesh = jax.make_mesh(
        tuple(axes.values()), tuple(axes), devices=jax.devices()[: math.prod(axes.values())]
    )
    params = [{"w": np.full((3, 3), 0.1 * (i + 1), np.float32)} for i in range(4)]
    model = js.LayeredModel(
        [lambda p, x: jnp.tanh(x @ p["w"])] * 4, lambda out, batch: jnp.mean((out - batch) ** 2)
    )
    batch = np.arange(12, dtype=np.float32).reshape(4, 3) / 12
    schedule = js.schedules.one_f_one_b(2, 2)
    pipe = js.pipelined(model, params, schedule, mesh=mesh, executor=executor)
    arguments, run = pipe.layout.stack(params) if stacks else params, jax.value_and_grad(pipe)
    value, grads = (jax.jit(run) if executor == "one_program" else run)(arguments, batch)
    expected = jax.value_and_grad(model)(params, batch)
    actual = (value, pipe.layout.unstack(grads) if stacks else grads)
    assert_close(actual, expected)
