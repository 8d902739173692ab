"""What the transforms of gradients refuse: the argument and its value are named."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.gradients.precision import ScaleRule, apply_policy, check_nesting
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


def sharded(specs):
    """Trace the mean of a leaf on devices of two replicas."""
    tx = js.all_reduce_gradients("replica", param_specs=specs)
    auto = (AxisType.Auto, AxisType.Auto)  # jax 0.12 takes Explicit where nothing is said
    mesh = jax.sharding.AbstractMesh((2, 4), ("replica", "fsdp"), auto)
    own = P("replica")
    mapped = jax.shard_map(
        lambda grads: tx.update(grads, js.gradients.AllReduceGradientsState())[0],
        mesh=mesh,
        in_specs=own,
        out_specs=P(),
        axis_names={"replica"},
    )
    return jax.eval_shape(mapped, {"w": jnp.ones((2, 4))})


def demo(axis_name="replica", **options):
    return js.demo(axis_name, **options)


def float8(make):
    tx = js.all_reduce_gradients("replica", hook=make())
    grads = {"net": {"small": jnp.ones((4, 3), jnp.float8_e5m2)}}
    return jax.eval_shape(jax.vmap(tx.init, axis_name="replica"), grads)


def forgetful(start_step):
    return js.hooks.powersgd(1, start_step, error_feedback=False, warm_start=False)


HOOKS = js.hooks
REDUCER = {
    **wrong(reduced, max_buckets=0, alone_bytes=-4, bucket_bytes=-1, divide_by="all"),
    **wrong(HOOKS.powersgd, rank=0, start_step=1, seed=0.5),
    **wrong(forgetful, start_step=-1),
    **wrong(HOOKS.int8, block_size=0, seed=0.5),
    **wrong(HOOKS.fp8, format="e3m4"),
    **wrong(HOOKS.top_k, ratio=1.01, k=0),
    **wrong(demo, compression_decay=1.0, top_k=0, chunk=0, axis_name=3),
    "no decay": Refusal(lambda: demo(compression_decay=-0.1), "`compression_decay`", -0.1),
    "ratio 0": Refusal(lambda: HOOKS.top_k(0.0), "`ratio`", 0.0),
    "ratio and k": Refusal(lambda: HOOKS.top_k(ratio=0.1, k=3), "`ratio`", "`k`"),
    "large leaves whole and split": Refusal(
        lambda: reduced(alone_bytes=4, split_large=True), "`alone_bytes`", "`split_large`"
    ),
    "no order": Refusal(lambda: reduced(order="up"), "`order`", "'u'"),
    "the name of no leaf": Refusal(lambda: reduced(order=["b", "w", "x"]), "`order`", "'x'"),
    "the place of no leaf": Refusal(lambda: reduced(order=[0, 1, 3]), "`order`", 3),
    "an order without a leaf": Refusal(lambda: reduced(order=["b", "w"]), "`order`", ["half"]),
    "a leaf twice": Refusal(lambda: reduced(order=[0, 1, 2, "w"]), "`order`", ["w"]),
    "buckets without a leaf": Refusal(lambda: buckets(["b"], ["w"]), "`buckets`", [1]),
    "two buckets of a leaf": Refusal(lambda: buckets([0], [2, 1], [0]), "`buckets`", [0]),
    "two dtypes": Refusal(lambda: buckets(["b", "half"], ["w"]), "dtype", "bfloat16"),
    "an empty bucket": Refusal(lambda: buckets(["b", "w"], [], ["half"]), "`buckets`", "empty"),
    "fewer buckets than dtypes": Refusal(lambda: reduced(max_buckets=1), "`max_buckets`", 2),
    "specs of replicas": Refusal(lambda: sharded({"w": P("replica")}), "`param_specs`", "replica"),
    "no specs": Refusal(lambda: sharded({"w": "fsdp"}), "`param_specs`", "str"),
    "specs of another tree": Refusal(lambda: sharded({"v": P("fsdp")}), "structure"),
    "specs over no axis": Refusal(lambda: sharded({"w": P("model")}), "'model'", "fsdp"),
    "a maker of hooks": Refusal(lambda: reduced(HOOKS.mean), "`hook`", "mean"),
    "half": Refusal(lambda: reduced(HOOKS.fp16_compress()), "fp16_compress", "bfloat16 (half)"),
    "a shorter bucket": Refusal(
        lambda: reduced(HOOKS.stateless(lambda b: b.flat[:-1])), "(8,)", "(7,)"
    ),
    "no hook": Refusal(lambda: HOOKS.bf16_compress(lambda b: b), "`hook`", "<lambda>"),
    "a hook outside of the axis": Refusal(
        lambda: js.all_reduce_gradients("x", hook=HOOKS.int8()).init(PARAMS), "`axis_name` 'x'"
    ),
    "int8 of 8 bits": Refusal(lambda: float8(HOOKS.int8), "int8", "net/small"),
    "top_k of 8 bits": Refusal(lambda: float8(HOOKS.top_k), "top_k", "float8_e5m2"),
    "calls": Refusal(lambda: js.gradients.accumulate(SGD, every=0), "`every`", 0),
    "nothing to accumulate for": Refusal(
        lambda: js.gradients.accumulate("sgd", every=2), "`inner`", "sgd"
    ),
    "a weight in a sum": Refusal(
        lambda: trace(
            one_update(js.gradients.accumulate(SGD, 2, average=False), weight=1.0), PARAMS
        ),
        "`weight`",
    ),
}


def skipping(used=None, axis="replica"):
    tx = js.gradients.skip_unused(SGD, "replica")
    return trace(one_update(tx, used=used), PARAMS, axes={axis: 4})


def skip(inner):
    return js.gradients.skip_unused(inner, "replica").init(PARAMS)


SKIP_UNUSED = {
    "a parameter transform": Refusal(lambda: skip(js.local_sgd("replica")), "`inner`", "after it"),
    "no transform": Refusal(lambda: skip(0.1), "`inner`", 0.1),
    "a state of no parameters": Refusal(lambda: skip(optax.sm3(0.1)), "tree['b']"),
    "another axis": Refusal(lambda: skipping(axis="device"), "`axis_name`", "replica"),
    "names of no state": Refusal(lambda: js.gradients.unused_names((), PARAMS), "`state`", 0),
    "names of other leaves": Refusal(lambda: js.gradients.unused_names(skip(SGD), {"b": 1}), "zip"),
}

GRADIENT = js.sparse.RowGradient(jnp.array([1, 2]), jnp.ones((2, 3)), 4)
HALVED = jax.tree.map(lambda x: 0.5 * x.astype(jnp.float32), GRADIENT)
ROWS, VALUES = jnp.zeros((4, 2), jnp.int32), jnp.ones((4, 2, 3))


def rows_option(axis_name="replica", **options):
    return js.sparse.all_reduce_rows(axis_name, **{"tables": ("t",), **options})


def rows_update(leaf=lambda r, v: js.sparse.RowGradient(r, v, 4), weight=None, **options):
    tx = rows_option(**options)

    def step(rows, values):
        return tx.update({"t": leaf(rows, values)}, tx.init({"t": 0}), weight=weight)[0]

    return jax.eval_shape(jax.vmap(step, axis_name="replica"), ROWS, VALUES)


def on_four(update, values):
    """Trace an update of gradients that are typed as equal on all devices."""
    mesh = js.make_mesh({"axis": 4})
    fn = jax.shard_map(update, mesh=mesh, in_specs=P(), out_specs=P())
    return jax.eval_shape(fn, values)


def summed_rows(values):
    tx = rows_option("axis")
    return tx.update({"t": js.sparse.RowGradient(ROWS[0], values, 4)}, tx.init({"t": 0}))[0]


def summed_leaves(values):
    tx = js.all_reduce_gradients("axis")
    return tx.update({"w": values}, tx.init({"w": values}))[0]


def looked_up(**names):
    return js.row_value_and_grad(jnp.sum, lambda x: names)({"e": VALUES[0]}, ROWS[0])


def coalesced(rows=GRADIENT.rows, values=GRADIENT.values, num_rows=4, **options):
    return js.sparse.coalesce(js.sparse.RowGradient(rows, values, num_rows), **options)


def touched(**options):
    return js.sparse.gather_rows(VALUES[0], ROWS[0], **options).touched


SPARSE = {
    **wrong(rows_option, capacity=0, path="fast", output="sparse", divide_by="all", axis_name=3),
    **wrong(rows_update, axis_name="nodes"),
    **wrong(coalesced, capacity=0),
    **wrong(touched, capacity=True),
    "one capacity": Refusal(lambda: rows_option(capacity={"t": 0}), "`capacity['t']`", 0),
    "no such capacity": Refusal(lambda: rows_option(capacity={"x": 3}), "`capacity`", "'x'"),
    "rows of whole tables": Refusal(
        lambda: rows_option(path="dense", output="rows"), "`output=", "`path="
    ),
    "no leaf": Refusal(lambda: rows_update(tables=("emb",)), "'emb'", "'t'"),
    "unnamed": Refusal(lambda: rows_update(tables=(), dense=optax.identity()), "`tables`", "'t'"),
    "a weight": Refusal(lambda: rows_update(weight=jnp.ones(2)), "`weight`"),
    "scaled": Refusal(
        lambda: rows_update(lambda r, v: js.sparse.RowGradient(v[:, 0], v, 4)), "'t'", "float32"
    ),
    "an integer table": Refusal(lambda: rows_update(lambda r, v: r), "t", "int32"),
    "rows that jax has summed": Refusal(
        lambda: on_four(summed_rows, VALUES[0]), "t (over 'axis')", "pcast"
    ),
    "leaves that jax has summed": Refusal(
        lambda: on_four(summed_leaves, VALUES[0]), "w (over 'axis')", "pcast"
    ),
    "integers for a table": Refusal(
        lambda: rows_update(lambda r, v: jnp.zeros((4, 3), jnp.int32)), "t", "int32"
    ),
    "two tables": Refusal(
        lambda: GRADIENT + js.sparse.RowGradient(GRADIENT.rows, GRADIENT.values, 5), "float32[4, 3]"
    ),
    "no floats": Refusal(
        lambda: js.sparse.row_gradient(ROWS, capacity=1), "`dense`", "int32[4, 2]"
    ),
    "indices": Refusal(lambda: js.sparse.gather_rows(VALUES[0], jnp.ones(2)), "integer", "'f'"),
    "rows that were scaled": Refusal(lambda: js.sparse.coalesce(HALVED), "`gradient`", "float32"),
    "scaled rows as a table": Refusal(HALVED.to_dense, "to_dense", "float32"),
    "a row for each": Refusal(lambda: coalesced(GRADIENT.rows[:1]), "(1,)", (2, 3)),
    "integer values": Refusal(lambda: coalesced(values=GRADIENT.rows), "values", "int32"),
    "rows of another table": Refusal(
        lambda: js.sparse.apply_rows(jnp.ones((5, 3)), GRADIENT, learning_rate=1.0),
        "`table`",
        (5, 3),
    ),
    "a lookup of no leaf": Refusal(lambda: looked_up(emb=ROWS), "`tables`", "emb"),
    "not the table": Refusal(lambda: jnp.dot(touched(), 1), "TouchedRows", "", TypeError),
}

SCALED = js.dynamic_loss_scale(SGD, initial=8.0)
MASK = {"b": True, "half": True, "w": False}


def scale_rule(**changes):
    options = {"initial": 2.0**16, "growth_interval": 2000, "growth": 2.0, "backoff": 0.5}
    return ScaleRule(
        **options | {"hysteresis": 1, "min_scale": 1.0, "max_scale": 2.0**24} | changes
    )


def scaling(optimizer=SGD, axes=()):
    """Make a loss scale, its state and an update."""
    return trace(one_update(js.dynamic_loss_scale(optimizer, axes)), PARAMS)


def scaled(**extra):
    return trace(one_update(SCALED, **extra), PARAMS)


def keeping(*keep):
    loss = apply_policy(js.gradients.Policy("float16", keep=keep), lambda *args, **known: None)
    return loss({"a": jnp.ones(1)}, {"b": jnp.ones(1)}, rng=None, model_state=())


def inside(around):
    """Look for a loss scale inside of this."""
    return check_nesting((around.init(PARAMS),))


PRECISION = {
    **wrong(scale_rule, growth_interval=0, hysteresis=0, growth=1.0, backoff=1.0, min_scale=0.0),
    **wrong(scale_rule, initial=0.5),
    **wrong(scaled, weight=-1),
    **wrong(scaling, optimizer=None, axes=(1,)),
    **wrong(js.gradients.Policy, compute="float64"),
    "no backoff": Refusal(lambda: scale_rule(backoff=0), "`backoff`", 0),
    "an infinite scale": Refusal(lambda: scale_rule(max_scale=3.4e38), "`max_scale`", "3.4e+38"),
    "initial above": Refusal(lambda: scale_rule(initial=2.0**25), "`initial`", 2.0**25),
    "MultiSteps itself": Refusal(lambda: scaling(optax.MultiSteps(SGD, 2)), "gradient_transfor"),
    "parameters": Refusal(lambda: scaling(js.local_sgd("replica")), "`optimizer`", "Parameter"),
    "a chain of them": Refusal(
        lambda: scaling(optax.chain(SGD, js.local_sgd("replica"))), "`optimizer`", "chain"
    ),
    "two scales": Refusal(lambda: scaling(SCALED), "`optimizer`", "another"),
    "hidden": Refusal(lambda: inside(optax.masked(SCALED, MASK)), "masked"),
    "no such axis": Refusal(lambda: scaling(axes="nowhere"), "'nowhere'", "compiler"),
    "scales in a chain": Refusal(lambda: inside(optax.chain(SCALED, SCALED)), "one loss scale", 2),
    "apply_if_finite": Refusal(lambda: inside(optax.apply_if_finite(SCALED, 3)), "apply_if_finite"),
    "MultiSteps": Refusal(lambda: inside(optax.MultiSteps(SCALED, 2)), "MultiSteps"),
    "a name that is nowhere": Refusal(lambda: keeping("a", "x"), "`keep`", "'x'; leaves are a, b"),
}


def clip(max_norm=1.0, model_axes=(), **options):
    return js.clip_by_global_norm(max_norm, model_axes, **options)


def clipped(model_axes="stage", **options):
    tx = clip(1.0, model_axes, **options)
    step = jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="stage")
    return jax.eval_shape(step, {"w": jnp.ones((2, 4))})


def equal_in_parts(values):
    tx = clip(1.0, "axis", param_specs=P("axis"))
    return tx.update({"w": values}, tx.init({"w": values}))[0]


W = {"param_specs": P()}
CLIPPING = {
    **wrong(clip, max_norm=0.0, model_axes=3, norm=0.5),
    "no number": Refusal(lambda: clip(math.nan), "`max_norm`", "nan"),
    "specs without axes": Refusal(lambda: clip(**W), "`param_specs`", "`model_axes`"),
    "specs": Refusal(lambda: clip(1, "t", param_specs={"w": "x"}), "`param_specs`", "str"),
    "a tie of one": Refusal(lambda: clip(tied=[{0: "w"}]), "`tied`", {0: "w"}),
    "ties over no axis": Refusal(lambda: clip(tied=[{0: "w", 1: "w"}]), "`tied_axis_name`"),
    "an axis that is nowhere": Refusal(lambda: clipped("nowhere"), "'nowhere'"),
    "nothing that tells": Refusal(clipped, "`param_specs`", "stage"),
    "specs of others": Refusal(lambda: clipped(param_specs={"v": P()}), "('v',)", "('w',)"),
    "ties of others": Refusal(lambda: clipped(**W, tied=[{0: "w", 1: "v"}]), "`tied`", ["v"]),
    "later stages": Refusal(lambda: clipped(**W, tied=[{0: "w", 2: "w"}]), "`tied`", [2]),
    "larger": Refusal(lambda: clipped(**W, counted={"w": np.ones((2, 4))}), "`counted`", (2, 4)),
    "types": Refusal(lambda: on_four(equal_in_parts, VALUES[0]), "`param_specs`", "w (over ['axis"),
}


def groups(*given):
    return js.pipeline.sum_tied_gradients("stage", list(given))


def tied(*names):
    """Trace the sum over copies of these names, on the first stages of four."""
    grads = {"e": jnp.zeros((4, 5)), "half": jnp.zeros((4, 5), jnp.bfloat16), "b": jnp.zeros(4)}
    tx = groups(dict(enumerate(names)))
    step = jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="stage")
    return jax.eval_shape(step, grads)


def summed_groups(values):
    tx = js.pipeline.sum_tied_gradients("axis", [{0: "t", 1: "t"}])
    return tx.update({"t": values}, tx.init({}))[0]


TIED = {
    "no list": Refusal(lambda: js.pipeline.sum_tied_gradients("stage", {"t": (0, 3)}), "`groups`"),
    "no mapping": Refusal(lambda: groups(("table", 0, 3)), "`groups`", "table"),
    "a stage below 0": Refusal(lambda: groups({0: "a", -1: "a"}), "`groups`", -1),
    "no name": Refusal(lambda: groups({0: "a", 1: 2}), "`groups`", 2),
    "a stage alone": Refusal(lambda: groups({2: "a"}), "`groups`", {2: "a"}),
    "an overlap": Refusal(lambda: groups({0: "a", 1: "b"}, {2: "c", 1: "b"}), "'b' on stage 1"),
    "two axes": Refusal(lambda: js.pipeline.sum_tied_gradients(("a", "b"), []), "`axis_name`"),
    "stage 4 of 4": Refusal(lambda: tied(*"eeeee"), "`groups`", [4]),
    "a leaf that is not there": Refusal(lambda: tied("e", "tail"), "`groups`", ["tail"]),
    "another shape": Refusal(lambda: tied("e", "b"), "e float32[5]", "b float32[]"),
    "another dtype": Refusal(lambda: tied("e", "half"), "e float32[5]", "half bfloat16"),
    "what jax has summed": Refusal(lambda: on_four(summed_groups, VALUES[0]), "'axis'", "pcast"),
}


@each(REDUCER | SKIP_UNUSED | SPARSE | PRECISION | CLIPPING | TIED)
def test_refused(refusal):
    refusal.check()
