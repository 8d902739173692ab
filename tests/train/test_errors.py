"""What steps, loops, pipelines and batches refuse, and which argument they name."""

import functools

import jax
import numpy as np
import optax
from jax import lax

import jaxslowmo as js
from support.refusals import Refusal, each
from train.small_loop import BATCHES as SMALL
from train.small_loop import make_step
from train.small_loop import start as begin
from train.step.problem import BATCHES, PARAMS, loss
from train.step.tables import DENSE, embeddings, step_of

ONE, TWO, INNER = (
    js.virtual_mesh(axes) for axes in ({"replica": 1}, {"replica": 2}, {"replica": 2, "device": 2})
)
sgd, adam = optax.sgd(0.1), optax.adam(0.1)
mean, local = js.all_reduce_gradients("replica"), js.local_sgd("replica")
whole, none = {"gradients": mean}, {"sync": "none"}
two_levels = js.local_sgd("replica", local_axis_name="device")


def made(optimizer=sgd, fn=loss, mesh=TWO, **options):
    return js.make_train_step(fn, optimizer, mesh=mesh, **options)


def started(optimizer=sgd, params=PARAMS, **options):
    return made(optimizer, **options).init(params)


def stepped(optimizer=sgd, batch=BATCHES[0], weight=None, **options):
    step = made(optimizer, **options)
    return step(step.init(PARAMS), batch, weight)


def row(call, *args, says=(), error=ValueError, **options):
    """A row for `call(*args, **options)`; `says` are the argument and its value."""
    return Refusal(functools.partial(call, *args, **options), *says, error=error)


def wrong(call, **options):
    """A row for each wrong argument."""
    return {
        f"{name}={value!r}": row(call, **{name: value}, says=(f"`{name}`", value))
        for name, value in options.items()
    }


def of_another(optimizer=sgd, mesh=TWO, **options):
    """Use a state of a step with another mesh, optimizer or algorithm."""
    state = made(optimizer, mesh=mesh, **(options or whole)).init(PARAMS)
    made(**whole)(state, BATCHES[0])


on_gpus = {"xla_gpu_enable_latency_hiding_scheduler": True}
OF_STEPS = {
    **wrong(made, mode="eager", accumulate=0, sync=sgd, optimizer=optax.adam, mesh={"replica": 2}),
    "no loss": row(stepped, fn=lambda params, batch: None, **whole, says=("`loss_fn`", None)),
    "a vector": row(stepped, fn=lambda p, b: p["b"], **none, says=("loss", "(3,)")),
    "replicas": row(of_another, mesh=js.virtual_mesh({"replica": 4}), says=("`state`", "(4,)")),
    "another optimizer": row(of_another, adam, says=("`optimizer`", "0/count")),
    "another algorithm": row(of_another, sync=js.diloco("replica"), says=("same `sync`",)),
    "no exchange": row(made, says=("pass gradients=", 'or such, or sync="none"')),
    "axis": row(made, sync=js.local_sgd("replcia"), says=("`sync`", "replcia")),
    "option of a GPU": row(made, compiler_options=on_gpus, **none, says=("GPUs",)),
    "an int32 leaf": row(started, params={"x": np.int32([1])}, **none, says=("x (", "int32")),
    "a key": row(started, params={"x": jax.random.key(0)}, **none, says=("x (", "key<fry>")),
}


def by_hand(updates, state, params=None):
    """Averages gradients, as a user might write it, by a collective of which nothing is known."""
    gathered = lambda x: lax.all_gather(x, "replica").mean(0)  # noqa: E731
    return jax.tree.map(gathered, updates), state


own_average = optax.GradientTransformation(optax.init_empty_state, by_hand)
masked = functools.partial(optax.masked, mask={"b": True, "w": True})
OF_CHAINS = {
    "hidden sync": row(
        started, optax.chain(sgd, masked(local)), mode="host", says=("js.chain",)
    ),
    "hidden value": row(  # what the optimizer raises, with a note
        stepped, optax.chain(mean, optax.polyak_sgd()), says=("js.chain", "'value'"),
        error=TypeError,
    ),
    "by hand": row(
        started, gradients=own_average, mesh=js.make_mesh({"replica": 2}),
        says=("axes=('replica',)",),
    ),
    "apart": row(
        started, gradients=js.clip_by_global_norm(2.0), says=("the 2 replicas", "'replica'")
    ),
    "left apart on devices": row(
        started, mesh=INNER, sync=two_levels, **whole,
        says=("w (", "all_reduce_gradients(('replica', 'device'))"),
    ),
    "MultiSteps": row(started, gradients=optax.MultiSteps(mean, 2), says=("MultiSteps",)),
    "gradients twice": row(made, js.chain(mean, sgd), **whole, says=("`gradients`",)),
    "search": row(
        stepped, optax.lbfgs(), mesh=INNER, sync=two_levels, says=("`value_fn`", "('device',)")
    ),
    "collected": row(
        started, js.gradients.accumulate(optax.chain(mean, sgd), 2), sync=local,
        says=("js.gradients.accumulate", "accumulate=k"),
    ),
}  # fmt: skip


