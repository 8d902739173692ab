"""A dense leaf and a row of a table are treated alike, or the step is refused."""

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


def drawn(count):
    """Return batches in which a replica looks up each of its rows once, and some rows both do."""
    rng = np.random.default_rng(1)
    halves = lambda: np.concatenate([rng.permutation(ROWS)[:4] for _ in range(2)])  # noqa: E731
    ys = rng.normal(size=(count, 8)).astype(np.float32)
    return [{"word": halves().astype(np.int32), "y": y} for y in ys]


BATCHES = drawn(2 * UPDATES)


def poisoned(batch, weight):
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


def early(**options):
    """Gradients are averaged in the first two updates, parameters in those after them."""
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
    "clipped apart": lambda: {"gradients": js.clip_by_global_norm(0.3), "sync": local},
    "clipped early": lambda: {
        **early(),
        "gradients": js.chain(early()["gradients"], js.clip_by_global_norm(0.3)),
    },
    "two divisors": lambda: {
        "gradients": js.post_local_gradients(
            js.every(1, start=1), average(divide_by="active"), average()
        )
    },
    "early initial": lambda: early(divide_by="initial"),
    "early active": lambda: early(divide_by="active"),
    "both": lambda: {
        "gradients": average(divide_by="active"),
        "sync": js.local_sgd("replica", sync_every=2),
    },
    "local_sgd": lambda: {"sync": js.local_sgd("replica", sync_every=2)},
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
}


@pytest.mark.parametrize(
    ("who", "weights", "made_of", "scale"),
    sweep(itertools.product(WHO, WEIGHTS, UPDATE, SCALES), lambda *case: case in USUAL),
)
def test_a_leaf_and_a_table(who, weights, made_of, scale):
    """After every update: all rows, the other leaf, the loss, and what was skipped."""
    options = {**WHO[who](), **UPDATE[made_of], **SCALES[scale]}
    optimizer = optax.sgd(RATE)
    if scale != "none":
        optimizer = js.dynamic_loss_scale(optimizer, initial=64.0)
    steps = with_table(optimizer, **options), with_leaf(optimizer, **options)
    tables = {"word": TABLE}
    stored = js.WithTables(DENSE, steps[0].embeddings.write(tables))
    states = [steps[0].init(stored), steps[1].init({**DENSE, **tables})]
    shares = [w if w is None else np.float32(w) for w in WEIGHTS[weights]]
    given = list(map(poisoned, BATCHES, shares))
    for first in range(0, len(BATCHES), 2):
        results = []
        for step, state in zip(steps, states, strict=True):
            window, last = None, first
            if made_of == "window":
                window, _ = step.collect(state, given[first], shares[first])
                last = first + 1
            results.append(step(state, given[last], shares[last], window=window))
        states = [state for state, _ in results]
        (table, found), (leaf, expected) = results
        # In float16 the other leaf's gradient is a sum that the two programs round differently.
        atol = 2e-6 if scale == "none" else 2e-3
        read = np.stack([steps[0].embeddings.read(of_one(table, i))["word"] for i in range(2)])
        np.testing.assert_allclose(read, leaf.params["word"], atol=atol)
        np.testing.assert_allclose(table.params.dense["w"], leaf.params["w"], atol=atol)
        for name, metric in expected.items():
            np.testing.assert_allclose(found[name], metric, atol=atol, err_msg=name)
    assert not np.allclose(read, TABLE, atol=0.02)


def of_one(state, i):
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[i]), state.params.tables)


def by_hand(reduce):
    """A user's own transform that averages gradients."""

    def update(updates, state, params=None):
        return reduce(updates, "replica"), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def with_constants(reduce):
    """One with a branch that returns constants, which devices refuse when it is first traced."""

    def update(updates, state, params=None):
        halved = lambda g: jax.tree.map(lambda x: jnp.full(x.shape, 0.5), g)  # noqa: E731
        chosen = jax.lax.cond(state.count < 2, lambda g: g, halved, updates)
        return reduce(chosen, "replica"), optax.ScaleByScheduleState(state.count + 1)

    def init(params):
        return optax.ScaleByScheduleState(jnp.zeros([], jnp.int32))

    return optax.GradientTransformation(init, update)


