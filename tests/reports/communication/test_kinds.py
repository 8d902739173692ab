"""Kinds of step: traced programs with phase scopes, programs by phase, and that they agree."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxslowmo.reports.communication import comm_report

X = jax.ShapeDtypeStruct((64,), jnp.float32)
T = jax.ShapeDtypeStruct((), jnp.int32)
BLOCK = 32


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


def nested(x, t):
    x = lax.ppermute(x, "replica", [(0, 1)])
    rest = lambda x: lax.cond(t % 2 == 0, average, same, x)  # noqa: E731
    return lax.cond(t % 4 == 0, slow, rest, x)


@pytest.mark.parametrize("level", ["emitted", "compiled"])
def test_nested_conditionals_with_phases(mapped, level):
    report = comm_report(mapped(nested), X, T)
    assert report.kinds == ("local", "average", "slow")
    counts = {
        kind: {r.collective: r.count for r in report.select(kind=kind, level=level)}
        for kind in report.kinds
    }
    assert counts == {
        "local": {"collective-permute": 1},
        "average": {"collective-permute": 1, "all-reduce": 1},
        "slow": {"collective-permute": 1, "reduce-scatter": 1, "all-gather": 1},
    }
    conditional = {r.collective for r in report.select(level=level) if r.conditional}
    assert conditional == {"all-reduce", "reduce-scatter", "all-gather"}


class ByPhase:
    """As a host-scheduled step."""

    def __init__(self, programs, *, traced=False):
        name = "traced_by_phase" if traced else "lowered_by_phase"

        def stage(fn, *args):
            return jax.jit(fn).trace(*args) if traced else jax.jit(fn).lower(*args)

        def method(*args):
            if not isinstance(programs, dict):
                return stage(programs, *args)
            return {kind: stage(fn, *args) for kind, fn in programs.items()}

        setattr(self, name, method)


@pytest.mark.parametrize("traced", [False, True])
def test_traced_and_host_scheduled_programs_agree(mapped, traced):
    def with_base(exchange):
        return mapped(lambda x, t: exchange(lax.ppermute(x, "replica", [(0, 1)])))

    programs = {"local": with_base(same), "average": with_base(average), "slow": with_base(slow)}
    by_host = comm_report(ByPhase(programs, traced=traced), X, T)
    inside = comm_report(mapped(nested), X, T)
    assert by_host.kinds == inside.kinds
    for level in ("emitted", "compiled"):
        for kind in by_host.kinds:
            facts = [
                {
                    (r.axis, r.collective, r.count, r.bytes)
                    for r in report.select(kind=kind, level=level)
                }
                for report in (by_host, inside)
            ]
            assert facts[0] == facts[1] != set()


def test_step_object_with_one_program_for_all_kinds(mapped):
    expected = comm_report(mapped(nested), X, T)
    assert comm_report(ByPhase(mapped(nested)), X, T) == expected
    assert comm_report(ByPhase({None: mapped(nested)}, traced=True), X, T) == expected


def test_local_exists_and_is_silent(mapped):
    report = comm_report(mapped(lambda x, t: lax.cond(t == 0, average, same, x)), X, T)
    assert report.kinds == ("local", "average")
    assert report.count(kind="local", axis="replica") == 0
    assert report.count(kind="local", axis="replica", level="compiled") == 0
    assert report.count(kind="average", axis="replica") == 1


def test_phase_that_communicates_nothing_is_a_kind(mapped):
    double = scoped("rest", lambda x: 2 * x)
    report = comm_report(mapped(lambda x, t: lax.cond(t == 0, double, same, x)), X, T)
    assert report.kinds == ("local", "rest")
    assert report.count(kind="rest") == 0


def test_conditional_without_a_phase(mapped):
    def step(x, t):
        return lax.cond(t == 0, mean, same, lax.ppermute(x, "replica", [(0, 1)]))

    report = comm_report(mapped(step), X, T)
    assert report.kinds == ("local", "conditional")
    assert report.count(kind="local") == 1
    assert report.count(kind="conditional") == 2
    assert report.count(kind="conditional", level="compiled") == 2


def test_static_phase_is_the_one_kind(mapped):
    report = comm_report(mapped(lambda x, t: average(lax.psum(x, "replica"))), X, T)
    assert report.kinds == ("average",)
    assert report.count() == 2


def test_static_phases_join(mapped):
    report = comm_report(mapped(lambda x, t: slow(average(x))), X, T)
    assert report.kinds == ("average+slow",)
    assert report.count() == 3


def test_innermost_phase_wins(mapped):
    step = scoped("outer", lambda x: lax.psum(average(x), "replica"))
    report = comm_report(mapped(lambda x, t: lax.cond(t == 0, step, same, x)), X, T)
    assert report.count(kind="average") == 1
    assert report.count(kind="outer") == 1
    assert report.count(kind="outer+average") == 2


def test_phases_that_meet_in_one_step(mapped):
    def step(x, t):
        x = lax.cond(t % 3 == 0, average, same, x)
        return lax.cond(t % 4 == 0, slow, same, x)

    report = comm_report(mapped(step), X, T)
    assert report.kinds == ("local", "average", "slow", "average+slow")
    assert report.count(kind="average+slow") == report.count(kind="slow+average") == 3
    assert report.count(kind="average") == 1


def test_part_of_every_phase(mapped):
    def step(x, t):
        x = lax.cond(t % 4 == 0, slow, lambda x: lax.cond(t % 3 == 0, average, same, x), x)
        return lax.cond((t % 3 == 0) | (t % 4 == 0), scoped("*", mean), same, x)

    report = comm_report(mapped(step), X, T)
    assert report.kinds == ("local", "average", "slow")
    assert [report.count(kind=kind) for kind in report.kinds] == [0, 2, 3]


def test_rounds_of_one_phase_exclude_each_other(mapped):
    rounds = [
        scoped("gossip", lambda x, k=k: lax.ppermute(x, "replica", [(0, k), (k, 0)]))
        for k in (1, 2, 3)
    ]
    report = comm_report(mapped(lambda x, t: lax.switch(t % 3, rounds, x)), X, T)
    for level in ("emitted", "compiled"):
        assert report.count(kind="gossip", level=level) == 1
        assert report.bytes(kind="gossip", level=level) == BLOCK


@pytest.mark.parametrize("level", ["emitted", "compiled"])
def test_shared_function_takes_the_phase_of_its_caller(mapped, level):
    reduce = jax.jit(mean)
    branches = [scoped("a", reduce), scoped("b", lambda x: reduce(2 * reduce(x))), same]
    report = comm_report(mapped(lambda x, t: lax.switch(t, branches, x)), X, T)
    assert report.kinds == ("local", "a", "b")
    assert [report.count(kind=kind, level=level) for kind in report.kinds] == [0, 1, 2]


@pytest.mark.parametrize("level", ["emitted", "compiled"])
def test_conditional_in_a_loop(mapped, level):
    def step(x, t):
        def body(x, i):
            return lax.cond(i + t > 2, average, jnp.sin, x), None

        return lax.scan(body, x, jnp.arange(4))[0]

    report = comm_report(mapped(step), X, T)
    (row,) = report.select(kind="average", level=level)
    assert (row.count, row.conditional, row.in_loop, row.trip_count) == (4, True, True, 4)
    assert report.count(kind="local", level=level) == 0


def test_phases_survive_vmap_and_grad(mapped):
    def step(x, t):
        def loss(x):
            return lax.cond(t == 0, scoped("average", lambda x: lax.psum(x, "replica")), same, x)

        return jax.grad(lambda x: jax.vmap(loss)(x).sum())(x)

    report = comm_report(mapped(step), X, T)
    assert set(report.kinds) == {"local", "average"}
    assert report.count(kind="local") == 0
    assert report.count(kind="average") >= 1
