"""What pipelines, their models and their schedules refuse, and what the message names."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from support.layered import language_model, tokens
from support.refusals import Refusal, each

by_name, from_table = js.schedules.by_name, js.schedules.from_table


def of_kind(kind, argument, value, stages=2, microbatches=4, **options):
    return Refusal(lambda: by_name(kind, stages, microbatches, **options), argument, value)


SCHEDULES = {
    "an unknown kind": of_kind("pipedream", "gpipe", "pipedream"),
    "too much memory": of_kind("zero_bubble", "`memory`", 3, memory=3),
    "turns that do not divide": of_kind("interleaved", "`num_microbatches`", 3, microbatches=3),
}


def rows(table, argument, value="", **options):
    return Refusal(lambda: from_table(table, **options), argument, value)


TABLES = {
    "an unknown letter": rows(["0F0,0X0"], "column 1 of stage 0", "0X0"),
    "a stage on two devices": rows(["0F0,0B0,1F0", "1B0"], "stage 1 of the model", "0 and 1"),
    "a missing backward pass": rows(["0F0,0F1,0B0"], "microbatch 1 on stage 0", "not 0"),
    "B before its F": rows(["0B0,0F0"], "0B0", "0F0"),
}

balanced, by_cost = js.partition_balanced, js.partition_by_cost
PARTITIONS = {
    "negative weights": Refusal(lambda: balanced([3, -1, 2, -4], 2), "`weights`", "-4 for layer 3"),
    "fewer layers than blocks": Refusal(lambda: by_cost([1, 2, 3], 2, 2), "`num_chunks`=2", "3 l"),
}


def dense(params, x):
    return jnp.tanh(x @ params["w"])


def mean(x, batch):
    return jnp.mean(x)


X = np.ones((4, 2), np.float32)
WEIGHTS = [{"w": np.ones((n, 3), np.float32)} for n in (2, 3, 3)]


def layered(*, layers=(dense, dense, dense), loss=mean, **options):
    return js.LayeredModel(layers, loss, **options)


def valued(loss):
    return layered(layers=[dense], loss=lambda x, _: loss)(WEIGHTS[:1], X)


def tied(*groups):
    return layered(tied=groups)(WEIGHTS, X)


def layer(one):
    return layered(layers=[one])(WEIGHTS[:1], X)


MODELS = {
    "a layer of one argument": Refusal(
        lambda: layer(eqx.nn.Linear(2, 3, key=jax.random.key(0))), "layer 0", "too many positional"
    ),
    "a tie of no leaf": Refusal(lambda: tied([(0, "w"), (1, "v")]), "'v' of layer 1", "w"),
    "an integer as loss": Refusal(lambda: valued(2), "`loss`", "int32"),
}

MODEL, PARAMS = language_model(2)


def pipe(axes=(("stage", 2),), schedule=None, params=PARAMS, model=MODEL, **options):
    options.setdefault("mesh", js.make_mesh(dict(axes)))
    schedule = schedule or js.schedules.one_f_one_b(2, 4)
    return js.pipelined(model, params, schedule, **options)


def with_leaf(name, leaf):
    return [{**PARAMS[0], name: leaf}, *PARAMS[1:]]


def called(batch, stacked=None, **options):
    made = pipe(FOUR, data_axes=("fsdp",))
    stacked = made.layout.types if stacked is None else stacked
    return jax.eval_shape(lambda stacked: made(stacked, batch, **options), stacked)


def stepped(params=PARAMS, optimizer=None):
    made = pipe((("replica", 2), ("stage", 2)))
    tx = optimizer or optax.sgd(0.1)
    js.make_train_step(made, tx, sync="none", mesh=made.mesh).init(params)


def searching():
    def asking(updates, state, params=None, *, value_fn, **_):
        return jax.tree.map(lambda g: -g * value_fn(params), updates), state

    axes = ("replica", 2), ("stage", 1)
    made = pipe(axes, js.schedules.gpipe(1, 2), executor="host")
    tx = optax.GradientTransformationExtraArgs(lambda params: (), asking)
    step = js.make_train_step(made, tx, sync="none", mesh=made.mesh)
    step(step.init(PARAMS), tokens(16))


def twice_tied():
    scales = js.LayeredModel(
        [lambda s, x: jnp.sin(x * s)] * 2, mean, tied=[((0, "(root)"), (1, "(root)"))]
    )
    made = pipe(model=scales, params=[1.5, 0.5])
    once = jax.grad(lambda s: jnp.sum(jax.grad(made)(s, np.ones(8, np.float32))["float32"]))
    return once(made.layout.stack([1.5, 0.5]))


def made(argument, value="", axes=(("stage", 2),), schedule=None, **options):
    return Refusal(lambda: pipe(axes, schedule, **options), argument, value)


FOUR = ("stage", 2), ("fsdp", 2)
UP = [P(), {"up": P(None, "fsdp"), "bias": P(), "down": P()}, P(), P()]
PIPELINES = {
    "more stages than devices": made("`schedule`", "3 s", schedule=js.schedules.gpipe(3, 2)),
    "parts of one stage": made("`parts`", [[(0, 4)]], parts=[[(0, 4)]]),
    "specs that do not divide": made(
        "`param_specs`", "dimension of 6", (("stage", 2), ("fsdp", 4)), param_specs=UP
    ),
    "specs of other tied leaves": made(
        "`param_specs`", "table", FOUR, param_specs=[P("fsdp"), P(), P(), P(None, "fsdp")]
    ),
}
CALLS = {
    "microbatches that do not divide": Refusal(lambda: called(tokens(6)), "4 microbatches", 6),
    "second derivatives of tied leaves": Refusal(twice_tied, "`tied`"),
    "the host inside of jit": Refusal(
        lambda: jax.jit(pipe(executor="host"))(PARAMS, tokens(8)), "`executor`", "jax.jit"
    ),
    "integers that a step would train": Refusal(
        lambda: stepped(with_leaf("count", np.int32(1))), "0/count", "int32"
    ),
    "norms over stages": Refusal(
        lambda: stepped(optimizer=optax.clip_by_global_norm(1.0)),
        "`optimizer`",
        "js.clip_by_global_norm",
    ),
    "a line search on the host": Refusal(searching, "`value_fn`", "`executor`"),
}
ALL = {
    "schedule": SCHEDULES,
    "table": TABLES,
    "partition": PARTITIONS,
    "model": MODELS,
    "pipeline": PIPELINES,
    "call": CALLS,
}


@each({f"{kind}: {name}": row for kind, rows in ALL.items() for name, row in rows.items()})
def test_refused(refusal):
    refusal.check()
