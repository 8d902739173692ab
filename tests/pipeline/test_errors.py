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
    "parameters of fewer layers": Refusal(
        lambda: js.pipeline.layer_flops([dense] * 3, WEIGHTS[:2], X), "`params`", "2 trees for 3"
    ),
    "fewer layers than blocks": Refusal(lambda: by_cost([1, 2, 3], 2, 2), "`num_chunks`=2", "3 l"),
}


def dense(params, x):
    return jnp.tanh(x @ params["w"])


def mean(x, batch):
    return jnp.mean(x)


X = np.ones((4, 2), np.float32)
WEIGHTS = [{"w": np.ones((n, 3), np.float32)} for n in (2, 3, 3)]


def layered(layers=(dense, dense, dense), loss=mean, **options):
    return js.LayeredModel(layers, loss, **options)(WEIGHTS[: len(layers)], X)


LINEAR = eqx.nn.Linear(2, 3, key=jax.random.key(0))
MODELS = {
    "a layer of one argument": Refusal(lambda: layered([LINEAR]), "layer 0", "too many positional"),
    "a tie of no leaf": Refusal(
        lambda: layered(tied=[[(0, "w"), (1, "v")]]), "'v' of layer 1", "w"
    ),
    "an integer as loss": Refusal(lambda: layered([dense], lambda x, batch: 2), "`loss`", "int32"),
}
MODEL, PARAMS = language_model(2)


def pipe(axes=(("stage", 2),), schedule=None, params=PARAMS, model=MODEL, **options):
    options.setdefault("mesh", js.make_mesh(dict(axes)))
    schedule = schedule or js.schedules.one_f_one_b(2, 4)
    return js.pipelined(model, params, schedule, **options)


def stepped(params=PARAMS, optimizer=None):
    made = pipe((("replica", 2), ("stage", 2)))
    tx = optimizer or optax.sgd(0.1)
    js.make_train_step(made, tx, sync="none", mesh=made.mesh).init(params)


def made(argument, value="", axes=(("stage", 2),), schedule=None, **options):
    return Refusal(lambda: pipe(axes, schedule, **options), argument, value)


WIDER = [PARAMS[0], {**PARAMS[1], "up": np.ones((5, 6), np.float32)}, *PARAMS[2:]]


def of_state(model_state, value):
    counting = js.LayeredModel([lambda params, x, state: (dense(params, x), state)], mean)
    call = lambda: counting(WEIGHTS[:1], X, model_state=model_state)  # noqa: E731
    return Refusal(call, "`model_state`", value)


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
    "microbatches that do not divide": Refusal(
        lambda: jax.eval_shape(pipe(), PARAMS, tokens(6)), "4 microbatches", 6
    ),
    "a key among the parameters": Refusal(
        lambda: pipe(params=[{**PARAMS[0], "key": jax.random.key(0)}, *PARAMS[1:]]),
        "`params`",
        "a PRNG key",
    ),
    "parameters of other shapes": Refusal(lambda: pipe().layout.stack(WIDER), "`params`", [5, 6]),
    "text in the model state": of_state([{"name": "a"}], "0/name"),
    "model state of other layers": of_state([], "got 0"),
    "too few trees": Refusal(lambda: jax.eval_shape(pipe(), PARAMS[1:], tokens(8)), "`params`", 3),
    "the host inside of jit": Refusal(
        lambda: jax.jit(pipe(executor="host"))(PARAMS, tokens(8)), "`executor`", "jax.jit"
    ),
    "integers that a step would train": Refusal(
        lambda: stepped([{**PARAMS[0], "count": np.int32(1)}, *PARAMS[1:]]), "0/count", "int32"
    ),
    "norms over stages": Refusal(
        lambda: stepped(optimizer=optax.clip_by_global_norm(1.0)),
        "`optimizer`",
        "js.clip_by_global_norm",
    ),
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
