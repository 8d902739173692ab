"""What the transforms of gradients refuse: the argument and its value are named."""

import jax
import jax.numpy as jnp
import optax

import jaxslowmo as js
from support.bad_input import one_update, trace
from support.refusals import Refusal, each
from support.wrong import wrong

PARAMS = {"b": jnp.ones((4, 2)), "half": jnp.ones((4, 3), jnp.bfloat16), "w": jnp.ones((4, 3, 2))}
SGD = optax.sgd(0.1)


def reduced(hook=None, **options):
    """Trace an update of `js.all_reduce_gradients`."""
    return trace(one_update(js.all_reduce_gradients("replica", hook=hook, **options)), PARAMS)


def buckets(*given):
    return reduced(buckets=given)


def demo(**options):
    return js.demo("replica", **options)


HOOKS = js.hooks
REDUCER = {
    **wrong(reduced, max_buckets=0, alone_bytes=-4, bucket_bytes=-1, divide_by="all"),
    **wrong(HOOKS.powersgd, rank=0, start_step=1, seed=0.5),
    **wrong(HOOKS.int8, block_size=0),
    **wrong(HOOKS.fp8, format="e3m4"),
    **wrong(HOOKS.top_k, ratio=1.01, k=0),
    **wrong(demo, compression_decay=1.0, top_k=0, chunk=0),
    "the name of no leaf": Refusal(lambda: reduced(order=["b", "w", "x"]), "`order`", "'x'"),
    "two dtypes": Refusal(lambda: buckets(["b", "half"], ["w"]), "dtype", "bfloat16"),
    "fewer buckets than dtypes": Refusal(lambda: reduced(max_buckets=1), "`max_buckets`", 2),
    "half": Refusal(lambda: reduced(HOOKS.fp16_compress()), "fp16_compress", "bfloat16 (half)"),
}


def skip(inner):
    return js.gradients.skip_unused(inner, "replica").init(PARAMS)


SKIP_UNUSED = {
    "a parameter transform": Refusal(lambda: skip(js.local_sgd("replica")), "`inner`", "after it"),
    "a state of no parameters": Refusal(lambda: skip(optax.sm3(0.1)), "tree['b']"),
}

ROWS, VALUES = jnp.zeros((4, 2), jnp.int32), jnp.ones((4, 2, 3))


def rows_option(**options):
    return js.sparse.all_reduce_rows(**{"axis_name": "replica", "tables": ("t",), **options})


def rows_update(leaf=lambda r, v: js.sparse.RowGradient(r, v, 4), weight=None, **options):
    tx = rows_option(**options)

    def step(rows, values):
        return tx.update({"t": leaf(rows, values)}, tx.init({"t": 0}), weight=weight)[0]

    return jax.eval_shape(jax.vmap(step, axis_name="replica"), ROWS, VALUES)


SPARSE = {
    **wrong(rows_option, capacity=0, path="fast", output="sparse", divide_by="all", axis_name=3),
    **wrong(rows_update, axis_name="nodes"),
    "no leaf": Refusal(lambda: rows_update(tables=("emb",)), "'emb'", "'t'"),
    "an integer table": Refusal(lambda: rows_update(lambda r, v: r), "t", "int32"),
}

SCALED = js.dynamic_loss_scale(SGD, initial=8.0)


def scaling(optimizer=SGD, **options):
    """Make a loss scale, its state and an update."""
    return trace(one_update(js.dynamic_loss_scale(optimizer, **options)), PARAMS)


PRECISION = {
    **wrong(scaling, growth_interval=0, hysteresis=0, growth=1.0, backoff=1.0, min_scale=0.0),
    **wrong(scaling, initial=0.5, axes=(1,)),
    **wrong(js.gradients.Policy, compute="float64"),
    "parameters": Refusal(lambda: scaling(js.local_sgd("replica")), "`optimizer`", "Parameter"),
    "two scales": Refusal(lambda: scaling(SCALED), "`optimizer`", "another"),
    "a name that is nowhere": Refusal(
        lambda: js.gradients.Policy(keep=("a", "x")).check_names({"a": 1.0}, {"b": 1.0}),
        "`keep`",
        "'x'; leaves are a, b",
    ),
}


def clip(max_norm=1.0, model_axes=(), **options):
    return js.clip_by_global_norm(max_norm, model_axes, **options)


def clipped(model_axes="stage", **options):
    tx = clip(1.0, model_axes, **options)
    step = jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="stage")
    return jax.eval_shape(step, {"w": jnp.ones((2, 4))})


CLIPPING = {
    **wrong(clip, max_norm=0.0, model_axes=3, norm=0.5),
    "an axis that is nowhere": Refusal(lambda: clipped("nowhere"), "'nowhere'"),
    "nothing that tells": Refusal(clipped, "`param_specs`", "stage"),
}


def groups(*given):
    return js.pipeline.sum_tied_gradients("stage", list(given))


def tied(*names):
    """Trace the sum over copies of these names, on the first stages of four."""
    grads = {"e": jnp.zeros((4, 5)), "half": jnp.zeros((4, 5), jnp.bfloat16), "b": jnp.zeros(4)}
    tx = groups(dict(enumerate(names)))
    step = jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="stage")
    return jax.eval_shape(step, grads)


TIED = {
    "an overlap": Refusal(lambda: groups({0: "a", 1: "b"}, {2: "c", 1: "b"}), "'b' on stage 1"),
    "a stage alone": Refusal(
        lambda: js.pipeline.sum_tied_gradients("stage", [{2: "a"}]), "`groups`", {2: "a"}
    ),
    "another shape": Refusal(lambda: tied("e", "b"), "e float32[5]", "b float32[]"),
}


@each(REDUCER | SKIP_UNUSED | SPARSE | PRECISION | CLIPPING | TIED)
def test_refused(refusal):
    refusal.check()
