"""What steps, loops, pipelines and batches refuse, and which argument they name."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

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
sgd, adam = optax.sgd(0.1), optax.adam(0.1)
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


def wrong(call, *pairs, **others):
    """A row for each wrong argument, (name, value)."""
    return {
        f"{name}={value!r}": Refusal(
            functools.partial(call, **{**others, name: value}), f"`{name}`", value
        )
        for name, value in pairs
    }


def of_another(optimizer=sgd, mesh=TWO, **options):
    """Use a state of a step with another mesh, optimizer or algorithm."""
    state = made(optimizer, mesh=mesh, **(options or whole)).init(PARAMS)
    made(**whole)(state, BATCHES[0])


OF_STEPS = {
    **wrong(
        made, ("mode", "eager"), ("model_state", "mean"), ("host_batch", "whole"),
        ("accumulate", 0), ("sync", sgd), ("optimizer", optax.adam), ("gradients", "mean"),
        ("policy", "float16"), ("mesh", {"replica": 2}),
    ),
    "no loss": Refusal(lambda: stepped(fn=lambda params, batch: None, **whole), "`loss_fn`", None),
    "other replicas": Refusal(
        lambda: of_another(mesh=js.virtual_mesh({"replica": 4})), "`state`", "(4,)"
    ),
    "another optimizer": Refusal(lambda: of_another(adam), "`optimizer`", "0/count"),
    "another algorithm": Refusal(lambda: of_another(sync=js.diloco("replica")), "same `sync`"),
    **{
        f"nothing that exchanges, {name}": Refusal(
            functools.partial(made, tx, **more), "pass gradients=", 'or such, or sync="none"'
        )
        for name, tx, more in (
            ("in an optax chain", optax.chain(optax.clip(1.0), adam), {}),
            ("inside alone", js.chain(js.all_reduce_gradients("device"), adam), {"mesh": INNER}),
        )
    },
    "axis of sync": Refusal(lambda: made(sync=js.local_sgd("replcia")), "`sync`", "replcia"),
    "inner axis": Refusal(
        lambda: made(sync=js.only_finite(js.diloco("replica", local_axis_name="host"))), "host"
    ),
    "axis of gradients": Refusal(
        lambda: made(gradients=js.gradient_transform(sgd, axes="node")), "`gradients`", "node"
    ),
    "loss of a dtype": Refusal(
        lambda: stepped(fn=lambda p, b: jnp.sum(b > 0), **none), "`loss_fn`", "int32"
    ),
    "loss of a shape": Refusal(lambda: stepped(fn=lambda p, b: p["b"], **none), "loss", "(3,)"),
    "no model state": Refusal(
        lambda: (s := made(**none))(s.init(PARAMS, model_state=np.zeros(2)), BATCHES[0]),
        "`model_state`",
    ),
    "option of a GPU": Refusal(
        lambda: made(compiler_options={"xla_gpu_enable_latency_hiding_scheduler": True}, **none),
        "GPUs",
    ),
    **{
        f"leaf of {x.dtype}": Refusal(
            functools.partial(started, params={"x": x}, **none), "x (", x.dtype
        )
        for x in (np.int32([1]), jax.random.key(0))
    },
}  # fmt: skip
by_hand = own_average(by_gather=True)  # a collective of which nothing is known
OF_CHAINS = {
    **{
        f"hidden {name}": Refusal(call, "js.chain")
        for name, call in {
            "sync": lambda: started(optax.chain(sgd, optax.masked(local, ALL)), mode="host"),
            "scale": lambda: started(optax.chain(mean, optax.add_decayed_weights(0.1), scale(sgd))),
            "model state": lambda: started(
                optax.chain(sgd, local), fn=stateful, model_state=np.zeros(1)
            ),
        }.items()
    },
    # What the optimizer raises, with a note.
    "hidden value": Refusal(
        lambda: stepped(optax.chain(mean, optax.polyak_sgd())), "js.chain", "'value'", TypeError
    ),
    **{
        f"by hand {i}": Refusal(functools.partial(started, **options), "axes=('replica',)")
        for i, options in enumerate([
            {"gradients": by_hand, "mesh": js.make_mesh({"replica": 2})},
            {"optimizer": optax.masked(by_hand, ALL), **none},
            {"optimizer": scale(own_average()), "sync": local},
        ])
    },
    **{
        f"apart {i}": Refusal(functools.partial(started, **options), "the 2 replicas", "'replica'")
        for i, options in enumerate([
            {"mode": "host"},
            {"gradients": clip},
            {"mesh": INNER, "gradients": js.all_reduce_gradients("device")},
        ])
    },
    "left apart on devices": Refusal(
        lambda: started(mesh=INNER, sync=two_levels, **whole),
        "w (",
        "all_reduce_gradients(('replica', 'device'))",
    ),
    "MultiSteps": Refusal(lambda: started(gradients=optax.MultiSteps(mean, 2)), "MultiSteps"),
    "gradients twice": Refusal(lambda: made(js.chain(mean, sgd), **whole), "`gradients`"),
    "sync twice": Refusal(lambda: made(js.chain(sgd, local), sync=local), "`sync`"),
    "search": Refusal(
        lambda: stepped(optax.lbfgs(), mesh=INNER, sync=two_levels), "`value_fn`", "('device',)"
    ),
    "collected": Refusal(
        lambda: started(js.gradients.accumulate(optax.chain(mean, sgd), 2), sync=local),
        "js.gradients.accumulate",
        "accumulate=k",
    ),
}  # fmt: skip


def with_tables(optimizer=sgd, mesh=ONE, **options):
    """The state of a step on one replica, where an average over replicas is wrong, too."""
    return step_of(
        1, mesh=mesh, embeddings=embeddings(axis=None), optimizer=optimizer, **options
    ).init(DENSE)


OF_TABLES = {
    **{
        name: Refusal(functools.partial(with_tables, tx, **none), "must not hold", said)
        for name, said, tx in (
            ("average", "exchanges", optax.chain(mean, sgd)),
            ("sync", "exchanges", js.chain(sgd, optax.chain(js.only_finite(local)))),
            ("clip", "js.clip_by_global_norm", optax.chain(js.clip_by_global_norm(1.0), sgd)),
            ("several", "optax.MultiSteps", optax.MultiSteps(sgd, 2).gradient_transformation()),
            ("sam", "optax.contrib.sam", optax.contrib.sam(sgd, sgd)),
        )
    },
    "axis of tables": Refusal(lambda: step_of(1, mesh=TWO, sync=local), "`mesh`"),
}


def loop(*args, hooks=(), **options):
    step = make_step()
    return next(js.train_loop(step, begin(step), SMALL, *args, hooks=hooks, **options))


def pipeline(step=None, state=None, batches=SMALL, **options):
    state = begin(make_step()) if state is None else state
    return js.TrainPipeline(make_step() if step is None else step, state, batches, **options)


def ahead(**options):
    step = step_of(1, **none)
    return pipeline(step, step.init(DENSE), batches(1), **options)


OF_LOOPS = {
    **wrong(loop, ("num_steps", -1), ("accumulate", 0), ("partial", "drop")),
    **wrong(
        pipeline, ("depth", -1), ("timeout", 0), ("stages", len), ("mode", "patched"),
    ),
    "a hook that reports a number": Refusal(
        lambda: list(loop(hooks=[js.train.Evaluate(lambda *_: 0.5, mesh=TWO, every=1)])),
        "`hooks`", 0.5,
    ),
    "a pipeline, and more": Refusal(lambda: js.train_loop(pipeline(), prefetch=2), "`prefetch`"),
    "a function as hook": Refusal(lambda: loop(hooks=[print]), "`hooks`", "print"),
    "no batches": Refusal(lambda: js.train_loop(make_step(), None), "`batches`"),
    "timeout without thread": Refusal(lambda: pipeline(timeout=1.0, depth=0), "`depth`", 0),
    "a function's updates": Refusal(
        lambda: pipeline(step=lambda s, b: (s, {}), accumulate=2), "js.make_train_step"
    ),
    "no state": Refusal(lambda: next(pipeline(state={"w": 1.0})), "`state`", "dict"),
    **wrong(ahead, ("mode", "late"), ("num_exact", 2)),
    "no room": Refusal(lambda: ahead(mode="patched", room=0.0), "`room`", 0.0),
}  # fmt: skip
INJECTED = optax.inject_hyperparams(optax.sgd)
RATED = INJECTED(learning_rate=1.0)


def set_rate(optimizer=RATED, **values):
    state = started(optimizer, **none)
    return js.set_hyperparams(state, **values or {"learning_rate": 1.0})


OF_RATES = {
    **wrong(set_rate, ("learning_rate", "0.1")),
    "no hyperparameters": Refusal(lambda: set_rate(sgd), "`learning_rate`", "found in 0"),
    "another name": Refusal(lambda: set_rate(lr=1.0), "`lr`", "learning_rate"),
    "two owners": Refusal(
        lambda: set_rate(optax.partition({"a": RATED, "b": RATED}, {"w": "a", "b": "b"})), "in 2"
    ),
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
    "run out": Refusal(
        lambda: uneven((2, 3), None, on_exhausted="raise"), "`on_exhausted`", "[1]", RuntimeError
    ),
    **{
        f"batch {x.shape}": Refusal(functools.partial(placed, {"x": x}), "`batch`", f"x {x.shape}")
        for x in (np.ones((5, 8)), np.ones((0, 8)))
    },
    "no examples": Refusal(lambda: placed({"x": np.ones((1, 8)), "y": 1}), "`batch`", "x (1, 8)"),
    "microbatches": Refusal(
        lambda: stepped(batch=np.ones((8, 8)), accumulate=3, **none), "`accumulate`", 3
    ),
    **{
        f"weight {x}": Refusal(functools.partial(placed, weight=x), "`weight`", value)
        for x, value in [(np.ones(3), "(3,)"), ([1, -1], -1.0), ([np.inf, 1], "inf"), ("one", "")]
    },
}


def refused_window(params=PARAMS, is_another=False, calls=False):
    """Use a window of one batch."""
    step = made(optax.lbfgs(), **none)
    window, _ = step.collect(step.init(PARAMS), BATCHES[0])
    step = made(optax.lbfgs(), **none) if is_another else step
    state = step.init(params)
    return step(state, BATCHES[0], window=window) if calls else step.apply(state, window)


OTHER = {name: np.zeros(5, np.float32) for name in PARAMS}
OF_WINDOWS = {
    "of another step": Refusal(lambda: refused_window(is_another=True), "`step.collect`"),
    "of other parameters": Refusal(
        lambda: refused_window(OTHER, calls=True), "`window`", "leaf 'b'"
    ),
    "searched": Refusal(refused_window, "`value_fn`", "gone"),
}
KINDS = (OF_STEPS, OF_CHAINS, OF_TABLES, OF_LOOPS, OF_RATES, OF_BATCHES, OF_WINDOWS)


@pytest.mark.filterwarnings("ignore:`optimizer` holds optax.contrib.sam")
@each({f"{i}: {name}": row for i, rows in enumerate(KINDS) for name, row in rows.items()})
def test_refused(refusal):
    refusal.check()
