"""On each stage an optimizer sees the leaves of the model: steps equal those without stages."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.gradients.clipping import clip_state
from support.exhaustive import sweep
from support.layered import assert_close, language_model, tokens
from support.optimizers import names as path_names
from support.optimizers import of_all_leaves, per_leaf

STEPS = 20
MODEL, PARAMS = language_model(4)
SCHEDULES = {
    "one_f_one_b": js.schedules.one_f_one_b(4, 4),
    "zbv": js.schedules.zbv(2, 4),
    "interleaved": js.schedules.interleaved(2, 4, 2),
    "gpipe": js.schedules.gpipe(1, 4),
}
PER_LEAF = per_leaf(PARAMS)
USUAL = {
    "mask_as_tree": "one_f_one_b",
    "partition": "zbv",
    "multi_steps": "interleaved",
    "muon": "zbv",
    "lamb": "one_f_one_b",
    "adafactor": "interleaved",
    "schedule_free": "zbv",
    "flatten": "gpipe",
    "mask_by_ndim": "one_f_one_b",
}
BLOCK = {"up": P("fsdp", "tensor"), "bias": P("tensor"), "down": P("tensor", "fsdp")}


def pipeline(mesh, schedule=SCHEDULES["one_f_one_b"], **options):
    return js.pipelined(MODEL, PARAMS, schedule, mesh=mesh, **options)


def trained(loss_fn, mesh, optimizer, **options):
    options.setdefault("sync", js.local_sgd("replica", sync_every=2))
    step = js.make_train_step(loss_fn, optimizer, mesh=mesh, **options)
    state = step.init(PARAMS)
    for i in range(STEPS):
        state, metrics = step(state, tokens(16, seed=i))
    return step, state, metrics


def check(mesh, pipe, optimizer, tolerance=1e-5, **options):
    """Parameters, metrics and states are those without stages."""
    _, found, metrics = trained(pipe, mesh, optimizer, **options)
    alone = js.virtual_mesh({"replica": mesh.shape["replica"]})
    _, known, expected = trained(MODEL, alone, optimizer, **options)
    assert_close(metrics, expected, tolerance)
    assert_close(pipe.layout.unstack_like(found.params), known.params, tolerance)
    return found, known


@pytest.mark.parametrize(
    ("name", "kind"),
    sweep(
        [(name, kind) for name in PER_LEAF for kind in SCHEDULES],
        lambda name, kind: USUAL.get(name) == kind,
    ),
)
def test_steps_of_optimizers_equal_those_without_stages(mesh_of, name, kind):
    schedule = SCHEDULES[kind]
    mesh = mesh_of({"replica": 2, "stage": schedule.num_stages})
    # Muon's iteration makes all singular values equal, those of rounding too.
    tolerance = 1e-4 if name == "muon" else 1e-5
    pipe = pipeline(mesh, schedule)
    found, known = check(mesh, pipe, PER_LEAF[name], tolerance)
    layers = pipe.layout.unstack_like(found.opt_state)
    if name != "flatten":  # whose state is a vector for each stage
        assert jax.tree.structure(layers) == jax.tree.structure(known.opt_state)


@pytest.mark.parametrize(
    "name", sweep(["mask_by_name", "lamb", "adafactor", "muon"], lambda name: name == "adafactor")
)
def test_leaves_may_be_sharded_inside_of_stages(mesh_of, name):
    mesh = mesh_of({"replica": 1, "stage": 2, "fsdp": 2, "tensor": 2})
    specs = [P(None, "fsdp"), *[BLOCK] * 4, P(None, "fsdp")]
    options = {"data_axes": ("fsdp",), "param_specs": specs}
    pipe = pipeline(mesh, SCHEDULES["zbv"], **options)
    check(mesh, pipe, PER_LEAF[name], sync="none")


def test_moments_lie_as_the_parameters_and_nothing_is_gathered(mesh_of):
    mesh = mesh_of({"replica": 1, "stage": 2, "fsdp": 2, "tensor": 2})
    specs = [P(None, "fsdp"), *[BLOCK] * 4, P(None, "fsdp")]
    pipe = pipeline(mesh, SCHEDULES["zbv"], data_axes=("fsdp",), param_specs=specs)
    tx = optax.adamw(0.1, mask=lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree))
    stacked = pipe.layout.stack(PARAMS)
    state = jax.jit(over(tx).init)(stacked)
    mu = state[0][0].mu
    assert {name: x.shape for name, x in mu.items()} == {n: x.shape for n, x in stacked.items()}
    update = jax.jit(over(tx).update).lower(stacked, state, stacked).compile()
    text = update.as_text()
    assert not any(word in text for word in ("all-gather", "all-reduce", "all-to-all", "permute"))
    lies = jax.tree.leaves(update.output_shardings[0])
    for x, spec in zip(lies, pipe.layout.specs.values(), strict=True):
        assert x.is_equivalent_to(NamedSharding(x.mesh, spec), len(spec))


def over(tx):
    return js.chain(tx)


@pytest.mark.parametrize("name", of_all_leaves())
def test_what_needs_all_leaves_is_refused_when_the_state_is_made(mesh_of, name):
    mesh = mesh_of({"replica": 2, "stage": 2})
    step = js.make_train_step(
        pipeline(mesh, SCHEDULES["zbv"]), of_all_leaves()[name], sync="none", mesh=mesh
    )
    with pytest.raises(ValueError, match=r"depends on leaves of other stages.*js\.clip_by_global"):
        step.init(PARAMS)


@pytest.mark.parametrize(
    ("kind", "validate"),
    sweep(
        [(k, v) for k in ("zbv", "one_f_one_b") for v in ("before", "after")],
        lambda kind, validate: (kind == "zbv") == (validate == "after"),
    ),
)
def test_ours_see_all_stages_and_count_tied_leaves_once(mesh_of, kind, validate):
    schedule = SCHEDULES[kind]
    mesh = mesh_of({"replica": 2, "stage": schedule.num_stages})
    once = [None] * 5 + [{"table": np.zeros((8, 4))}]

    def optimizer(counted):
        clip = js.clip_by_global_norm(0.3, counted=counted)
        return js.dynamic_loss_scale(js.chain(clip, PER_LEAF["lamb"]), initial=8.0)

    pipe = pipeline(mesh, schedule)
    _, found, _ = trained(pipe, mesh, optimizer(None), validate=validate)
    alone = js.virtual_mesh({"replica": 2})
    _, known, _ = trained(MODEL, alone, optimizer(once), validate=validate)
    assert_close(pipe.layout.unstack_like(found.params), known.params)
    both = [clip_state(s.opt_state) for s in (found, known)]
    assert_close(*both)
    assert (np.asarray(both[0].clip_factor) < 1).all()


def test_one_stage_that_overflows_makes_all_skip(mesh_of):
    mesh = mesh_of({"replica": 1, "stage": 4})
    pipe = pipeline(mesh)
    tx = js.dynamic_loss_scale(PER_LEAF["adamw"], initial=8.0)
    stacked = pipe.layout.stack(PARAMS)
    state = tx.init(stacked)
    grads = [jax.tree.map(np.ones_like, layer) for layer in PARAMS]
    grads[4]["bias"] = grads[4]["bias"] * np.inf
    updates, after = jax.jit(tx.update)(pipe.layout.stack(grads), state, stacked)
    assert after.skipped == 1
    assert all(not np.any(x) for x in jax.tree.leaves(updates))
    assert after.loss_scale == 4.0


def test_an_optimizer_sees_paths_and_shapes_of_the_model_and_nothing_else(mesh_of):
    seen = []

    def init(params):
        seen.append(jax.tree.map(jnp.shape, params))
        return optax.EmptyState()

    def update(updates, state, params=None):
        return jax.tree.map(lambda x: x / jnp.sum(x), updates), state

    tx = optax.GradientTransformation(init, update)
    pipe = pipeline(mesh_of({"stage": 4}))
    jax.eval_shape(over(tx).init, pipe.layout.types)
    shapes, none = jax.tree.map(np.shape, PARAMS), optax.MaskedNode()
    for block in pipe.layout.blocks:
        own = [
            {name: s if i in range(*block) else none for name, s in layer.items()}
            for i, layer in enumerate(shapes)
        ]
        assert own in seen


def test_what_cannot_be_tried_is_said(mesh_of):
    def update(updates, state, params=None):
        assert updates[0]["table"].shape in ((8, 4), ()), "a trial has other shapes"
        return jax.tree.map(lambda x: x / jnp.max(x), updates), state

    tx = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    pipe = pipeline(mesh_of({"stage": 2}), SCHEDULES["zbv"])
    with pytest.warns(UserWarning, match="could not be tried on small arrays.*AssertionError"):
        jax.eval_shape(over(tx).init, pipe.layout.types)


def test_hyperparameters_are_read_and_set_as_without_stages(mesh_of):
    mesh = mesh_of({"replica": 2, "stage": 2})
    pipe = pipeline(mesh, SCHEDULES["zbv"])
    base = js.local_sgd("replica", sync_every=1)
    options = {"base": base, "sync_every": 2, "learning_rate": "optimizer"}
    sync = js.slowmo("replica", param_specs=pipe.layout.specs, **options)
    tx = optax.inject_hyperparams(optax.sgd)(0.1)
    step = js.make_train_step(pipe, tx, sync=sync, mesh=mesh)
    alone = js.make_train_step(
        MODEL, tx, sync=js.slowmo("replica", **options), mesh=js.virtual_mesh({"replica": 2})
    )
    state, known = step.init(PARAMS), alone.init(PARAMS)
    for i, rate in enumerate((0.1, 0.05, 0.2)):
        state, known = (js.set_hyperparams(s, learning_rate=rate) for s in (state, known))
        state, _ = step(state, tokens(16, seed=i))
        known, _ = alone(known, tokens(16, seed=i))
    assert_close(pipe.layout.unstack_like(state.params), known.params)


def test_copies_of_parameters_follow_what_is_exchanged(mesh_of):
    mesh = mesh_of({"replica": 2, "stage": 2})
    check(mesh, pipeline(mesh, SCHEDULES["zbv"]), optax.contrib.madgrad(0.01))


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def test_stages_with_equal_leaves_share_a_branch(mesh_of):
    model, params = language_model(6)
    pipe = js.pipelined(model, params, SCHEDULES["one_f_one_b"], mesh=mesh_of({"stage": 4}))
    stacked = pipe.layout.stack(params)

    def branches(tx):
        tx = over(tx)
        program = jax.make_jaxpr(tx.update)(stacked, tx.init(stacked), stacked)
        (switch,) = [e for e in equations(program.jaxpr) if e.primitive.name == "cond"]
        return len(switch.params["branches"])

    assert branches(optax.lamb(0.1)) == 3  # first, the two in between, last

    def decay(tree):
        return jax.tree.map(lambda name: "[2]" not in name, path_names(tree))

    assert branches(optax.adamw(0.1, mask=decay)) == 4


@pytest.mark.parametrize("is_mixed", [False, True])
def test_axes_may_be_explicit(is_mixed):
    kinds = [AxisType.Auto if is_mixed else AxisType.Explicit] * 2 + [AxisType.Explicit]
    names_of_axes = ("replica", "stage", "fsdp")
    mesh = jax.make_mesh((2, 2, 2), names_of_axes, axis_types=tuple(kinds))
    block = {"up": P("fsdp"), "bias": P(), "down": P(None, "fsdp")}
    specs = [P(None, "fsdp"), *[block] * 4, P(None, "fsdp")]
    pipe = pipeline(mesh, SCHEDULES["zbv"], data_axes=("fsdp",), param_specs=specs)
    check(mesh, pipe, PER_LEAF["lamb"])
