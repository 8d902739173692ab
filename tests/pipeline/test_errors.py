"""What pipelines, their models and their schedules refuse, and what the message names."""

import dataclasses
import functools
import math
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.pipeline.schedules import Operation, Schedule
from support.layered import language_model, tokens
from support.refusals import Refusal, each

by_name, from_table = js.schedules.by_name, js.schedules.from_table
simulate = js.schedules.one_f_one_b(2, 2).simulate


def of_kind(kind, argument, value, stages=2, microbatches=4, **options):
    return Refusal(lambda: by_name(kind, stages, microbatches, **options), argument, value)


def timed(argument, value, shown=None):
    shown = value if shown is None else shown
    return Refusal(lambda: simulate(**{argument: value}), f"`{argument}`", shown)


SCHEDULES = {
    "an unknown kind": of_kind("pipedream", "gpipe", "pipedream"),
    "an option of another kind": Refusal(
        lambda: by_name("gpipe", 2, 4, memory=2), "'memory'", "gpipe()", TypeError
    ),
    "no stage": of_kind("gpipe", "`num_stages`", 0, stages=0),
    "half a microbatch": of_kind("gpipe", "`num_microbatches`", 2.0, microbatches=2.0),
    "a flag as chunks": of_kind("gpipe", "`num_chunks`", True, num_chunks=True),
    "chunks of 1F1B": of_kind("one_f_one_b", "`num_chunks`", 2, num_chunks=2),
    "chunks of ZB-H1": of_kind("zero_bubble", "`num_chunks`", 2, num_chunks=2),
    "one arm of a V": of_kind("zbv", "`num_chunks`", 1, num_chunks=1),
    "too much memory": of_kind("zero_bubble", "`memory`", 3, memory=3),
    "a flag as memory": of_kind("zero_bubble", "`memory`", True, memory=True),
    "turns that do not divide": of_kind("interleaved", "`num_microbatches`", 3, microbatches=3),
    "an unknown warm-up": of_kind("interleaved", "`warm_up`", "some", warm_up="some"),
    "no room": of_kind("lockstep", "`most_stash`", 0, most_stash=0),
    "no room for a chunk": of_kind("lockstep", "`most_stash`", 1, num_chunks=2, most_stash=1),
    "a time of the search": of_kind("lockstep", "`backward_input`", -1, backward_input=-1),
    "a negative time": timed("forward", -1),
    "an endless time": timed("send", math.inf),
    "no time": timed("backward_input", math.nan),
    "a text as time": timed("forward", "1", "'1'"),
    "times of no stage": timed("backward_weight", [1, 2, 3], "got 3"),
    "only zeros": Refusal(
        lambda: simulate(forward=0, backward_input=0, backward_weight=0), "`backward_weight`", 0
    ),
}


def rows(table, argument, value="", **options):
    return Refusal(lambda: from_table(table, **options), argument, value)


def operations(argument, value, *found):
    cells = (tuple((Operation(*one),) for one in found),)
    return Refusal(lambda: Schedule("mine", 1, 1, 1, (0,), cells), argument, value)


def changed(schedule, argument, value, **change):
    return Refusal(lambda: dataclasses.replace(schedule, **change), argument, value)


