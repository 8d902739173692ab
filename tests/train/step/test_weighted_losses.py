"""Losses that are pairs `(sum, weight)`: everything is that of the quotient over the whole batch.

The oracle differentiates the quotient of all examples at once, in plain jax.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from train.step import tables

RNG = np.random.default_rng(3)
PARAMS = {"w": RNG.normal(size=(4, 3)).astype(np.float32), "b": np.zeros(3, np.float32)}
TOKENS = 5
RATE = 0.3


def batch_of(examples, num_empty=2):
    """Sequences of which some tokens count; some examples have none."""
    mask = (RNG.random((examples, TOKENS)) < 0.4).astype(np.float32)
    mask[:, 0] = 1
    mask[:num_empty] = 0
    x = RNG.normal(size=(examples, TOKENS, 4)).astype(np.float32)
    return {"x": x, "y": RNG.integers(0, 3, (examples, TOKENS)), "mask": mask}


def terms(params, batch):
    logits = batch["x"] @ params["w"] + params["b"][None, None]
    each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return (each * batch["mask"]).sum(), batch["mask"].sum()


def with_metrics(params, batch):
    total, weight = terms(params, batch)
    return (total, weight.astype(jnp.int32)), {"tokens": weight}


def quotient(params, batch):
    total, weight = terms(params, batch)
    return total / weight


def joined(batches):
    return jax.tree.map(lambda *x: np.concatenate(x), *batches)


def halves(batch):
    return [{name: x[i : i + 4] for name, x in batch.items()} for i in (0, 4)]


def stepped(params, batch):
    grads = jax.grad(quotient)(params, batch)
    return jax.tree.map(lambda p, g: p - RATE * g, params, grads)


def close(actual, expected, **how):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, **{"rtol": 2e-5, "atol": 2e-6, **how})


INNER = {"replica": 2, "device": 2}


@pytest.mark.parametrize("num_batches", [1, 3])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("shape", "over"),
    [({"replica": 2}, "replica"), (INNER, ("replica", "device"))],
)
def test_gradients_and_loss_are_those_of_the_whole_batch(shape, over, accumulate, num_batches):
    step = js.make_train_step(
        with_metrics,
        optax.sgd(RATE),
        gradients=js.all_reduce_gradients(over),
        mesh=js.make_mesh(shape),
        accumulate=accumulate,
    )
    state, window = step.init(PARAMS), None
    batches = [batch_of(8, num_empty=i) for i in range(num_batches)]
    for batch in batches[:-1]:
        window, _ = step.collect(state, batch, window=window)
    state, metrics = step(state, batches[-1], window=window)
    expected = stepped(PARAMS, joined(batches))
    close(state.params, jax.tree.map(lambda x: np.stack([x, x]), expected))
    # The loss of each replica is that of its part of the last batch.
    parts = halves(batches[-1])
    close(metrics["loss"], np.array([quotient(PARAMS, part) for part in parts]))
    close(js.host_mean(metrics)["loss"], quotient(PARAMS, batches[-1]))


def test_the_loop_reports_the_loss_of_all_batches_of_an_update():
    both = js.all_reduce_gradients(("replica", "device"))
    step = js.make_train_step(
        with_metrics, optax.sgd(RATE), gradients=both, mesh=js.make_mesh(INNER)
    )
    batches = [batch_of(8, num_empty=n) for n in (1, 0, 3)]
    (result,) = js.train_loop(step, step.init(PARAMS), batches, accumulate=3)
    close(js.host_mean(result.metrics)["loss"], quotient(PARAMS, joined(batches)))
    tokens = sum(batch["mask"].sum() for batch in batches)
    close(result.metrics["loss_weight"].sum(), tokens)


def test_a_window_alone_and_an_evaluation_have_the_loss_of_the_whole():
    step = js.make_train_step(
        terms,
        optax.sgd(RATE),
        mesh=js.make_mesh({"replica": 1, "device": 2}),
        donate=False,
    )
    state, batches = step.init(PARAMS), [batch_of(4, num_empty=n) for n in (1, 3)]
    window, _ = step.collect(state, batches[0])
    window, _ = step.collect(state, batches[1], window=window)
    new, metrics = step.apply(state, window)
    close(new.params, jax.tree.map(lambda x: x[None], stepped(PARAMS, joined(batches))))
    close(metrics["loss"], np.array([quotient(PARAMS, joined(batches))]))
    close(step.evaluate(state, batches[1])["loss"], np.array([quotient(PARAMS, batches[1])]))


def test_a_replica_without_tokens_counts_for_nothing_and_all_without_stay():
    step = js.make_train_step(
        terms,
        optax.sgd(RATE),
        gradients=js.all_reduce_gradients("replica"),
        mesh=js.virtual_mesh({"replica": 4}),
        donate=False,
    )
    batch = batch_of(8, num_empty=2)  # all of replica 0
    state, _ = step(step.init(PARAMS), batch)
    close(jax.tree.map(lambda x: x[0], state.params), stepped(PARAMS, batch))
    nothing = {**batch, "mask": np.zeros_like(batch["mask"])}
    after, metrics = step(state, nothing)
    close(after.params, state.params, rtol=0, atol=0)
    assert not np.any(metrics["loss"])


def test_an_idle_replica_counts_for_nothing_whatever_its_tokens():
    def run(loss, batch):
        step = js.make_train_step(
            loss,
            optax.sgd(RATE),
            gradients=js.all_reduce_gradients("replica", divide_by="active"),
            mesh=js.make_mesh({"replica": 2}),
        )
        return step(step.init(PARAMS), batch, np.array([0.0, 1.0]))[0].params

    batch = batch_of(8, num_empty=0)
    own = jax.tree.map(lambda x: x[4:], batch)
    close(jax.tree.map(lambda x: x[0], run(terms, batch)), stepped(PARAMS, own))


def test_local_updates_use_the_replicas_own_quotient_and_meet_in_plain_means():
    step = js.make_train_step(
        terms,
        optax.sgd(RATE),
        sync=js.local_sgd("replica", sync_every=2),
        mesh=js.make_mesh(INNER),
    )
    state, batches = step.init(PARAMS), [batch_of(8), batch_of(8)]
    own = [PARAMS, PARAMS]
    for batch in batches:
        state, _ = step(state, batch)
        own = [stepped(p, part) for p, part in zip(own, halves(batch), strict=True)]
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *own)
    close(jax.tree.map(lambda x: x[0], state.params), mean)


def test_scale_policy_keys_and_orders_take_pairs():
    def loss(params, batch, *, rng):
        total, weight = terms(params, batch)
        return (total + 0 * jax.random.uniform(rng), weight), {}

    both = js.all_reduce_gradients(("replica", "device"))
    options = {"mesh": js.make_mesh(INNER), "gradients": both}
    batch = batch_of(8)
    plain = js.make_train_step(loss, optax.sgd(RATE), **options)
    scaled = js.make_train_step(
        loss,
        js.dynamic_loss_scale(optax.sgd(RATE)),
        policy=js.gradients.Policy("float32"),
        **options,
    )
    states = [step(step.init(PARAMS), batch)[0].params for step in (plain, scaled)]
    close(*states)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PARAMS)
    assert js.gradients.unused_parameters(terms, shapes, batch) == []
    assert sorted(js.gradients.ready_order(terms, shapes, batch)) == [0, 1]


def test_the_weight_joins_the_gradients_all_reduce():
    def collectives(loss):
        step = js.make_train_step(
            loss,
            optax.sgd(RATE),
            gradients=js.all_reduce_gradients("replica"),
            mesh=js.make_mesh({"replica": 2}),
        )
        report = js.comm_report(step, step.init(PARAMS), batch_of(8))
        return [(row.collective, row.count) for row in report.select(level="compiled")]

    assert collectives(terms) == collectives(quotient) == [("all-reduce", 1)]


def test_with_tables_a_pair_is_refused():
    def pair(params, batch, *, embedded):
        return tables.loss(params, batch, embedded=embedded), 1.0

    step = tables.step_of(1, loss_fn=pair, gradients=js.all_reduce_gradients("replica"))
    state = step.init(tables.DENSE)
    with pytest.raises(ValueError, match="`loss_fn` with `embeddings`"):
        step(state, tables.batches(1)[0])


def test_what_is_no_pair_of_scalars_is_refused():
    mesh = js.make_mesh({"replica": 1})
    for wrong in (
        lambda p, b: (terms(p, b)[0], b["mask"]),
        lambda p, b: ((1.0, 2.0, 3.0), {}),
        lambda p, b: (jnp.int32(1), terms(p, b)[1]),
    ):
        step = js.make_train_step(wrong, optax.sgd(RATE), mesh=mesh)
        with pytest.raises(ValueError, match="`loss_fn`"):
            step(step.init(PARAMS), batch_of(8))


def with_accuracy(params, batch):
    total, weight = terms(params, batch)
    right = (batch["x"] @ params["w"]).argmax(-1) == batch["y"]
    return total / weight, right.mean()


def in_a_loop(params, batch):
    """The weight is summed beside the loss, which depends on the parameters."""

    def add(sums, part):
        return jax.tree.map(jnp.add, sums, terms(params, part)), None

    parts = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), batch)
    return jax.lax.scan(add, (jnp.float32(0), jnp.float32(0)), parts)[0]


@pytest.mark.parametrize("kind", [js.make_mesh, js.virtual_mesh])
def test_a_metric_that_is_taken_for_a_weight_is_told(kind):
    """The loss would be divided by it, and no gradient would say so."""
    mesh, sync, batch = kind({"replica": 2}), js.local_sgd("replica"), batch_of(8)
    for fn, is_wrong in ((with_accuracy, True), (terms, False), (in_a_loop, False)):
        for wrapped in (fn, lambda p, b, fn=fn: (fn(p, b), {}), jax.jit(fn)):
            step = js.make_train_step(wrapped, optax.sgd(RATE), sync=sync, mesh=mesh)
            state = step.init(PARAMS)
            if is_wrong:
                with pytest.warns(UserWarning, match="`loss_fn` .* depends on the parameters"):
                    state, _ = step(state, batch)
            step(state, batch)  # warnings are errors


def test_a_layered_model_tells_of_it_too():
    layers = [lambda p, x: x["x"] @ p]

    def loss(logits, batch):
        return logits.mean(), (logits.argmax(-1) == batch["y"]).mean()

    with pytest.warns(UserWarning, match="`loss` .* depends on the parameters"):
        js.LayeredModel(layers, loss)([PARAMS["w"]], batch_of(8))
    weighed = lambda logits, batch: (logits.sum(), batch["mask"].sum())  # noqa: E731
    js.LayeredModel(layers, weighed)([PARAMS["w"]], batch_of(8))
