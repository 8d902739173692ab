"""Kinds of step: traced programs with phase scopes, programs by phase, and that they agree."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.reports._comm_report import comm_report_of

X = jax.ShapeDtypeStruct((64,), jnp.float32)
T = jax.ShapeDtypeStruct((), jnp.int32)


def scoped(name, fn):
    def run(x):
        with jax.named_scope(f"phase:{name}"):
            return fn(x)

    return run


def mean(x):
    return lax.pmean(x, "replica")


def shared(x):
    return lax.all_gather(lax.psum_scatter(x, "replica", tiled=True), "replica", tiled=True)


average, slow = scoped("average", mean), scoped("slow", shared)


def same(x):
    return x


@pytest.fixture
def mapped(mesh_of):
    mesh = mesh_of({"replica": 8})

    def build(fn):
        specs = {"in_specs": (P("replica"), P()), "out_specs": P("replica")}
        return jax.shard_map(fn, mesh=mesh, check_vma=False, **specs)

    return build


def when(period, phase, otherwise=same):
    """Part of a step: every so many steps that phase."""
    return lambda x, t: lax.cond(t % period == 0, phase, otherwise, x)


def both(first, second):
    return lambda x, t: second(first(x, t), t)


def loop(x, t):
    body = lambda x, i: (lax.cond(i + t > 2, average, jnp.sin, x), None)  # noqa: E731
    return lax.scan(body, x, jnp.arange(4))[0]


REDUCE = jax.jit(mean)
CALLS = [scoped("a", REDUCE), scoped("b", lambda x: REDUCE(2 * REDUCE(x))), same]
OUTER = scoped("outer", lambda x: lax.psum(average(x), "replica"))
EVERY = scoped("*", mean)
# A step, and how many collectives each kind of it executes.
CASES = {
    "without a phase": (when(2, mean), "local 0, conditional 1"),
    "static and chosen": (
        both(lambda x, t: average(x), when(2, slow)),
        "local 1, slow 3, average 1, average+slow 3",
    ),
    "two in one step": (
        both(when(3, average), when(4, slow)),
        "local 0, average 1, slow 2, average+slow 3",
    ),
    "the innermost": (when(2, OUTER), "local 0, average 1, outer 1, average+outer 2"),
    "part of every": (both(when(3, average), when(3, EVERY)), "local 0, average 2"),
    "of the caller": (lambda x, t: lax.switch(t, CALLS, x), "local 0, a 1, b 2"),
    "in a loop": (loop, "local 0, average 4"),
}


@pytest.mark.parametrize("name", CASES)
def test_kinds_of_steps_and_how_many_collectives_they_execute(mapped, name):
    fn, wanted = CASES[name]
    report = comm_report_of(jax.jit(mapped(fn)).lower(X, T), compile=name == "of the caller")
    for level in report.levels:
        counts = [f"{kind} {report.count(kind=kind, level=level)}" for kind in report.kinds]
        assert ", ".join(counts) == wanted


AXIS = "replica"
SYNCS = {
    # Without the schedule the conditionals would give all combinations.
    "fragments": (
        js.slowmo(AXIS, base=js.local_sgd(AXIS, sync_every=4), sync_every=8, fragments=4),
        "local slow_0 average+slow_1 slow_2 average+slow_3",
    ),
    "parts in flight": (
        js.diloco(AXIS, sync_every=8, fragments=2, delay=2),
        "local take_0 send_0 send_0+slow_0 take_1 send_1 send_1+slow_1",
    ),
}


@pytest.mark.parametrize("name", SYNCS)
def test_a_traced_step_lists_the_kinds_that_occur(name):
    sync, wanted = SYNCS[name]
    step = js.make_train_step(
        lambda params, batch: sum(w.sum() for w in params.values()) * batch.sum(),
        optax.adam(0.1),
        sync=sync,
        mesh=js.make_mesh({AXIS: 4}),
    )
    state = step.init({f"w{i}": jnp.ones(3) for i in range(4)})
    kinds = js.comm_report(step, state, jnp.ones(4)).kinds
    assert {kind.replace(" ", "_") for kind in kinds} == {*wanted.split()}