TABLES = {
    "one string": rows("0F0,0B0", "`rows`", "0F0,0B0"),
    "None": rows(None, "`rows`", None),
    "no rows": rows([], "`rows`"),
    "idle rows": rows(["", ""], "`rows`"),
    "a number as row": rows([3], "`rows`", 3),
    "cells that are cut apart": rows([["0F0", "0B0"]], "`rows`", ["0F0", "0B0"]),
    "an unknown letter": rows(["0F0,0X0"], "column 1 of stage 0", "0X0"),
    "a pair without a mark": rows(["0F0,(0F1;0B0),0B1"], "column 1", "(0F1;0B0)"),
    "a stage on two devices": rows(["0F0,0B0,1F0", "1B0"], "stage 1 of the model", "0 and 1"),
    "a gap in the model": rows(["0F0,0B0", "2F0,2B0"], "stage 1"),
    "uneven chunks": rows(["0F0,1F0,1B0,0B0", "2F0,2B0"], "2 times"),
    "columns that are no ticks": rows(["0F0,,0B0", "1F0,1B0"], "1F0", "F of", lockstep=True),
    "a missing backward pass": rows(["0F0,0F1,0B0"], "microbatch 1 on stage 0", "not 0"),
    "F twice": rows(["0F0,0F0,0B0"], "(F) of microbatch 0", "not 2"),
    "W beside B": rows(["0F0,0B0,0W0"], "(W or B)", "not 2"),
    "no W": rows(["0F0,0I0"], "(W or B)", "not 0"),
    "no I": rows(["0F0,0W0"], "(I or B)", "not 0"),
    "two F in a column": rows(["(0F0;0F1)OVERLAP_F_B,0B0,0B1"], "stage 0", ["F", "F"]),
    "B before F in a column": rows(["0F0,(0B0;0F1)OVERLAP_F_B,0B1"], "stage 0", ["BW", "F"]),
    "B before its F": rows(["0B0,0F0"], "0B0", "0F0"),
    "stages that wait for each other": rows(
        ["0F0,0B0,0F1,0B1", "1F0,1F1,1B0,1B1"], "0B0 for 1B0", "1F1"
    ),
    "an unknown kind of operation": operations("F, B, W, BW", "'X'", ("X", 0, 0, 0)),
    "the row of another stage": operations("stage 0", "stage=1", ("F", 1, 0, 0)),
    "a chunk below 0": operations("`chunk`", -1, ("F", 0, 0, 0), ("F", 0, -1, 0)),
    "a microbatch below 0": operations("`microbatch`", -1, ("F", 0, 0, 0), ("F", 0, 0, -1)),
    "a microbatch too many": changed(
        js.schedules.gpipe(1, 2), "`microbatch`", "microbatch=1", num_microbatches=1
    ),
    "a stage that is placed twice": changed(
        js.schedules.gpipe(2, 1), "`placement`", (0, 0), placement=(0, 0)
    ),
    "too few rows": changed(js.schedules.gpipe(2, 1), "`cells`", 1, cells=((),)),
}

uniform, balanced, by_cost = js.partition_uniform, js.partition_balanced, js.partition_by_cost
flops, counted = js.pipeline.layer_flops, js.pipeline.count_layer_params
PARTITIONS = {
    "no layer": Refusal(lambda: uniform(0, 2), "`num_items`", 0),
    "no stage": Refusal(lambda: by_cost([1, 2], 0), "`num_stages`", 0),
    "chunks below 0": Refusal(lambda: uniform(4, 2, -1), "`num_chunks`", -1),
    "negative weights": Refusal(lambda: balanced([3, -1, 2, -4], 2), "`weights`", "-4 for layer 3"),
    "weights that are no integers": Refusal(lambda: balanced([1.5, 2.0, 1.0], 2), "`weights`"),
    "no weights": Refusal(lambda: balanced([], 2), "`weights`", []),
    "weights of several dimensions": Refusal(lambda: balanced([[1], [2]], 2), "`weights`"),
    "a number as weights": Refusal(lambda: balanced(5, 2), "`weights`", 5),
    "fewer layers than blocks": Refusal(lambda: by_cost([1, 2, 3], 2, 2), "`num_chunks`=2", "3 l"),
    "endless costs": Refusal(lambda: by_cost([1, math.inf], 2), "`costs`", "inf for layer 1"),
    "costs that are none": Refusal(lambda: by_cost([math.nan, 1], 2), "`costs`", math.nan),
    "a dict of costs": Refusal(lambda: by_cost({1: 2, 3: 4}, 1), "`costs`"),
    "flags as costs": Refusal(lambda: by_cost([True, False], 1), "`costs`"),
    "a tree of one layer": Refusal(lambda: counted({"a": np.zeros(3)}), "`layers`", "dict"),
    "an array for layers": Refusal(lambda: counted(np.zeros((2, 3))), "`layers`", "ndarray"),
    "a function as a leaf": Refusal(lambda: counted([{}, {"fn": len}]), "layer 1", "fn"),
    "no layers": Refusal(lambda: flops([], [], np.zeros((3, 4))), "`params`", 0),
    "more trees than layers": Refusal(lambda: flops([len], [{}, {}], np.zeros(3)), "`params`", 2),
    "a text as weight": Refusal(lambda: flops([len], [{"w": "t"}], np.zeros(3)), "layer 0", "w"),
}


def dense(params, x):
    return jnp.tanh(x @ params["w"])


