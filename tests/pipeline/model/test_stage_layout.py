"""Parameters of all stages in one tree and back: arrays, types, states that mirror them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.pipeline.model import StageLayout, model_blocks
from jaxslowmo.transform import over_stages
from pipeline.model.test_buffer_packing import alike, parameters

MODEL = js.LayeredModel([lambda p, x: x] * 5, lambda x, _: x, tied=[((0, "table"), (4, "table"))])


@pytest.fixture(scope="module")
def params():
    tree = parameters()
    tree[4]["table"] = tree[0]["table"]
    return tree


@pytest.fixture(scope="module")
def layout(params, mesh_of):
    return layout_on(mesh_of({"replica": 2, "stage": 2, "fsdp": 2}), params)


def layout_on(mesh, params, **options):
    specs = [jax.tree.map(lambda x: P(*[None] * (x.ndim - 1), "fsdp"), layer) for layer in params]
    return StageLayout(
        MODEL, params, model_blocks(5, 2), (0, 1), mesh=mesh, param_specs=specs, **options
    )


@pytest.fixture(scope="module")
def stacked(params, layout):
    return layout.stack(params)


NAME = "float32/fsdp"


def test_each_stage_has_its_own_leaves_and_zeros(stacked, layout, params):
    buffer = stacked[NAME]
    assert buffer.sharding == NamedSharding(buffer.sharding.mesh, P("stage", "fsdp", None))
    # Two blocks and the head on one stage; the embedding and one block on the other.
    assert buffer.shape == (2, 2, (2 * (16 + 4) + 24) // 2)
    assert layout.specs[NAME] == P("stage", "fsdp", None)
    table = np.asarray(buffer)[1, :, -12:].reshape(2, 6, 2)  # parts of the head, by columns
    np.testing.assert_array_equal(np.concatenate(table, 1), params[4]["table"])
    np.testing.assert_array_equal(np.asarray(buffer)[0, :, -10:], np.zeros((2, 10)))
    assert layout.num_padding == 20


def test_a_norm_counts_a_shared_parameter_once(stacked, layout, params):
    once = jax.tree.leaves([*params[:4], {**params[4], "table": np.zeros(1)}])
    wanted = np.sqrt(sum((np.asarray(x, np.float64) ** 2).sum() for x in once))
    for counted in (None, layout.counted):
        clip = js.clip_by_global_norm(1.0, counted=counted)
        _, state = jax.jit(clip.update)(stacked, clip.init(stacked))
        np.testing.assert_allclose(state.norm, wanted, rtol=1e-6)
    assert layout.counted[NAME].shape == (2, 1, 32)
    assert layout.counted[NAME].sum() == 2 * 32 - 12


def test_unstacking_is_the_way_back(stacked, layout, params):
    back = layout.unstack(stacked)
    alike(back, params)
    kernel = back[1]["kernel"]
    assert kernel.sharding.is_equivalent_to(
        NamedSharding(kernel.sharding.mesh, P(None, "fsdp")), kernel.ndim
    )
    alike(layout.unstack(layout.stack(jax.tree.map(np.asarray, params))), params)


def test_arrays_of_the_mesh_and_traced_ones_are_stacked_alike(stacked, layout, params):
    there = jax.device_put(params, NamedSharding(stacked[NAME].sharding.mesh, P()))
    alike(layout.stack(there), stacked)
    alike(jax.jit(layout.stack)(params), stacked)
    alike(jax.jit(layout.unstack)(stacked), params)


def test_types_stay_types(layout, params):
    types = layout.stack(jax.eval_shape(lambda: params))
    assert types[NAME].shape == (2, 2, 32)
    assert types[NAME].sharding.spec == P("stage", "fsdp", None)
    alike(jax.eval_shape(lambda: params), layout.unstack(types))


def test_moments_of_a_run_go_to_another_cut_and_back(mesh_of, stacked, layout, params):
    tx = optax.masked(optax.adam(0.1), lambda tree: [{n: n != "bias" for n in x} for x in tree])
    state = jax.jit(over_stages(tx).init)(stacked)
    grown = jax.tree.map(lambda x: x + 1, state)
    layers = layout.unstack_like(grown)
    assert jax.tree.structure(layers) == jax.tree.structure(tx.init(params))
    mu = layers.inner_state[0].mu
    assert mu[1]["bias"] == optax.MaskedNode()
    np.testing.assert_array_equal(mu[4]["table"], np.ones((6, 4)))
    alike(layout.unstack_like(layout.stack_like(layers)), layers)

    other = layout_on(mesh_of({"stage": 2, "fsdp": 4}), params)
    alike(other.unstack_like(other.stack_like(jax.tree.map(np.asarray, layers))), layers)


def test_replicas_may_lead(stacked, layout, params):
    mesh = stacked[NAME].sharding.mesh
    replicas = js.replicate(stacked, mesh=mesh, axis_name="replica")
    layers = layout.unstack_like({"params": replicas, "step": 3})
    alike(layers["params"], jax.tree.map(lambda x: jnp.stack([x, x]), params))
    assert layers["params"][0]["table"].sharding.spec[0] == "replica"
    alike(layout.stack_like(layers)["params"], replicas)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda own, p: own.stack(p[:3]), "5 of them, got 3"),
        (lambda own, p: own.stack([*p[:3], {}, p[4]]), "the layers that the layout was made of"),
        (
            lambda own, p: own.stack([p[0], {**p[1], "bias": np.zeros(3)}, *p[2:]]),
            "must have [4] at '1/bias', got [3]",
        ),
        (lambda own, p: own.unstack({"a": 1}), "`buffers` must be"),
        (lambda own, p: own.unstack(dict.fromkeys(own.specs, np.zeros(2))), "must end in"),
    ],
)
def test_what_is_refused(layout, params, call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call(layout, params)


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ({"a": P()}, "list of one tree of PartitionSpec per layer"),
        (P("fsdp", None, None, None), "which has 2 dimensions"),
    ],
)
def test_specs_that_do_not_fit_are_refused(mesh_of, params, specs, message):
    with pytest.raises(ValueError, match=message):
        StageLayout(
            MODEL,
            params,
            model_blocks(5, 2),
            (0, 1),
            mesh=mesh_of({"stage": 2}),
            param_specs=specs,
        )


def test_keys_are_no_parameters(mesh_of, params):
    keyed = [*params[:4], {"table": params[4]["table"], "key": jax.random.key(0)}]
    with pytest.raises(ValueError, match="'4/key' of type key<fry>"):
        layout_on(mesh_of({"stage": 2}), keyed)