def with_tables(optimizer):
    """The state of a step on one replica, where an average over replicas is wrong, too."""
    tables = {"mesh": ONE, "embeddings": embeddings(axis=None)}
    return step_of(1, optimizer=optimizer, **tables, **none).init(DENSE)


several = optax.MultiSteps(sgd, 2).gradient_transformation()
OF_TABLES = {
    "average": row(with_tables, optax.chain(mean, sgd), says=("must not hold", "exchanges")),
    "several": row(with_tables, several, says=("must not hold", "optax.MultiSteps")),
    "axis of tables": row(step_of, 1, mesh=TWO, sync=local, says=("`mesh`",)),
}


def loop(**options):
    step = make_step()
    return next(js.train_loop(step, begin(step), SMALL, **options))


def pipeline(step=None, state=None, **options):
    step = make_step() if step is None else step
    state = begin(make_step()) if state is None else state
    return next(js.TrainPipeline(step, state, SMALL, **options))


of_function = row(pipeline, lambda s, b: (s, {}), accumulate=2, says=("js.make_train_step",))
OF_LOOPS = {
    **wrong(loop, num_steps=-1, partial="drop"),
    **wrong(pipeline, depth=-1, mode="patched"),
    "a function as hook": row(loop, hooks=[print], says=("`hooks`", "print")),
    "a function's updates": of_function,
    "no state": row(pipeline, state={"w": 1.0}, says=("`state`", "dict")),
}
RATED = optax.inject_hyperparams(optax.sgd)(learning_rate=1.0)
two_owners = optax.partition({"a": RATED, "b": RATED}, {"w": "a", "b": "b"})


def set_rate(optimizer=RATED, **values):
    return js.set_hyperparams(started(optimizer, **none), **values or {"learning_rate": 1.0})


OF_RATES = {
    **wrong(set_rate, learning_rate="0.1"),
    "no hyperparameters": row(set_rate, sgd, says=("`learning_rate`", "found in 0")),
    "another name": row(set_rate, lr=1.0, says=("`lr`", "learning_rate")),
    "two owners": row(set_rate, two_owners, says=("in 2",)),
}


def uneven(*shapes, **options):
    """Shares of one batch each; an empty one of the shape None."""
    shares = [[] if s is None else [np.zeros(s, np.float32)] for s in shapes]
    return next(js.train.uneven_batches(shares, mesh=TWO, **options))


run_out = {"on_exhausted": "raise", "error": RuntimeError}
OF_BATCHES = {
    "too few shares": row(uneven, (2, 3), says=("`shares`", "got 1")),
    "another shape": row(uneven, (2, 3), (1, 3), says=("`shares`", "(1, 3)")),
    "run out": row(uneven, (2, 3), None, **run_out, says=("`on_exhausted`", "[1]")),
    "five": row(stepped, batch={"x": np.ones((5, 8))}, **none, says=("`batch`", "x (5, 8)")),
    "microbatches": row(
        stepped, batch=np.ones((8, 8)), accumulate=3, **none, says=("`accumulate`", 3)
    ),
    "three weights": row(stepped, weight=np.ones(3), **none, says=("`weight`", "(3,)")),
    "a negative weight": row(stepped, weight=[1, -1], **none, says=("`weight`", -1.0)),
}


def window_of(optimizer=sgd, params=PARAMS, is_another=False):
    """Use a window of one batch, in another step or for other parameters."""
    step = made(optimizer, **none)
    window, _ = step.collect(step.init(PARAMS), BATCHES[0])
    if is_another:
        step = made(optimizer, **none)
        step.apply(step.init(params), window)
    step(step.init(params), BATCHES[0], window=window)


others = {name: np.zeros(5, np.float32) for name in PARAMS}
OF_WINDOWS = {
    "of another step": row(window_of, is_another=True, says=("`step.collect`",)),
    "of other parameters": row(window_of, params=others, says=("`window`", "leaf 'b'")),
    "searched": row(window_of, optax.lbfgs(), says=("`value_fn`", "gone")),
}
KINDS = (OF_STEPS, OF_CHAINS, OF_TABLES, OF_LOOPS, OF_RATES, OF_BATCHES, OF_WINDOWS)


@each({f"{i}: {name}": row for i, rows in enumerate(KINDS) for name, row in rows.items()})
def test_refused(refusal):
    refusal.check()