def mean(x, batch):
    return jnp.mean(x)


X = np.ones((4, 2), np.float32)
WEIGHTS = [{"w": np.ones((n, 3), np.float32)} for n in (2, 3, 3)]


def counting(executor):
    """Take a step with a loss that counts, which would train nothing."""
    mesh = js.make_mesh({"replica": 2, "stage": 2})
    model = js.LayeredModel([dense] * 2, lambda y, x: jnp.sum(y > 0))
    made = js.pipelined(model, WEIGHTS[:2], js.schedules.gpipe(2, 2), mesh=mesh, executor=executor)
    step = js.make_train_step(made, optax.sgd(0.1), sync="none", mesh=mesh)
    step(step.init(WEIGHTS[:2]), np.ones((8, 2), np.float32))


def layered(*, layers=(dense, dense, dense), loss=mean, **options):
    return js.LayeredModel(layers, loss, **options)


def valued(loss):
    return layered(layers=[dense], loss=lambda x, _: loss)(WEIGHTS[:1], X)


def tied(*groups):
    return layered(tied=groups)(WEIGHTS, X)


def layer(one):
    return layered(layers=[one])(WEIGHTS[:1], X)


def stated(states):
    return layered(layers=[stateful])(WEIGHTS[:1], X, model_state=states)


def stateful(params, x, *, state):
    return x


MODELS = {
    "no layers": Refusal(lambda: layered(layers=[]), "`layers`"),
    "one function": Refusal(lambda: layered(layers=dense), "`layers`", "function"),
    "a number as layer": Refusal(lambda: layered(layers=[dense, 3]), "layer 1", "int"),
    "no loss": Refusal(lambda: layered(loss=None), "`loss`", "NoneType"),
    "a layer of one argument": Refusal(
        lambda: layer(eqx.nn.Linear(2, 3, key=jax.random.key(0))), "layer 0", "too many positional"
    ),
    "a bound argument": Refusal(lambda: layer(functools.partial(dense, {})), "layer 0", "too many"),
    "a third argument": Refusal(lambda: layer(lambda w, x, mask: x), "layer 0", "'mask'"),
    "another keyword": Refusal(lambda: layer(lambda w, x, *, train: x), "layer 0", "train"),
    "a key by position alone": Refusal(lambda: layer(lambda w, x, key, /: x), "layer 0", "'key'"),
    "one name to take": Refusal(lambda: layered(takes="key"), "`takes`", "key"),
    "another name to take": Refusal(lambda: layered(takes=("rng",)), "`takes`", ("rng",)),
    "another name for one": Refusal(lambda: layered(takes=[(), None, ["rng"]]), "`takes`", "rng"),
    "names of too few layers": Refusal(lambda: layered(takes=[(), ()]), "`takes`", "3 layers"),
    "no name to take": Refusal(lambda: layered(takes=3), "`takes`", 3),
    "a key that a layer lacks": Refusal(
        lambda: layered(takes=[(), ("key",), ()]), "`takes`", "dense"
    ),
    "a state that is not said": Refusal(
        lambda: layered(layers=[stateful], takes=("key",)), "`takes`", "stateful"
    ),
    "a tie beyond the model": Refusal(lambda: tied([(0, "w"), (3, "w")]), "`tied`", 3),
    "a tie before the model": Refusal(lambda: tied([(0, "w"), (-1, "w")]), "`tied`", -1),
    "a tie of one": Refusal(lambda: tied([(0, "w")]), "`tied`", (0, "w")),
    "a tie without paths": Refusal(lambda: tied([0, 1]), "`tied`", 0),
    "a leaf in two ties": Refusal(lambda: tied([(0, "w"), (1, "w")] * 2), "`tied`", (1, "w")),
    "a tie of no leaf": Refusal(lambda: tied([(0, "w"), (1, "v")]), "'v' of layer 1", "w"),
    "a tie of other shapes": Refusal(lambda: tied([(0, "w"), (1, "w")]), "layer 1", "[3, 3]"),
    "too few trees": Refusal(lambda: layered()(WEIGHTS[:2], X), "`params`", 2),
    "a dict of trees": Refusal(lambda: layered()({"a": 1}, X), "`params`", "dict"),
    "an array as loss": Refusal(lambda: valued(jnp.ones(1)), "`loss`", "float32[1]"),
    **{
        f"{x!r} as loss": Refusal(functools.partial(valued, x), "`loss`", dtype)
        for x, dtype in [(2, "int32"), (True, "bool"), (1j, "complex64"), ((2, 4.0), "int32")]
    },
    **{
        f"an integer as loss, {executor}": Refusal(
            functools.partial(counting, executor), "`loss`", "int32"
        )
        for executor in ("one_program", "host")
    },
    "None as loss": Refusal(lambda: valued(None), "`loss`", None),
    "a list as loss": Refusal(lambda: valued([1.0]), "`loss`", ["float"]),
    "None as weight": Refusal(lambda: valued((1.0, None)), "`loss`", ("float", "NoneType")),
    "a triple as loss": Refusal(lambda: valued((1.0, 2, 3)), "`loss`", "int"),
    "an array as metric": Refusal(lambda: valued((1.0, {"a": X})), "`loss`", "float32[4, 2]"),
    "state that is not returned": Refusal(lambda: stated([{}]), "layer 0", "state"),
    "state of other layers": Refusal(lambda: stated([{}] * 3), "`model_state`", 3),
}

