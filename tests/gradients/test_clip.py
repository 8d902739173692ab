"""Tests of clipping: norms of sharded models against gathered ones, and clipped gradients."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import jaxslowmo as js

AXES = {"stage": 2, "tensor": 2}
MODEL = tuple(AXES)
SPECS = [P(), P("stage"), P("tensor"), P(None, "tensor"), P("tensor", "stage"), P(MODEL)]


def program(tx, specs, check_vma=True):
    """Return what runs `tx` on each device's part of gradients: clipped ones, and all states."""

    def of_device(grads):
        updates, state = tx.update(grads, tx.init(grads))
        return updates, jax.tree.map(lambda x: x.reshape(1, 1), state)

    fn = jax.shard_map(
        of_device,
        mesh=js.make_mesh(AXES),
        in_specs=(specs,),
        out_specs=(specs, P(*MODEL)),
        check_vma=check_vma,
    )
    return jax.jit(fn)


def norm_of(tree, norm):
    flat = [np.abs(np.asarray(x, np.float64)).ravel() for x in jax.tree.leaves(tree)]
    return np.linalg.norm(np.concatenate(flat), norm)


@settings(max_examples=5)
@given(
    specs=st.lists(st.sampled_from(SPECS), min_size=1, max_size=5),
    norm=st.sampled_from([1, 2, 3.5, np.inf]),
    factor=st.sampled_from([0.5, 2.0]),
    typed=st.booleans(),
)
def test_norms_are_those_of_the_gathered_model(specs, norm, factor, typed):
    rng = np.random.default_rng(len(specs))
    grads = {f"w{i}": rng.normal(size=(4, 4)).astype("f4") for i in range(len(specs))}
    layout = {f"w{i}": spec for i, spec in enumerate(specs)}
    wanted = norm_of(grads, norm)
    options = {} if typed else {"param_specs": layout}
    tx = js.clip_by_global_norm(float(factor * wanted), MODEL, norm, **options)
    clipped, state = program(tx, layout, check_vma=typed)(grads)
    np.testing.assert_allclose(state.norm, np.full((2, 2), wanted), rtol=1e-6)
    scale = min(1.0, factor * wanted / (wanted + 1e-6))
    for name, grad in grads.items():
        np.testing.assert_allclose(clipped[name], scale * grad, rtol=1e-6)
        if factor > 1:
            np.testing.assert_array_equal(clipped[name], grad)


def test_any_number_of_layouts_needs_one_exchange():
    grads = {f"w{i}": np.ones((4, 4), "f4") for i in range(len(SPECS))}
    layout = {f"w{i}": spec for i, spec in enumerate(SPECS)}
    lowered = program(js.clip_by_global_norm(1.0, MODEL), layout).lower(grads)
    found = js.comm_report_of(lowered, compile=False).rows
    assert [(r.collective, r.axis, r.count, r.bytes) for r in found] == [
        ("all-reduce", "stage,tensor", 1, 4)
    ]


def test_it_clips_as_torch_does():
    grads = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([[4.0]])}
    tx = js.clip_by_global_norm(1.0)
    clipped, state = tx.update(grads, tx.init(grads))
    assert (float(state.norm), float(state.clip_factor)) == (5.0, float(np.float32(1 / (5 + 1e-6))))
    np.testing.assert_array_equal(clipped["a"], grads["a"] * np.float32(1 / (5 + 1e-6)))
    # As `optax.inject_hyperparams` gives it.
    whole, state = js.clip_by_global_norm(jnp.asarray(5.1)).update(grads, state)
    np.testing.assert_array_equal(whole["a"], grads["a"])
    assert float(state.clip_factor) == 1.0


def test_half_precision_is_measured_in_float32():
    # Their squares are infinite in float16, and vanish in it.
    grads = {"large": jnp.full(4, 3e4, jnp.float16), "small": jnp.full(4, 1e-4, jnp.bfloat16)}
    clipped, state = js.clip_by_global_norm(3e4).update(
        grads, js.clip_by_global_norm(1).init(grads)
    )
    assert state.norm.dtype == jnp.float32
    np.testing.assert_allclose(state.norm, 6e4, rtol=1e-5)
    assert (clipped["large"].dtype, clipped["small"].dtype) == (jnp.float16, jnp.bfloat16)
    np.testing.assert_allclose(np.float32(clipped["large"]), 1.5e4, rtol=1e-3)


def test_rows_are_clipped_and_integers_are_not():
    rows = js.sparse.RowGradient(jnp.array([1, 4, 1, 5]), jnp.ones((4, 2)), num_rows=5)
    grads = {"table": rows, "w": jnp.array([1.0, 2.0]), "steps": jnp.array([7])}
    tx = js.clip_by_global_norm(0.5)
    clipped, state = tx.update(grads, tx.init({"w": grads["w"]}))
    dense = rows.to_dense()
    np.testing.assert_allclose(state.norm, norm_of([dense, grads["w"]], 2), rtol=1e-6)
    np.testing.assert_allclose(clipped["table"].to_dense(), state.clip_factor * dense, rtol=1e-6)
    np.testing.assert_array_equal(clipped["table"].rows, rows.rows)
    np.testing.assert_array_equal(clipped["steps"], [7])


def test_tied_parameters_count_once():
    table, own = np.arange(6, dtype="f4").reshape(2, 3), np.ones((2, 5), "f4")
    nothing, specs = np.zeros_like(table), dict.fromkeys(("embed", "head", "own"), P("stage"))
    grads = {"embed": np.stack([table, nothing]), "head": np.stack([nothing, table]), "own": own}
    tx = js.clip_by_global_norm(1e-3, MODEL, tied=[{0: "embed", 1: "head"}])
    _, state = program(tx, specs)(grads)
    np.testing.assert_allclose(state.norm, norm_of([table, own], 2), rtol=1e-6)
