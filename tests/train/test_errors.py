"""What steps, loops, pipelines and batches refuse, and which argument they name."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from optax.experimental import aggregating

import jaxslowmo as js
from support.refusals import Refusal, each
from train.small_loop import BATCHES as SMALL
from train.small_loop import make_step
from train.small_loop import start as begin
from train.step.problem import BATCHES, PARAMS, loss
from train.step.tables import DENSE, batches, embeddings, step_of

ONE, TWO, INNER = (
    js.virtual_mesh(axes) for axes in ({"replica": 1}, {"replica": 2}, {"replica": 2, "device": 2})
)
ALL = {"b": True, "w": True}
FOUR = js.virtual_mesh({"replica": 4})
sgd_with_momentum = optax.sgd(0.1, momentum=0.9)
sgd, adam, identity = optax.sgd(0.1), optax.adam(0.1), optax.identity()
mean, local = js.all_reduce_gradients("replica"), js.local_sgd("replica")
clip, scale = js.clip_by_global_norm(2.0), js.dynamic_loss_scale
whole, none = {"gradients": mean}, {"sync": "none"}
two_levels = js.local_sgd("replica", local_axis_name="device")


def made(optimizer=sgd, fn=loss, mesh=TWO, **options):
    return js.make_train_step(fn, optimizer, mesh=mesh, **options)


def started(optimizer=sgd, params=PARAMS, model_state=None, **options):
    return made(optimizer, **options).init(params, model_state=model_state)


def stepped(optimizer=sgd, batch=BATCHES[0], weight=None, **options):
    step = made(optimizer, **options)
    return step(step.init(PARAMS), batch, weight)


def own_average(by_gather=False):
    """A transform that averages gradients, as a user might write it."""

    def update(updates, state, params=None):
        if by_gather:
            gathered = lambda x: lax.all_gather(x, "replica").mean(0)  # noqa: E731
            return jax.tree.map(gathered, updates), state
        return lax.pmean(updates, "replica"), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def stateful(params, batch, *, model_state):
    return loss(params, batch), ({}, model_state)


def from_elsewhere(use):
    """Use a state that the step has not made, and of which it knows nothing yet."""
    state = made(sync="none").init(PARAMS)
    return getattr(made(), use)(state, BATCHES[0])


def of_another(use="__call__", optimizer=sgd, has=sgd, mesh=TWO, **options):
    """Use a state of a step with another mesh or optimizer."""
    state = made(optimizer, mesh=mesh, **options).init(PARAMS)
    getattr(made(has, **options), use)(state, BATCHES[0])


def started_again():
    """Make a second state, of which other things are wrong than of the first."""
    step = made(optax.chain(sgd, local), stateful)
    step.init(PARAMS)
    return step.init(PARAMS, model_state=np.zeros(1, np.float32))


def compiled_of_shapes():
    step = made(sync=local, mode="host")
    return step.compiled(jax.eval_shape(lambda: step.init(PARAMS)), BATCHES[0])


def wrong(call, *pairs, **others):
    """A row for each wrong argument, (name, value)."""
    return {
        f"{name}={value!r}": Refusal(
            functools.partial(call, **{**others, name: value}), f"`{name}`", value
        )
        for name, value in pairs
    }


OF_STEPS = {
    **wrong(
        made, ("mode", "eager"), ("model_state", "mean"), ("host_batch", "whole"),
        ("accumulate", 0), ("accumulate", True),
        ("sync", sgd), ("sync", "all"), ("optimizer", None), ("optimizer", optax.adam),
        ("gradients", "mean"), ("policy", "float16"), ("mesh", None), ("mesh", {"replica": 2}),
    ),
    "a policy of no dtype": Refusal(lambda: js.gradients.Policy("float8"), "`compute`", "float8"),
    "no loss": Refusal(lambda: stepped(fn=lambda params, batch: None, **whole), "`loss_fn`", None),
    "a weight in words": Refusal(lambda: stepped(weight="one", **whole), "`weight`", "one"),
    **{
        f"a state of {name}": Refusal(functools.partial(of_another, **options), *said)
        for name, options, said in (
            ("other replicas", {"mesh": FOUR, **whole}, ("`state`", "(4,)")),
            ("other replicas, without a step", {"mesh": FOUR, "use": "evaluate", **whole},
             ("`state`", "(4,)")),
            ("a larger optimizer", {"optimizer": adam, **whole}, ("`optimizer`", "0/count")),
            ("a smaller optimizer", {"optimizer": identity, "has": sgd_with_momentum, **whole},
             ("`optimizer`", "0/trace/b")),
        )
    },
    **{
        f"nothing that exchanges, {name}": Refusal(
            functools.partial(made, tx, **more), "pass gradients=", 'or such, or sync="none"'
        )
        for name, tx, more in (
            ("plain", sgd, {}),
            ("in an optax chain", optax.chain(optax.clip(1.0), adam), {"mesh": FOUR}),
            ("in a js.chain", js.chain(clip, sgd_with_momentum), {"mode": "host"}),
            ("inside alone", js.chain(js.all_reduce_gradients("device"), adam), {"mesh": INNER}),
        )
    },
    "a mask, of which the state knows": Refusal(
        lambda: started(optax.masked(sgd, ALL)), "pass gradients=", 'or such, or sync="none"'
    ),
    "sync as gradients": Refusal(lambda: made(gradients=local), "`gradients`", "`sync`"),
    "a loss": Refusal(lambda: made(fn=3), "`loss_fn`", "int"),
    "none, and broadcast": Refusal(lambda: made(**none, model_state="broadcast"), "`model_state`"),
    "embeddings": Refusal(lambda: made(embeddings={}), "`embeddings`", "dict"),
    "axis of sync": Refusal(lambda: made(sync=js.local_sgd("replcia")), "`sync`", "replcia"),
    "inner axis": Refusal(
        lambda: made(sync=js.only_finite(js.diloco("replica", local_axis_name="host"))), "host"
    ),
    "no replicas": Refusal(lambda: made(mesh=INNER, sync=js.local_sgd("device")), "`axis_name`"),
    "axis of gradients": Refusal(
        lambda: made(gradients=js.gradient_transform(sgd, axes="node")), "`gradients`", "node"
    ),
    "axis of optimizer": Refusal(lambda: made(js.all_reduce_gradients("node")), "`optimizer`"),
    "no state": Refusal(lambda: made(**none)(PARAMS, BATCHES[0]), "`state`", "dict"),
    "no state to order": Refusal(
        lambda: made(**none).ready_order(PARAMS, BATCHES[0]), "`state`", "dict"
    ),
    "a counter without value": Refusal(compiled_of_shapes, "`state`", 'mode="traced"'),
    "loss of a dtype": Refusal(
        lambda: stepped(fn=lambda p, b: jnp.sum(b > 0), **none), "`loss_fn`", "int32"
    ),
    "loss of a shape": Refusal(lambda: stepped(fn=lambda p, b: p["b"], **none), "loss", "(3,)"),
    "no model state": Refusal(
        lambda: (s := made(**none))(s.init(PARAMS, model_state=np.zeros(2)), BATCHES[0]),
        "`model_state`",
    ),
    "bounded": Refusal(lambda: js.bounded(3), "`step`", "int"),
    **{
        f"leaf of {x.dtype}": Refusal(
            functools.partial(started, params={"x": x}, **none), "x (", x.dtype
        )
        for x in (np.int32([1]), np.ones(3, np.complex64), np.array(True), jax.random.key(0))
    },
}  # fmt: skip
OF_OPTIONS = {
    f"{options}": Refusal(functools.partial(made, compiler_options=options, **none), value)
    for options, value in [
        ({"xla_gpu_enable_latency_hiding_scheduler": True}, "GPUs"),
        ({"xla_jf_crs_combiner_threshold_count": 1}, "TPUs"),
    ]
}
HIDDEN = {  # behind an optax.chain: the message names js.chain
    "sync": lambda: started(optax.chain(sgd, optax.masked(local, ALL)), mode="host"),
    "scale": lambda: started(optax.chain(mean, optax.add_decayed_weights(0.1), scale(sgd))),
    "model state": lambda: started(optax.chain(sgd, local), fn=stateful, model_state=np.zeros(1)),
    "model state of a second state": started_again,
    "scale of tables": lambda: with_tables(optax.chain(scale(sgd)), **none),
}
BY_HAND = [  # collectives of which nothing is known
    {"gradients": js.chain(optax.clip(9.0), own_average(), mean)},
    {"gradients": own_average(by_gather=True), "mesh": js.make_mesh({"replica": 2})},
    {"optimizer": optax.masked(own_average(by_gather=True), ALL), **none},
    {"optimizer": scale(own_average()), "sync": local},
]
APART = [  # nobody averages over the replicas
    {},
    {"mode": "host"},
    {"gradients": clip},
    {"mesh": INNER, "gradients": js.all_reduce_gradients("device")},
    {"optimizer": js.chain(clip, sgd)},
]
OF_CHAINS = {
    **{f"hidden {name}": Refusal(call, "js.chain") for name, call in HIDDEN.items()},
    # What the optimizer raises, with a note.
    "hidden value": Refusal(
        lambda: stepped(optax.chain(mean, optax.polyak_sgd())), "js.chain", "'value'", TypeError
    ),
    **{
        f"by hand {i}": Refusal(functools.partial(started, **options), "axes=('replica',)")
        for i, options in enumerate(BY_HAND)
    },
    **{
        f"apart {i}": Refusal(functools.partial(started, **options), "the 2 replicas", "'replica'")
        for i, options in enumerate(APART)
    },
    **{
        f"apart, {use}": Refusal(functools.partial(from_elsewhere, use), "the 2 replicas")
        for use in ("__call__", "compiled", "traced_by_phase")
    },
    "apart on two axes": Refusal(
        lambda: started(mesh=INNER, axis_name=("replica", "device")), "('replica', 'device')", 4
    ),
    "left apart on devices": Refusal(
        lambda: started(mesh=INNER, sync=two_levels, **whole),
        "w (",
        "all_reduce_gradients(('replica', 'device'))",
    ),
    "if finite": Refusal(lambda: started(gradients=optax.apply_if_finite(mean, 3)), "if_finite"),
    "MultiSteps": Refusal(lambda: started(gradients=optax.MultiSteps(mean, 2)), "MultiSteps"),
    "sync in gradients": Refusal(
        lambda: started(gradients=optax.chain(mean, optax.masked(local, ALL))), "`sync`"
    ),
    "gradients twice": Refusal(lambda: made(js.chain(mean, sgd), **whole), "`gradients`"),
    "sync twice": Refusal(lambda: made(js.chain(sgd, local), sync=local), "`sync`"),
    "two syncs": Refusal(lambda: made(js.chain(sgd, local, local)), "parameter transforms", 2),
    "scaled gradients": Refusal(lambda: started(gradients=scale(mean)), "`gradients`"),
    "two scales": Refusal(lambda: started(optax.chain(scale(sgd), scale(sgd)), **whole), "got 2"),
    "axis of a scale": Refusal(lambda: stepped(scale(sgd, "fsdp"), **whole), "`axes`", "fsdp"),
    "search": Refusal(lambda: stepped(js.chain(mean, optax.lbfgs())), "`value_fn`", "('replica',)"),
    "search inside": Refusal(
        lambda: stepped(optax.lbfgs(), mesh=INNER, sync=two_levels), "`value_fn`", "('device',)"
    ),
}


def with_tables(optimizer=sgd, mesh=ONE, **options):
    """The state of a step on one replica, where an average over replicas is wrong, too."""
    return step_of(
        1, mesh=mesh, embeddings=embeddings(axis=None), optimizer=optimizer, **options
    ).init(DENSE)


EXCHANGES = "must not hold a transform that exchanges"
OF_TABLES = {
    **{
        name: Refusal(functools.partial(with_tables, tx, **none), EXCHANGES)
        for name, tx in {
            "average": optax.chain(mean, sgd),
            "sync": optax.chain(sgd, js.only_finite(local)),
            "in our chain": js.chain(sgd, optax.chain(mean, sgd)),
            "masked": optax.masked(optax.chain(mean, sgd), {"w": True, "b": True}),
        }.items()
    },
    **{
        name: Refusal(functools.partial(with_tables, tx, **none), "must not hold", name)
        for name, tx in {
            "js.clip_by_global_norm": optax.chain(js.clip_by_global_norm(1.0), sgd),
            "optax.apply_if_finite": optax.apply_if_finite(sgd, 3),
            "optax.MultiSteps": optax.MultiSteps(sgd, 2).gradient_transformation(),
            "optax.apply_every": optax.chain(optax.apply_every(2), sgd),
            "optax.conditionally_mask": optax.conditionally_mask(sgd, lambda step: step % 2 == 0),
            "optax.contrib.sam": optax.contrib.sam(sgd, sgd),
            "optax.experimental.aggregating": aggregating.accumulate_avg_updates(2),
        }.items()
    },
    "collectives of your own": Refusal(
        lambda: with_tables(
            own_average(by_gather=True), js.make_mesh({"replica": 2}), gradients=identity
        ),
        "`optimizer`",
        "replica",
    ),
    **{
        f"rows through {name}": Refusal(
            functools.partial(with_tables, gradients=tx), "`gradients`", name
        )
        for name, tx in {
            "optax.chain": optax.chain(mean, optax.scale(0.5)),
            "js.gradients.accumulate": js.gradients.accumulate(mean, 2),
            "js.gradient_transform": js.gradient_transform(own_average()),
        }.items()
    },
    "axis of tables": Refusal(lambda: step_of(1, mesh=TWO, sync=local), "`mesh`"),
    "tables of another shape": Refusal(
        lambda: with_tables_of({"item": np.zeros((3, 4))}), "`params`", "(3, 4)"
    ),
    "num_batches": Refusal(
        lambda: (s := step_of(1, **none)).collect(s.init(DENSE), batches(1)[0], num_batches=-1),
        "`num_batches`",
        -1,
    ),
}


def with_tables_of(stored):
    return step_of(1, **none).init(js.embedding.WithTables(DENSE, stored))


@functools.cache
def small():
    return make_step()


def loop(*args, hooks=(), **options):
    step = small()
    return next(js.train_loop(step, begin(step), SMALL, *args, hooks=hooks, **options))


def pipeline(step=None, state=None, batches=SMALL, **options):
    step = small() if step is None else step
    return js.TrainPipeline(step, begin(small()) if state is None else state, batches, **options)


OF_LOOPS = {
    **wrong(
        loop, ("num_steps", -1), ("num_steps", 2.5),
        ("accumulate", 0), ("accumulate", 1.5), ("partial", "drop"),
    ),
    "an evaluation that is none": Refusal(lambda: js.train.Evaluate(3, mesh=TWO), "`evaluate`", 3),
    "a hook that reports a number": Refusal(
        lambda: list(loop(hooks=[js.train.Evaluate(lambda *_: 0.5, mesh=TWO, every=1)])),
        "`hooks`", 0.5,
    ),
    **wrong(
        pipeline, ("depth", -1), ("depth", True), ("timeout", 0), ("timeout", "5"),
        ("stages", [1]), ("stages", len), ("accumulate", True),
        ("mode", "patched"),
    ),
    **{
        f"a pipeline, and {name}": Refusal(
            lambda name=name, value=value: js.train_loop(pipeline(), **{name: value}), f"`{name}`"
        )
        for name, value in (("prefetch", 2), ("accumulate", 2), ("partial", "error"))
    },
    "a function as hook": Refusal(lambda: loop(hooks=[print]), "`hooks`", "print"),
    "a log's period": Refusal(lambda: js.train.Log(print, every=0), "`every`", 0),
    "an evaluation's": Refusal(
        lambda: js.train.Evaluate(print, mesh=TWO, every="2"), "`every`", "2"
    ),
    "no batches": Refusal(lambda: js.train_loop(small(), begin(small())), "`batches`"),
    "timeout without thread": Refusal(lambda: pipeline(timeout=1.0, depth=0), "`depth`", 0),
    "no function": Refusal(lambda: pipeline(step=3), "`step`", "int"),
    "a function's updates": Refusal(
        lambda: pipeline(step=lambda s, b: (s, {}), accumulate=2), "js.make_train_step"
    ),
    "an evaluation's updates": Refusal(
        lambda: js.TrainPipeline(small().evaluate, pipeline(), accumulate=2), "`accumulate`", 2
    ),
    "no iterator": Refusal(lambda: next(pipeline(batches=None)), "`iterator`"),
    "no state": Refusal(lambda: next(pipeline(state={"w": 1.0})), "`state`", "dict"),
    **wrong(lambda **o: ahead(**o), ("mode", "late"), ("num_exact", 2)),
    **wrong(lambda **o: ahead(mode="stale", **o), ("num_exact", -1)),
    **wrong(lambda **o: ahead(mode="patched", **o), ("room", 0.0), ("room", "half")),
    "stale without thread": Refusal(lambda: ahead(mode="stale", depth=0), "`depth`"),
}  # fmt: skip
TABLED = functools.cache(lambda: step_of(1, **none))


def ahead(**options):
    return pipeline(TABLED(), TABLED().init(DENSE), batches(1), **options)


INJECTED = optax.inject_hyperparams(optax.sgd)
RATED = INJECTED(learning_rate=1.0)


def set_rate(optimizer=RATED, **values):
    state = started(optimizer, **none)
    return js.set_hyperparams(state, **values or {"learning_rate": 1.0})


OF_RATES = {
    **wrong(set_rate, ("learning_rate", None), ("learning_rate", "0.1")),
    "no hyperparameters": Refusal(lambda: set_rate(sgd), "`learning_rate`", "found in 0"),
    "another name": Refusal(lambda: set_rate(lr=1.0), "`lr`", "learning_rate"),
    "two owners": Refusal(
        lambda: set_rate(optax.partition({"a": RATED, "b": RATED}, {"w": "a", "b": "b"})), "in 2"
    ),
    "a schedule": Refusal(lambda: set_rate(INJECTED(lambda t: 0.1)), "`learning_rate`"),
    "a shape": Refusal(lambda: set_rate(learning_rate=np.ones(3)), "`learning_rate`", "(3,)"),
}


def uneven(*shapes, **options):
    """Shares of one batch each; an empty one of the shape None."""
    shares = [[] if s is None else [np.zeros(s, np.float32)] for s in shapes]
    return next(js.train.uneven_batches(shares, mesh=TWO, **options))


def placed(batch=BATCHES[0], weight=None):
    return stepped(batch=batch, weight=weight, **none)


OF_BATCHES = {
    "too few shares": Refusal(lambda: uneven((2, 3)), "`shares`", "got 1"),
    "another shape": Refusal(lambda: uneven((2, 3), (1, 3)), "`shares`", "(1, 3)"),
    "no batch": Refusal(lambda: uneven(None, None), "`shares`", "[0, 1]"),
    "a number": Refusal(lambda: uneven((), None), "`shares`", "(root)"),
    "on_exhausted": Refusal(lambda: uneven((2, 3), None, on_exhausted="x"), "`on_exhausted`", "x"),
    "run out": Refusal(
        lambda: uneven((2, 3), None, on_exhausted="raise"), "`on_exhausted`", "[1]", RuntimeError
    ),
    **{
        f"batch {x.shape}": Refusal(functools.partial(placed, {"x": x}), "`batch`", f"x {x.shape}")
        for x in (np.ones((5, 8)), np.ones((0, 8)), np.ones(()))
    },
    "lists": Refusal(lambda: placed({"x": [[1.0] * 8] * 4}), "np.asarray", "24 more"),
    "a list beside examples": Refusal(
        lambda: placed({"x": np.ones((4, 8)), "y": [1, 2]}), "np.asarray", "y/0 (), y/1 ()"
    ),
    "no examples": Refusal(lambda: placed({"x": np.ones((1, 8)), "y": 1}), "`batch`", "x (1, 8)"),
    "microbatches": Refusal(
        lambda: stepped(batch=np.ones((8, 8)), accumulate=3, **none), "`accumulate`", 3
    ),
    "evaluated": Refusal(
        lambda: (s := made(**none)).evaluate(s.init(PARAMS), BATCHES[0][:1]), "`batch`", "(1, 8)"
    ),
    **{
        f"weight {x}": Refusal(functools.partial(placed, weight=x), "`weight`", value)
        for x, value in [(np.ones(3), "(3,)"), (2.0, "()"), ([1, -1], -1.0), ([np.inf, 1], "inf")]
    },
}


def refused_window(weight=None, params=PARAMS, use="apply", **options):
    """Use a window of one batch without weights."""
    step = made(optax.lbfgs(), **none)
    window, _ = step.collect(step.init(PARAMS), BATCHES[0])
    state = step.init(params)
    if use == "other":
        return made(optax.lbfgs(), **none).apply(state, window)
    if use == "apply":
        return step.apply(state, options.get("window", window))
    given = {"window": window, **options}
    return getattr(step, use)(state, BATCHES[0], weight, **given)


OTHER = {name: np.zeros(5, np.float32) for name in PARAMS}
OF_WINDOWS = {
    "of another step": Refusal(lambda: refused_window(use="other"), "`step.collect`"),
    "no window": Refusal(lambda: refused_window(window=None), "`window`"),
    "weights of some": Refusal(
        lambda: refused_window(use="collect", weight=np.ones(2)), "`weight`", "none"
    ),
    **{f"{use}, of other parameters": Refusal(
        functools.partial(refused_window, use=use, params=OTHER), "`window`", "leaf 'b'")
       for use in ("apply", "collect", "__call__")},
    "a leaf more": Refusal(
        lambda: refused_window(params={**PARAMS, "z": np.zeros(2, np.float32)}), "`state`", "['z']"
    ),
    "searched": Refusal(refused_window, "`value_fn`", "gone"),
}  # fmt: skip
ALL_ROWS = {
    "steps": OF_STEPS, "options": OF_OPTIONS, "chains": OF_CHAINS, "tables": OF_TABLES,
    "loops": OF_LOOPS, "rates": OF_RATES, "batches": OF_BATCHES,
    "windows": OF_WINDOWS,
}  # fmt: skip
ROWS = {f"{kind}: {name}": row for kind, rows in ALL_ROWS.items() for name, row in rows.items()}


@pytest.mark.filterwarnings("ignore:`optimizer` holds optax.contrib.sam")
@each(ROWS)
def test_refused(refusal):
    refusal.check()