MODEL, PARAMS = language_model(2)


def pipe(axes=(("stage", 2),), schedule=None, params=PARAMS, model=MODEL, **options):
    options.setdefault("mesh", js.make_mesh(dict(axes)))
    schedule = schedule or js.schedules.one_f_one_b(2, 4)
    return js.pipelined(model, params, schedule, **options)


def with_leaf(name, leaf):
    return [{**PARAMS[0], name: leaf}, *PARAMS[1:]]


def stack(params):
    return pipe().layout.stack(params)


def called(batch, stacked=None, **options):
    made = pipe(FOUR, data_axes=("fsdp",))
    stacked = made.layout.types if stacked is None else stacked
    return jax.eval_shape(lambda stacked: made(stacked, batch, **options), stacked)


def of_replicas():
    stacked = pipe(FOUR).layout.stack(PARAMS)
    return called(tokens(8), jax.tree.map(lambda x: x[None], stacked))


def of_batch():
    params = [{"w": np.ones((2, 2), np.float32)}] * 4
    return jax.grad(pipe(model=layered(layers=[dense] * 4), params=params), argnums=1)(params, X)


def elsewhere():
    mesh = js.make_mesh({"stage": 2})
    with mock.patch.object(jax, "process_index", return_value=1):
        return pipe(executor="host", mesh=mesh)


def mapped():
    made = pipe()
    fn = jax.shard_map(lambda s: made(s, tokens(8)), mesh=made.mesh, in_specs=P(), out_specs=P())
    return jax.eval_shape(fn, made.layout.types)


def stepped(executor="one_program", params=PARAMS, mesh=None, batches=None, **options):
    made = pipe((("replica", 2), ("stage", 2)), executor=executor)
    options = {"sync": "none", "mesh": mesh or made.mesh, **options}
    step = js.make_train_step(made, optax.sgd(0.1), **options)
    state = step.init(params)
    for batch in batches or ():
        step(state, batch)


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


def forward_only(executor):
    only = js.schedules.gpipe(2, 2, forward_only=True)
    return jax.grad(pipe(schedule=only, executor=executor), has_aux=True)(PARAMS, tokens(8))


def made(argument, value="", axes=(("stage", 2),), schedule=None, **options):
    return Refusal(lambda: pipe(axes, schedule, **options), argument, value)


