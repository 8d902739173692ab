"""Tests that dense leaves and rows of tables train alike, or that the step is refused."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from optax.experimental import aggregating

import jaxslowmo as js
from support.exhaustive import sweep

ROWS, DIM, RATE, UPDATES = 12, 2, 0.5, 3
VIRTUAL = js.virtual_mesh({"replica": 2})
TABLE = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)
DENSE = {"w": np.float32([1.0, -0.5])}
# A replica with more examples, one that is idle, two that are alike; and each in another window.
WEIGHTS = {"none": [None] * 6, "uneven": [[3, 1], [0, 2], [0, 1], [0, 3], [1, 1], [2, 0]]}


def random_batches(count):
    """Return batches in which a replica looks up each of its rows once, and some rows both do."""
    rng = np.random.default_rng(1)
    halves = lambda: np.concatenate([rng.permutation(ROWS)[:4] for _ in range(2)])  # noqa: E731
    ys = rng.normal(size=(count, 8)).astype(np.float32)
    return [{"word": halves().astype(np.int32), "y": y} for y in ys]


BATCHES = random_batches(2 * UPDATES)


def with_nan_where_idle(batch, weight):
    """Return a batch in which the examples of a replica of weight 0 are NaN."""
    if weight is None:
        return batch
    return {**batch, "y": np.where(np.repeat(weight, 4) > 0, batch["y"], np.nan)}


def loss(params, batch, *, embedded):
    return jnp.mean((embedded["word"] @ params["w"] - batch["y"].astype(params["w"].dtype)) ** 2)


WORDS = js.embeddings({"word": js.Table(ROWS, DIM)}, axis_name=None, optimizer=js.rowwise_sgd(RATE))


def with_table(optimizer=None, mesh=VIRTUAL, **options):
    optimizer = optax.sgd(RATE) if optimizer is None else optimizer
    return js.make_train_step(loss, optimizer, mesh=mesh, embeddings=WORDS, **options)


def with_leaf(optimizer, **options):
    def dense_loss(params, batch):
        return loss(params, batch, embedded={"word": params["word"][batch["word"]]})

    return js.make_train_step(dense_loss, optimizer, mesh=VIRTUAL, **options)


def average(**options):
    return js.all_reduce_gradients("replica", **options)


def averaging_early(**options):
    """Return options that average gradients in the first two updates, and then parameters."""
    late = js.every(1, start=2)
    return {
        "gradients": js.post_local_gradients(late, average(**options)),
        "sync": js.local_sgd("replica", sync_every=late),
    }


WHO = {
    "initial": lambda: {"gradients": average(divide_by="initial")},
    "active": lambda: {"gradients": average(divide_by="active")},
    "hook": lambda: {"gradients": average(divide_by="active", hook=js.hooks.mean())},
    "clipped": lambda: {"gradients": js.chain(average(), js.clip_by_global_norm(0.3))},
    "clipped apart": lambda: {"gradients": js.clip_by_global_norm(0.3), "sync": local_average},
    "clipped early": lambda: {
        **averaging_early(),
        "gradients": js.chain(averaging_early()["gradients"], js.clip_by_global_norm(0.3)),
    },
    "two divisors": lambda: {
        "gradients": js.post_local_gradients(
            js.every(1, start=1), average(divide_by="active"), average()
        )
    },
    "early initial": lambda: averaging_early(divide_by="initial"),
    "early active": lambda: averaging_early(divide_by="active"),
    "both": lambda: {
        "gradients": average(divide_by="active"),
        "sync": js.local_sgd("replica", sync_every=2),
    },
    "local_sgd": lambda: {"sync": js.local_sgd("replica", sync_every=2)},
    "delayed": lambda: {"sync": js.local_sgd("replica", sync_every=2, delay=1, merge=0.5)},
    "delayed on the host": lambda: {**WHO["delayed"](), "mode": "host"},
    "apart": lambda: {"sync": "none"},
}
SCALED = {"policy": js.Policy("float16")}
SCALES = {"none": {}, "before": SCALED, "after": {**SCALED, "validate": "after"}}
UPDATE = {"single": {}, "window": {}, "microbatches": {"accumulate": 2}}
USUAL = {
    ("active", "uneven", "single", "after"),
    ("clipped", "uneven", "single", "after"),
    ("clipped apart", "none", "window", "none"),
    ("clipped early", "uneven", "single", "before"),
    ("two divisors", "uneven", "single", "none"),
    ("early active", "uneven", "window", "none"),
    ("hook", "uneven", "microbatches", "none"),
    ("both", "uneven", "window", "before"),
    ("local_sgd", "none", "microbatches", "none"),
    ("delayed", "none", "single", "none"),
    ("delayed", "uneven", "window", "none"),
    ("delayed on the host", "uneven", "single", "after"),
}


@pytest.mark.parametrize(
    ("who", "weights", "made_of", "scale"),
    sweep(itertools.product(WHO, WEIGHTS, UPDATE, SCALES), lambda *case: case in USUAL),
)
def test_a_leaf_and_a_table_train_alike(who, weights, made_of, scale):
    """All rows, the other leaf, the loss and skipped updates are compared after every update."""
    options = {**WHO[who](), **UPDATE[made_of], **SCALES[scale]}
    optimizer = optax.sgd(RATE)
    if scale != "none":
        optimizer = js.dynamic_loss_scale(optimizer, initial=64.0)
    steps = with_table(optimizer, **options), with_leaf(optimizer, **options)
    tables = {"word": TABLE}
    stored = js.WithTables(DENSE, steps[0].embeddings.write(tables))
    states = [steps[0].init(stored), steps[1].init({**DENSE, **tables})]
    shares = [w if w is None else np.float32(w) for w in WEIGHTS[weights]]
    batches = list(map(with_nan_where_idle, BATCHES, shares))
    for first in range(0, len(BATCHES), 2):
        results = []
        for step, state in zip(steps, states, strict=True):
            window, last = None, first
            if made_of == "window":
                window, _ = step.collect(state, batches[first], shares[first])
                last = first + 1
            results.append(step(state, batches[last], shares[last], window=window))
        states = [state for state, _ in results]
        (table, metrics), (leaf, expected) = results
        # In float16 the other leaf's gradient is a sum that the two programs round differently.
        atol = 2e-6 if scale == "none" else 2e-3
        read = np.stack(
            [steps[0].embeddings.read(tables_of_replica(table, i))["word"] for i in range(2)]
        )
        np.testing.assert_allclose(read, leaf.params["word"], atol=atol)
        np.testing.assert_allclose(table.params.dense["w"], leaf.params["w"], atol=atol)
        for name, metric in expected.items():
            np.testing.assert_allclose(metrics[name], metric, atol=atol, err_msg=name)
    assert not np.allclose(read, TABLE, atol=0.02)


def tables_of_replica(state, i):
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[i]), state.params.tables)


def averaging_transform(reduce):
    """Return a transform that averages gradients by `reduce`, as a user might write it."""

    def update(updates, state, params=None):
        return reduce(updates, "replica"), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def averaging_transform_with_branch(reduce):
    """Return one with a branch of constants, which devices refuse when it is first traced."""

    def update(updates, state, params=None):
        halved = lambda g: jax.tree.map(lambda x: jnp.full(x.shape, 0.5), g)  # noqa: E731
        chosen = jax.lax.cond(state.count < 2, lambda g: g, halved, updates)
        return reduce(chosen, "replica"), optax.ScaleByScheduleState(state.count + 1)

    def init(params):
        return optax.ScaleByScheduleState(jnp.zeros([], jnp.int32))

    return optax.GradientTransformation(init, update)


sgd, local_average = optax.sgd(RATE), js.local_sgd("replica")
AVERAGING = {
    "all_reduce": lambda: optax.chain(average(), sgd),
    "all three": lambda: optax.chain(average(), sgd, local_average),
    "in a chain of ours": lambda: js.chain(sgd, optax.chain(average(), sgd)),
    "in optax's chain": lambda: optax.chain(sgd, local_average),
    "only finite": lambda: optax.chain(sgd, js.only_finite(local_average)),
    "post local": lambda: optax.chain(averaging_early()["gradients"], sgd),
    "rows of its own": lambda: optax.chain(js.all_reduce_rows("replica", dense=average()), sgd),
    "unused": lambda: js.skip_unused(optax.chain(average(), sgd), "replica"),
    "scaled": lambda: js.dynamic_loss_scale(optax.chain(average(), sgd)),
    "masked": lambda: optax.masked(optax.chain(average(), sgd), {"w": True}),
    "several steps": lambda: optax.MultiSteps(
        optax.chain(average(), sgd), 2
    ).gradient_transformation(),
    "if finite": lambda: optax.apply_if_finite(optax.chain(sgd, local_average), 3),
}


@pytest.mark.parametrize("name", AVERAGING)
def test_averaging_inside_the_optimizer_is_refused(name):
    """Both `step.init` and a step with a state of `TrainState.create` raise, on one replica too."""
    message = (
        "`optimizer` with `embeddings` holds .*tables drift apart.* as `gradients`.* as `sync`"
    )
    step = with_table(AVERAGING[name](), mesh=js.virtual_mesh({"replica": 1}), sync="none")
    with pytest.raises(ValueError, match=message):
        step.init(DENSE)
    if name == "all three":
        params = js.WithTables(DENSE, WORDS.write({"word": TABLE}))
        state = js.TrainState.create(params, step.tx, mesh=step.mesh)
        with pytest.raises(ValueError, match=message):
            step(state, BATCHES[0])


def mean_by_all_gather(tree, axis):
    return jax.tree.map(lambda x: jax.lax.all_gather(x, axis).mean(0), tree)


@pytest.mark.parametrize(
    ("kind", "reduce"),
    [(averaging_transform, mean_by_all_gather), (averaging_transform_with_branch, jax.lax.pmean)],
)
def test_collectives_of_your_own_in_the_optimizer_are_refused(kind, reduce):
    """The collectives are found in the traced update."""
    mesh = js.make_mesh({"replica": 2}, jax.devices()[:2])
    step = with_table(optax.chain(kind(reduce), sgd), mesh, gradients=optax.identity())
    with pytest.raises(ValueError, match=r"`optimizer` holds .* collectives over \['replica'\]"):
        step.init(DENSE)


@pytest.mark.parametrize(
    ("name", "optimizer"),
    {
        "js.clip_by_global_norm": optax.chain(js.clip_by_global_norm(1.0), sgd),
        "optax.apply_if_finite": optax.apply_if_finite(sgd, 3),
        "optax.MultiSteps": optax.MultiSteps(sgd, 2).gradient_transformation(),
        "js.accumulate": js.dynamic_loss_scale(js.accumulate(sgd, 2)),
        "optax.apply_every": optax.chain(optax.apply_every(2), sgd),
        "optax.conditionally_mask": optax.conditionally_mask(sgd, lambda step: step % 2 == 0),
        "optax.contrib.sam": optax.contrib.sam(sgd, sgd),
        "optax.experimental.aggregating": aggregating.accumulate_avg_updates(2),
    }.items(),
)
def test_optimizers_that_cannot_treat_rows_are_refused(name, optimizer):
    with pytest.raises(ValueError, match=f"`optimizer` with `embeddings` .*must not hold {name}"):
        with_table(optimizer, sync="none").init(DENSE)


@pytest.mark.parametrize(
    ("name", "gradients"),
    {
        "optax.chain": optax.chain(average(), optax.scale(0.5)),
        "js.chain": js.chain(average(), optax.scale(0.5)),
        "optax.scale": optax.scale(0.5),
        "optax.masked": optax.masked(average(), {"w": True}),
        "js.accumulate": js.accumulate(average(), 2),
        "js.post_local_gradients": js.post_local_gradients(
            js.every(1, start=2), optax.chain(average(), js.clip_by_global_norm(1.0))
        ),
        "js.all_reduce_rows": js.all_reduce_rows("replica", tables=["w"]),
        "js.gradient_transform": js.gradient_transform(averaging_transform(jax.lax.pmean)),
        "optax.trace": average()._replace(update=optax.trace(0.5).update),
        r"\w+\.averaging_transform": averaging_transform(jax.lax.pmean),
    }.items(),
)
def test_gradients_that_rows_cannot_pass_through_are_refused(name, gradients):
    error = rf"`gradients` with `embeddings` must be .*, got {name}\. .* js\.chain, not"
    with pytest.raises(ValueError, match=error):
        with_table(gradients=gradients)


@pytest.mark.parametrize(
    "options",
    [
        {"gradients": optax.identity(), "sync": local_average},
        {"gradients": optax.chain(optax.identity()), "sync": local_average},
        {"gradients": averaging_early()["gradients"], "optimizer": js.skip_unused(sgd, "replica")},
        {
            "gradients": js.post_local_gradients(js.every(1, start=2), average(), optax.identity()),
            "optimizer": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
        },
        {
            "gradients": js.post_local_gradients(
                js.every(1, start=2), average(), average(divide_by="active")
            )
        },
        {"optimizer": js.chain(average(), js.clip_by_global_norm(1.0), sgd, local_average)},
        {
            "optimizer": optax.conditionally_transform(sgd, lambda step: step > 0),
            "sync": local_average,
        },
    ],
)
def test_averaging_that_rows_follow_is_allowed(options):
    step = with_table(**options)
    assert step.traced_by_phase(jax.eval_shape(step.init, DENSE), BATCHES[0])