sgd, local = optax.sgd(RATE), js.local_sgd("replica")
AVERAGING = {
    "all_reduce": lambda: optax.chain(average(), sgd),
    "all three": lambda: optax.chain(average(), sgd, local),
    "in a chain of ours": lambda: js.chain(sgd, optax.chain(average(), sgd)),
    "in optax's chain": lambda: optax.chain(sgd, local),
    "only finite": lambda: optax.chain(sgd, js.only_finite(local)),
    "post local": lambda: optax.chain(early()["gradients"], sgd),
    "rows of its own": lambda: optax.chain(js.all_reduce_rows("replica", dense=average()), sgd),
    "unused": lambda: js.skip_unused(optax.chain(average(), sgd), "replica"),
    "scaled": lambda: js.dynamic_loss_scale(optax.chain(average(), sgd)),
    "masked": lambda: optax.masked(optax.chain(average(), sgd), {"w": True}),
    "several steps": lambda: optax.MultiSteps(
        optax.chain(average(), sgd), 2
    ).gradient_transformation(),
    "if finite": lambda: optax.apply_if_finite(optax.chain(sgd, local), 3),
}


@pytest.mark.parametrize("name", AVERAGING)
def test_averaging_inside_the_optimizer(name):
    """Whoever makes the state, on any number of replicas, whatever `gradients` and `sync` do."""
    said = "`optimizer` with `embeddings` holds .*tables drift apart.* as `gradients`.* as `sync`"
    step = with_table(AVERAGING[name](), mesh=js.virtual_mesh({"replica": 1}), sync="none")
    with pytest.raises(ValueError, match=said):
        step.init(DENSE)
    if name == "all three":
        params = js.WithTables(DENSE, WORDS.write({"word": TABLE}))
        state = js.TrainState.create(params, step.tx, mesh=step.mesh)
        with pytest.raises(ValueError, match=said):
            step(state, BATCHES[0])


def gathered(tree, axis):
    return jax.tree.map(lambda x: jax.lax.all_gather(x, axis).mean(0), tree)


@pytest.mark.parametrize(("kind", "reduce"), [(by_hand, gathered), (with_constants, jax.lax.pmean)])
def test_averaging_by_hand(kind, reduce):
    """It is found in the traced update."""
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
def test_what_the_optimizer_would_do_to_dense_parameters_alone(name, optimizer):
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
        "js.gradient_transform": js.gradient_transform(by_hand(jax.lax.pmean)),
        "optax.trace": average()._replace(update=optax.trace(0.5).update),
        r"\w+\.by_hand": by_hand(jax.lax.pmean),
    }.items(),
)
def test_gradients_that_rows_cannot_pass_through(name, gradients):
    said = rf"`gradients` with `embeddings` must be .*, got {name}\. .* js\.chain, not"
    with pytest.raises(ValueError, match=said):
        with_table(gradients=gradients)


@pytest.mark.parametrize(
    "options",
    [
        {"gradients": optax.identity(), "sync": local},
        {"gradients": optax.chain(optax.identity()), "sync": local},
        {"gradients": early()["gradients"], "optimizer": js.skip_unused(sgd, "replica")},
        {
            "gradients": js.post_local_gradients(js.every(1, start=2), average(), optax.identity()),
            "optimizer": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
        },
        {
            "gradients": js.post_local_gradients(
                js.every(1, start=2), average(), average(divide_by="active")
            )
        },
        {"optimizer": js.chain(average(), js.clip_by_global_norm(1.0), sgd, local)},
        {"optimizer": optax.conditionally_transform(sgd, lambda step: step > 0), "sync": local},
    ],
)
def test_what_is_not_refused(options):
    step = with_table(**options)
    assert step.traced_by_phase(jax.eval_shape(step.init, DENSE), BATCHES[0])