STATED = js.LayeredModel([stateful] * 4, mean)
FOUR = ("stage", 2), ("fsdp", 2)
UP = [P(), {"up": P(None, "fsdp"), "bias": P(), "down": P()}, P(), P()]
PIPELINES = {
    "layers without a model": made("`model`", "tuple", model=MODEL.layers),
    "the name of a schedule": made("`schedule`", "str", schedule="1f1b"),
    "a mesh without devices": made("`mesh`", mesh=js.virtual_mesh({"stage": 2})),
    "an unknown executor": made("`executor`", 1, executor=1),
    "more stages than devices": made("`schedule`", "3 s", schedule=js.schedules.gpipe(3, 2)),
    "an unknown axis of stages": made("`axis_name`", "pipe", axis_name="pipe"),
    "several axes of stages": made("`axis_name`", ["stage"], axis_name=["stage"]),
    "an unknown data axis": made("`data_axes`", "fsdp", data_axes="fsdp"),
    "stages as data axis": made("`data_axes`", "stage", data_axes=("stage",)),
    "a number as data axis": made("`data_axes`", 3, data_axes=3),
    "a data axis twice": made("`data_axes`", "('fsdp', 'fsdp')", FOUR, data_axes=("fsdp",) * 2),
    "a text as flag": made("`remat`", "full", remat="full"),
    "an unknown memory": made("`batch_memory`", "disk", batch_memory="disk"),
    "a text as scale": made("`gradient_scale`", "'1'", gradient_scale="1"),
    "a scale of 0": made("`gradient_scale`", 0.0, gradient_scale=0.0),
    "more stages than layers": made(
        "8 stages", "4 layers", (("stage", 8),), js.schedules.gpipe(8, 8)
    ),
    "more chunks than layers": made("3 chunks", "4 l", schedule=js.schedules.gpipe(2, 2, 3)),
    "parts of one stage": made("`parts`", [[(0, 4)]], parts=[[(0, 4)]]),
    "parts without ends": made("`parts`", [2, 2], parts=[2, 2]),
    "parts of half a layer": made("`parts`", 2.5, parts=[[(0, 2.5)], [(2.5, 4)]]),
    "a stage without layers": made("`parts`", "[4, 4", parts=[[(0, 4)], [(4, 4)]]),
    "a gap between parts": made("`parts`", "[3, 4)", parts=[[(0, 2)], [(3, 4)]]),
    "parts that overlap": made("`parts`", "[2, 4)", parts=[[(0, 3)], [(2, 4)]]),
    "parts that end early": made("`parts`", "4 layers", parts=[[(0, 2)], [(2, 3)]]),
    "specs of another tree": made("structure", "dict", param_specs={"a": P()}),
    "specs over stages": made("`param_specs`", "stage", FOUR, param_specs=P("stage")),
    "specs over no axis": made("`param_specs`", "tensor", FOUR, param_specs=P("tensor")),
    "specs of more dimensions": made("`param_specs`", "2 d", FOUR, param_specs=P(None, None, "a")),
    "specs that do not divide": made(
        "`param_specs`", "dimension of 6", (("stage", 2), ("fsdp", 4)), param_specs=UP
    ),
    "specs of other tied leaves": made(
        "`param_specs`", "table", FOUR, param_specs=[P("fsdp"), P(), P(), P(None, "fsdp")]
    ),
    "a tree without layers": made("`params`", "dict", params={"a": 1.0}),
    "a key as parameter": made("'0/key'", "key<fry>", params=with_leaf("key", jax.random.key(0))),
    "a function as parameter": made("`params`", "0/fn", params=with_leaf("fn", jnp.tanh)),
    "an array of texts": made("'0/text'", "<U1[1]", params=with_leaf("text", np.array(["a"]))),
    "a function as model state": made(
        "`model_state`", "0/fn", model=STATED, model_state=[{"fn": jnp.tanh}, {}, {}, {}]
    ),
    "no model state": made("`model_state`", 4, model=STATED),
    "devices of another process": Refusal(elsewhere, "`executor`"),
    "too few trees to stack": Refusal(lambda: stack(PARAMS[:3]), "`params`", 3),
    "other layers to stack": Refusal(lambda: stack(with_leaf("more", X)), "`params`"),
    "other shapes to stack": Refusal(
        lambda: stack([PARAMS[0], {**PARAMS[1], "bias": X}, *PARAMS[2:]]), "'1/bias'", [4, 2]
    ),
    "other buffers": Refusal(lambda: pipe().layout.unstack({"a": 1}), "`buffers`", "a"),
    "buffers of other shapes": Refusal(
        lambda: pipe().layout.unstack({"float32": np.zeros(2)}), "'float32'", [2]
    ),
}
CALLS = {
    "microbatches that do not divide": Refusal(lambda: called(tokens(6)), "4 microbatches", 6),
    "no examples": Refusal(lambda: called(tokens(0)), "4 microbatches", 0),
    "devices that do not divide": Refusal(lambda: called(tokens(4)), "'fsdp'", "1 examples"),
    "a batch of numbers": Refusal(lambda: called({"a": np.zeros(())}), "`batch`", "a: None"),
    "leaves of other lengths": Refusal(lambda: called({"a": X, "b": X[:2]}), "`batch`", "b: 2"),
    "an empty batch": Refusal(lambda: called({}), "`batch`"),
    "a number as key": Refusal(lambda: called(tokens(8), rng=3), "PRNG key", "ndim=0", TypeError),
    "a key of two dimensions": Refusal(
        lambda: called(tokens(8), rng=X), "PRNG key", "float32", TypeError
    ),
    "too few trees": Refusal(lambda: called(tokens(8), PARAMS[1:]), "`params`", 3),
    "a tree of one layer": Refusal(lambda: called(tokens(8), {}), "`stacked`", "dict"),
    "another layout": Refusal(lambda: called(tokens(8), pipe().layout.types), "`stacked`"),
    "replicas of buffers": Refusal(of_replicas, "`stacked`", "[1, 2"),
    "no state of the layers": Refusal(
        lambda: pipe(model=STATED, model_state=[{"n": X}] * 4)(PARAMS, tokens(8), model_state={}),
        "`model_state`",
        "dict",
    ),
    "a gradient of the batch": Refusal(of_batch, "`batch`"),
    "second derivatives of tied leaves": Refusal(twice_tied, "`tied`"),
    "stages that are mapped already": Refusal(mapped, "`axis_name`", "stage"),
    "gradients without backward passes": Refusal(lambda: forward_only("one_program"), "gpipe"),
    "gradients without them, on the host": Refusal(lambda: forward_only("host"), "gpipe"),
    "the host inside of jit": Refusal(
        lambda: jax.jit(pipe(executor="host"))(PARAMS, tokens(8)), "`executor`", "jax.jit"
    ),
    "another mesh for the step": Refusal(
        lambda: stepped("host", mesh=js.make_mesh({"replica": 2})), "`mesh`", "{'replica': 2}"
    ),
    "a state that was given away": Refusal(
        lambda: stepped("host", batches=[tokens(16)] * 2), "`state`"
    ),
    "updates that do not divide": Refusal(
        lambda: stepped(batches=[tokens(16)], accumulate=3), "`accumulate`", 3
    ),
    "integers that a step would train": Refusal(
        lambda: stepped(params=with_leaf("count", np.int32(1))), "0/count", "int32"
    ),
    "a step's own tree": Refusal(lambda: stepped(params={"a": np.ones(3)}), "`params`", "dict"),
    "a line search on the host": Refusal(searching, "`value_fn`", "`executor`"),
}


