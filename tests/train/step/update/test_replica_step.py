"""Updates against loops written by hand with optax, whatever a step is made of.

Each run draws a value of every option: who averages, windows, microbatches, weights, clipping, loss
scales, model state, devices inside of a replica, and losses that are pairs `(sum, weight)`, average
themselves over all replicas, or hold loops, branches and kernels.
`by_hand` shares no code with the step. Two leaves of each batch are those of all examples: a Python
number, and an array of one row.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from support.exhaustive import covering, sweep
from support.promotion import promoting
from train.step.problem import KINDS, PARAMS, RATE

REPLICAS, ROWS, UPDATES, START = 2, 16, 6, 3
RNG = np.random.default_rng(0)
X = RNG.normal(size=(UPDATES, 3, ROWS, 8)).astype(np.float32)
GATES = RNG.uniform(0.5, 1.5, size=(UPDATES, 3, 1, 8)).astype(np.float32)
WEIGHTS = RNG.integers(0, 4, (UPDATES, 3, REPLICAS)).astype(np.float32)
WEIGHTS[4, :, 1], WEIGHTS[1, 0, 1] = 0, 2
WEIGHTS[:, :, 0] += WEIGHTS.sum(2) == 0  # somebody has data
MASKS = (RNG.random((UPDATES, 3, ROWS)) < 0.6).astype(np.float32)
MASKS[:, :, :: ROWS // REPLICAS] = MASKS[:, :, -1] = 1  # of each replica some examples count
LATE = js.every(2, start=START)
MAX_NORM, SCALE = 0.3, 64.0
OPTIMIZERS = {
    "momentum": optax.sgd(RATE, momentum=0.9),
    "adam": optax.adam(0.05, eps=1e-3),
    "polyak": optax.polyak_sgd(max_learning_rate=0.5),  # is told the loss
    "every second": promoting(optax.MultiSteps(optax.sgd(RATE), 2).gradient_transformation()),
}
OPTIONS = {
    "kind": [
        *("auto", "explicit", "virtual", "auto inner", "virtual two", "auto fsdp", "auto two"),
        *("virtual inner", "auto one"),
    ],
    "reduce": ["none", "initial", "active"],
    "clip": ["none", "gradients", "optimizer"],
    "scaled": [False, True],
    "optimizer": list(OPTIMIZERS),
    "sync": ["none", "local_sgd", "late"],
    "accumulate": [1, 2],
    "window": [0, 1, 2],  # batches before the last one of an update
    "apply": [False, True],
    "weighted": [False, True],
    "loss": ["mean", "pairs", "pmean", "psum", "scan", "branch", "pallas"],
    "mode": ["traced", "host"],
    "chain": [False, True],
    "model_state": ["sync_mean", "broadcast", "local"],
}
RUNS = 9
OVER_ALL = "pmean", "psum"  # losses that average themselves
# Axes inside of a replica, by the last word of a kind.
INSIDE = {"inner": {"device": 2}, "two": {"a": 2, "b": 2}, "fsdp": {"fsdp": 2}}
INSIDE["one"] = {"one": 1}  # as if it were not there


def possible(run):
    """Return the run, without what cannot stand beside the rest."""
    if run["sync"] == run["reduce"] == "none":  # replicas apart exchange no model state
        run["model_state"] = "local"
    if run["loss"] in OVER_ALL:  # which knows of no weights, and of no overflow elsewhere
        run["weighted"] = run["scaled"] = False
    return run


@jax.custom_jvp
def doubled(x):
    def kernel(x_ref, y_ref):
        y_ref[...] = x_ref[...] * 2

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, out_shape=shape, interpret=True)(x)


doubled.defjvp(lambda primals, tangents: (doubled(*primals), 2 * tangents[0]))


def reduced(kind, values, mask, axes):
    """The loss of these examples; over `axes` a loss that averages itself does so."""
    total, count = values.sum(), jnp.float32(len(values))
    if kind == "pairs":
        return jnp.sum(values * mask), jnp.sum(mask)
    if kind == "pmean" and axes:
        return lax.pmean(values.mean(), axes)
    if kind == "psum" and axes:
        total, count = lax.psum((total, count), axes)
    if kind == "scan":  # from numbers
        add = lambda carry, x: ((carry[0] + x, carry[1] + 1), None)  # noqa: E731
        total, count = lax.scan(add, (0.0, 0), values)[0]
    if kind == "branch":  # of which one is constant
        is_nan = jnp.isnan(values[0])
        return lax.cond(is_nan, lambda: jnp.float32(1.0), lambda: values.mean())
    if kind == "pallas":
        return doubled(values).mean() / 2
    return total / count


def fn(params, batch, *, model_state, kind="mean", axes=()):
    """Use no statistics, so gradients are by example; an infinite factor is an overflow."""
    (x, factor, mask), (gate, strength) = batch
    assert (gate.shape, jnp.shape(strength)) == ((1, 8), ())
    hidden = jnp.tanh((x * gate) @ params["w"] + params["b"][None])
    values = jnp.sum(hidden**2, axis=1) * factor * strength
    new = {"m": 0.5 * model_state["m"] + x.mean(0), "n": model_state["n"] + 1}
    return reduced(kind, values, mask, axes), ({}, new)


def given(run):
    """(x, factor, mask) of each batch, and what all share; an update overflows on replica 1."""
    factors = np.ones(X.shape[:3], np.float32)
    if run["scaled"]:
        factors[1, 0, -1] = np.inf
    xs = X.copy()
    if run["weighted"]:  # whatever an idle replica's batch holds
        xs[np.repeat(WEIGHTS == 0, ROWS // REPLICAS, axis=2)] = np.nan
    return [
        [((x[i], f[i], MASKS[t, i]), (GATES[t, i], 1 + t / 8)) for i in range(run["window"] + 1)]
        for t, (x, f) in enumerate(zip(xs, factors, strict=True))
    ]


def weight_of(run, update, batch):
    return WEIGHTS[update, batch] if run["weighted"] else None


def made(run):
    """Return the step."""
    optimizer, clip = OPTIMIZERS[run["optimizer"]], js.clip_by_global_norm(MAX_NORM)
    (kind, *inside), parts = run["kind"].split(), []
    inner = INSIDE[inside[0]] if inside else {}
    if run["reduce"] != "none":
        axes = ("replica", *(name for name in inner if name != "fsdp"))
        parts = [js.all_reduce_gradients(axes, divide_by=run["reduce"])]
    if run["clip"] == "gradients":
        parts.append(clip)
    elif run["clip"] == "optimizer":
        optimizer = js.chain(clip, optimizer)
    if run["scaled"]:
        optimizer = js.dynamic_loss_scale(optimizer, initial=SCALE)
    every = {"none": None, "local_sgd": 2, "late": LATE}[run["sync"]]
    sync = None if every is None else js.local_sgd("replica", sync_every=every)
    options = {name: run[name] for name in ("accumulate", "mode", "model_state")}
    if run["chain"] and (parts or sync):
        options["optimizer"] = js.chain(*parts, optimizer, *([sync] if sync else []))
    else:
        gradients = js.chain(*parts) if parts else None
        options |= {"optimizer": optimizer, "gradients": gradients, "sync": sync}
    if run["reduce"] == run["sync"] == "none":
        options["sync"] = "none"
    axes = {"replica": REPLICAS} | inner
    over = ("replica", *(n for n in inner if n != "fsdp" and run["reduce"] != "none"))
    loss = functools.partial(fn, kind=run["loss"], axes=over)
    return js.make_train_step(loss, mesh=KINDS[kind](axes), **options)


def mean_of(shares, trees):
    return jax.tree.map(lambda *x: sum(s * y for s, y in zip(shares, x, strict=True)), *trees)


def by_hand(run):
    """Yield parameters, statistics, told losses and their weights of all replicas, by update."""
    optimizer = optax.with_extra_args_support(OPTIMIZERS[run["optimizer"]])
    params, states = [PARAMS] * REPLICAS, [optimizer.init(PARAMS)] * REPLICAS
    stats, scales = [np.zeros(8, np.float32)] * REPLICAS, [SCALE] * REPLICAS

    def quotient(params, batch):
        loss, _ = fn(params, batch, model_state={"m": 0, "n": 0}, kind=run["loss"])
        return loss[0] / loss[1] if run["loss"] == "pairs" else loss

    value_and_grad = jax.jit(jax.value_and_grad(quotient))
    devices = {"inner": 2, "two": 4}.get(run["kind"].split()[-1], 1)
    parts = devices, run["accumulate"]
    for t, batches in enumerate(given(run), 1):
        averages = run["reduce"] != "none"
        seen = [stats[0] if run["model_state"] == "broadcast" else s for s in stats]
        grads, values, weights, terms, told = [], [], [], [], []
        for r in range(REPLICAS):
            sums, value, before = jax.tree.map(np.zeros_like, PARAMS), 0.0, seen[r]
            total = of_losses = 0.0
            for i, (split, shared) in enumerate(batches):
                weight = weight_of(run, t - 1, i)
                w = 1.0 if weight is None else weight[r]
                own = [np.split(x, REPLICAS)[r] for x in split]
                term = own[2].sum() * (w > 0) if run["loss"] == "pairs" else w
                last = 0.0
                if w:
                    last, g = value_and_grad(params[r], (own, shared))
                    sums = jax.tree.map(lambda s, g, w=term: s + w * np.asarray(g), sums, g)
                    value, total, of_losses = (
                        value + term * float(last),
                        total + w,
                        of_losses + term,
                    )
                    for part in own[0].reshape(*parts, -1, 8).mean((0, 2)):
                        before = 0.5 * before + part
            grads.append(jax.tree.map(lambda s, n=of_losses or 1.0: s / n, sums))
            values.append(value / (of_losses or 1.0))
            weights.append(total)
            terms.append(of_losses)
            seen[r] = before
            is_whole = run["window"] and run["apply"]
            told.append((values[-1], of_losses) if is_whole else (float(last), term))
        shares, of_replicas = (np.array(x) / sum(x) for x in (weights, terms))
        if run["loss"] in OVER_ALL:
            values = [np.mean(values)] * REPLICAS
            told = [(np.mean([value for value, _ in told]), term) for _, term in told]
        if averages:
            factor = np.mean(np.array(weights) > 0) if run["reduce"] == "initial" else 1.0
            mean = mean_of(of_replicas, grads)
            grads = [jax.tree.map(lambda x, f=factor: f * x, mean)] * REPLICAS
            values = [float(np.dot(of_replicas, values))] * REPLICAS
        after, used = list(params), list(scales)
        for r in range(REPLICAS):
            is_idle = weights[r] == 0 and not averages  # an average is everybody's update
            g = grads[r]
            norm = np.sqrt(sum((x.astype(np.float64) ** 2).sum() for x in g.values()))
            if not np.isfinite(norm):
                if not is_idle:
                    scales[r], seen[r] = scales[r] / 2, stats[r]
                continue
            if run["clip"] != "none" and norm > MAX_NORM:
                g = jax.tree.map(lambda x, f=MAX_NORM / norm: np.float32(f * x), g)
            updates, state = optimizer.update(g, states[r], params[r], value=values[r])
            if not is_idle:
                states[r], after[r] = state, optax.apply_updates(params[r], updates)
        params, stats = after, seen
        due = {"none": averages, "local_sgd": t % 2 == 0, "late": t > START and t % 2 == 1}
        if due[run["sync"]]:
            if run["sync"] != "none":
                params = [mean_of(shares, params)] * REPLICAS
            if run["model_state"] == "sync_mean":
                stats = [mean_of(shares, stats)] * REPLICAS
        yield params, stats, np.transpose(told), used


CASES = sweep(itertools.product(range(3, 7), range(RUNS)), lambda seed, _: seed == 3)


@pytest.mark.parametrize(("seed", "number"), CASES)
def test_updates_are_those_of_a_loop_by_hand(seed, number):
    run = possible(covering(OPTIONS, RUNS, seed)[number])
    step, wanted = made(run), by_hand(run)
    params, axis = PARAMS, run["kind"].split()[-1]
    is_split = axis in ("fsdp", "one")
    if is_split:  # inside of a replica, by the compiler
        params = PARAMS | {"w": jax.device_put(PARAMS["w"], NamedSharding(step.mesh, P(axis)))}
    state = step.init(params, model_state={"m": np.zeros(8, np.float32), "n": np.int32(0)})
    for t, batches in enumerate(given(run)):
        *first, last = batches
        if run["window"] and run["apply"]:
            first, last = batches, None
        window = None
        for i, batch in enumerate(first):
            window, _ = step.collect(state, batch, weight_of(run, t, i), window=window)
        value = step.evaluate(state, batches[-1], weight_of(run, t, len(batches) - 1))["loss"]
        if last is None:
            state, metrics = step.apply(state, window)
        else:
            weight = weight_of(run, t, len(first))
            state, metrics = step(state, last, weight, window=window)
        params, stats, (told, terms), scales = next(wanted)
        where = f"update {t + 1} of {run}"
        close = {"rtol": 2e-4, "atol": 2e-5, "err_msg": where}
        for name in PARAMS:
            np.testing.assert_allclose(state.params[name], [p[name] for p in params], **close)
        if is_split:
            wanted_place = NamedSharding(step.mesh, P("replica", axis))
            assert state.params["w"].sharding.is_equivalent_to(wanted_place, 3)
        np.testing.assert_allclose(state.model_state["m"], stats, **close)
        np.testing.assert_allclose(metrics["loss"], told, **close)
        if run["loss"] == "pairs":
            np.testing.assert_allclose(metrics["loss_weight"], terms, **close)
        if last is not None:
            np.testing.assert_allclose(value, told, **close)
        if run["scaled"]:
            np.testing.assert_array_equal(metrics["loss_scale"], scales, where)
