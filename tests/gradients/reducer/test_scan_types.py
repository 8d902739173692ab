"""States of gradient transforms keep their types, also in which axes they vary over.

`lax.scan` carries what does not change its type. Under `shard_map(check_vma=True)` the axes over
which a value varies are part of that.
"""

import inspect
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxslowmo as js


def reduce(hook=None, **options):
    return js.all_reduce_gradients("replica", hook=hook, **options)


def low_rank(start_step=2, **options):
    return js.hooks.powersgd(1, start_step, min_compression_rate=0.1, **options)


HOOKS = {
    "mean": js.hooks.mean(),
    "noop": js.hooks.noop(),
    "stateless": js.hooks.stateless(lambda b: jax.lax.pmean(b.flat, b.axis_name)),
    "bf16_compress": js.hooks.bf16_compress(),
    "fp16_compress": js.hooks.fp16_compress(),
    "int8": js.hooks.int8(block_size=4, stochastic_rounding=True),
    "fp8": js.hooks.fp8(),
    "top_k": js.hooks.top_k(0.2),
    "powersgd": low_rank(),
    "powersgd forgetful": low_rank(0, error_feedback=False, warm_start=False),
    "powersgd in bf16": js.hooks.bf16_compress(low_rank()),
}
# Momentum and a count; optax.adam relies on implicit promotion.
INNER = optax.chain(optax.trace(0.9), optax.scale_by_schedule(lambda _: 0.1))
TRANSFORMS = {
    "all_reduce_gradients": reduce(),
    **{f"all_reduce_gradients {name}": reduce(hook) for name, hook in HOOKS.items()},
    "demo": js.demo("replica", top_k=2, chunk=4),
    "accumulate int8": js.gradients.accumulate(js.chain(reduce(js.hooks.int8()), INNER), every=2),
    "accumulate alone": js.gradients.accumulate(INNER, every=2),
    "all_reduce_rows beside": js.sparse.all_reduce_rows(
        "replica", tables=("m",), dense=reduce(js.hooks.int8()), capacity=1
    ),
    "all_reduce_rows as rows": js.sparse.all_reduce_rows("replica", tables=("m",), output="rows"),
    # It counts over all axes that gradients differ over.
    "skip_unused": js.gradients.skip_unused(
        optax.chain(reduce(js.hooks.int8()), INNER), ("replica", "model")
    ),
    "skip_unused alone": js.gradients.skip_unused(INNER, "replica"),
    "slow_momentum": js.slow_momentum(),
    "gradient_transform": js.gradient_transform(optax.chain(reduce(), INNER)),
    "clip_by_global_norm": js.clip_by_global_norm(1.0, "model", param_specs=P()),
    "clip_by_global_norm alone": js.clip_by_global_norm(1.0),
    "sum_tied_gradients": js.pipeline.sum_tied_gradients("replica", [{0: "m", 1: "m"}]),
    "dynamic_loss_scale over axes": js.dynamic_loss_scale(INNER, ("replica", "model")),
    "dynamic_loss_scale": js.dynamic_loss_scale(optax.chain(reduce(), INNER)),
}
MESH = {"replica": 2, "model": 2}
PARAMS = {"m": jnp.ones((2, 4, 6)), "v": jnp.ones((2, 6))}
# Parameters of each replica; equal on all; and of each replica, in parts.
LAYOUTS = {
    "stacked": {"m": P("replica"), "v": P("replica")},
    "equal": {"m": P(), "v": P()},
    "in parts": {"m": P("replica", "model"), "v": P("replica", "model")},
}
# The state of any optimizer changes its type where parameters are equal, and gradients are not.
UNREDUCED = (
    "accumulate alone",
    "clip_by_global_norm",
    "clip_by_global_norm alone",
    "dynamic_loss_scale over axes",
    "skip_unused alone",
    "slow_momentum",
)
CASES = [
    (name, layout)
    for layout in ("equal", "in parts")  # a state that comes in is stacked
    for name in TRANSFORMS
    if layout != "equal" or name not in UNREDUCED
]


def test_no_gradient_transform_is_missing():
    made = {name.split()[0] for name in TRANSFORMS}
    returned = {
        name: typing.get_type_hints(value).get("return")
        for module in (js, js.gradients, js.sparse)
        for name, value in inspect.getmembers(module, inspect.isfunction)
    }
    assert made - {"sum_tied_gradients"} == {  # of js.pipeline
        name
        for name, kind in returned.items()
        if inspect.isclass(kind)
        and issubclass(kind, optax.GradientTransformation)
        and not issubclass(kind, js.ParameterTransform)
        and name != "chain"  # of whatever it is given
    }
    assert {name.split()[0] for name in HOOKS} == {
        name for name, _ in inspect.getmembers(js.hooks, inspect.isfunction)
    }


def three_updates(tx, params, state, weighted):
    own = 1.0 + jax.lax.axis_index("replica").astype(jnp.float32)
    extra = {"weight": own} if weighted else {}
    # They differ between replicas, whatever the parameters do.
    grads = jax.tree.map(lambda p: p * own, params)

    def update(state, _):
        return tx.update(grads, state, params, **extra)[1], ()

    return jax.lax.scan(update, state, length=3)[0]