def stage_call(change):
    program = js.pipeline.split_stage(
        lambda w, x, _: jnp.tanh(x @ w["w"]), WEIGHTS[1], jnp.ones((4, 3)), None
    )
    return change(program, program.forward(WEIGHTS[1], jnp.ones((4, 3)), None)[1])


def loss_stage(result):
    return js.pipeline.split_stage(lambda w, x, m: result, {}, jnp.ones(3), None, loss=True)


ONES = jnp.ones((4, 3))
STAGES = {
    "another shape": Refusal(
        lambda: stage_call(lambda p, s: p.forward(WEIGHTS[1], ONES[:2], None)), "leaf 0", [2, 3]
    ),
    "another tree": Refusal(
        lambda: stage_call(lambda p, s: p.forward([], ONES, None)), "`weights`"
    ),
    "another dtype": Refusal(
        lambda: stage_call(lambda p, s: p.backward(WEIGHTS[1], None, s, ONES > 0)), "`y`", "bool"
    ),
    "an array as loss": Refusal(lambda: loss_stage(jnp.ones(3)), "`loss=True`", "[3]"),
    "an integer as loss": Refusal(lambda: loss_stage(jnp.int32(1)), "`loss=True`", "int32"),
}


@each(SCHEDULES | {f"table: {name}": row for name, row in TABLES.items()})
def test_schedules_are_refused(refusal):
    refusal.check()


@each(PARTITIONS)
def test_partitions_are_refused(refusal):
    refusal.check()


@each(MODELS)
def test_models_are_refused(refusal):
    refusal.check()


@each(PIPELINES | {f"call: {name}": row for name, row in CALLS.items()})
def test_pipelines_are_refused(refusal):
    refusal.check()


@each(STAGES)
def test_stages_are_refused(refusal):
    refusal.check()