def trace(function, layout, *arguments, specs=()):
    """Types are checked when a program is traced; it is not run."""

    def inside(params, *arguments):
        function(jax.tree.map(lambda x: x[0], params), *arguments)

    program = jax.shard_map(
        inside, mesh=js.make_mesh(MESH), in_specs=(LAYOUTS[layout], *specs), out_specs=P()
    )
    jax.eval_shape(program, PARAMS, *arguments)


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_state_made_inside(name, layout):
    """With a weight, which varies; where parameters are equal without one, too."""
    tx = TRANSFORMS[name]
    for weighted in {"equal": (False, True)}.get(layout, (True,)):
        trace(lambda params, w=weighted: three_updates(tx, params, tx.init(params), w), layout)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_state_that_comes_in(name):
    """From `js.init`, a checkpoint, or the step before: all of it is typed as varying."""
    tx, mesh = TRANSFORMS[name], js.make_mesh(MESH)
    init = jax.shard_map(
        lambda p: jax.tree.map(lambda x: x[None], tx.init(jax.tree.map(lambda x: x[0], p))),
        mesh=mesh,
        in_specs=P("replica"),
        out_specs=P("replica"),
    )

    def run(params, state):
        three_updates(tx, params, jax.tree.map(lambda x: x[0], state), False)

    trace(run, "stacked", jax.eval_shape(init, PARAMS), specs=(P("replica"),))


def kept_equal(tx):
    """Data parallelism as users write it: parameters and state are equal on all, by their types."""

    def step(params, state, batch):
        own = jax.lax.pcast(params, "replica", to="varying")
        grads = jax.grad(lambda p: sum(jnp.mean(x * batch.mean()) for x in jax.tree.leaves(p)))(own)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    mesh = js.make_mesh({"replica": 4})
    init = jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=P())
    specs = {"in_specs": (P(), P(), P("replica")), "out_specs": P()}
    params = {"m": jnp.ones((4, 6)), "v": jnp.ones(6)}
    state = jax.eval_shape(init, params)
    jax.eval_shape(jax.shard_map(step, mesh=mesh, **specs), params, state, jnp.ones(4))


EQUAL = {
    "alone": js.chain(reduce(), optax.adam(0.1)),
    "optax's chain": optax.chain(reduce(), optax.adam(0.1)),
    **{
        f"hook {name}": js.chain(reduce(HOOKS[name]), optax.adam(0.1))
        for name in ("mean", "stateless", "bf16_compress", "fp16_compress")
    },
    "clipped": js.chain(reduce(), js.clip_by_global_norm(1.0), optax.adam(0.1)),
    "skipping": js.gradients.skip_unused(js.chain(reduce(), optax.adam(0.1)), "replica"),
    "scaled": js.dynamic_loss_scale(js.chain(reduce(), optax.adam(0.1))),
    "rows": js.chain(
        js.sparse.all_reduce_rows("replica", tables=("m",), dense=reduce()), optax.adam(0.1)
    ),
}


@pytest.mark.parametrize("name", EQUAL)
def test_what_is_reduced_stays_equal(name):
    kept_equal(EQUAL[name])


WIDE = {"m": jnp.float32, "v": jnp.float64, "h": jnp.bfloat16}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_without_implicit_promotion_under_x64(name):
    """Half, single and double precision side by side; all of our own types are explicit."""
    tx = TRANSFORMS[name]
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        kinds = {leaf: dtype for leaf, dtype in WIDE.items() if "fp16" not in name or leaf != "h"}
        params = {leaf: jnp.ones((4, 6), dtype) for leaf, dtype in kinds.items()}

        def run(params):
            own = jax.lax.axis_index("replica").astype(jnp.float32) + 1
            state = tx.init(params)

            def update(state, _):
                updates, state = tx.update(params, state, params, weight=own)
                return state, updates

            return jax.lax.scan(update, state, length=3)[1]

        inner = jax.vmap(run, axis_name="model", axis_size=2, in_axes=None)
        outer = jax.vmap(inner, axis_name="replica", axis_size=2, in_axes=None)
        updates = jax.eval_shape(outer, params)
        if "as rows" in name:
            assert updates["m"].rows.dtype == jnp.int32
            updates["m"] = updates["m"].values
        assert {leaf: u.dtype for leaf, u in updates.items()} == kinds


def test_float64_gradients_keep_their_precision():
    """Beside other dtypes, with weights and without."""
    rng = np.random.default_rng(0)
    grads, weight = rng.normal(size=(4, 3, 5)), np.array([1, 2, 0, 4], np.float32)
    transforms = {
        "plain": reduce(),
        "top_k": reduce(js.hooks.top_k(1.0)),
        "accumulate": js.gradients.accumulate(reduce(), every=1),
        "rows": js.sparse.all_reduce_rows("replica", tables=("g",), path="rows"),
        "table": js.sparse.all_reduce_rows("replica", tables=("g",), path="dense"),
    }

    def run(grads, weight):
        given = {"g": grads, "h": grads.astype(jnp.float16)}

        def mean(tx, **extra):
            return tx.update(given, tx.init(given), given, **extra)[0]["g"]

        return {n: (mean(tx), mean(tx, weight=weight)) for n, tx in transforms.items()}

    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        found = jax.jit(jax.vmap(run, axis_name="replica"))(grads, weight)
    for name, means in found.items():
        for mean, share in zip(
            means, (np.full(4, 0.25), np.float64(weight) / 7 * 3 / 4), strict=True
        ):
            wanted = np.broadcast_to(np.tensordot(share, grads, 1), mean.shape)
            np.testing.assert_allclose(mean, wanted, rtol=1e-13, atol=1e-15, err_msg=name)
