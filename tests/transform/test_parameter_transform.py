"""Parameter transforms: optax's pair of an algorithm, and what follows from its list of events."""

import jax
import jax.numpy as jnp
from hypothesis import given
from hypothesis import strategies as st

import jaxslowmo as js

REPLICAS = 2


def noting(told):
    """Events that write down that they ran, or as 9 that they were skipped.

    `told` are their schedules, and what they replace.
    """

    def noted(digit):
        def run(carry, replicas, context):
            return carry._replace(local=10 * carry.local + digit)

        return run

    def missed(local, due):
        return jnp.where(due, 10 * local + 9, local)

    events = tuple(
        js.spec.Event(str(i), due, noted(i), replaces=replaces, missed=missed)
        for i, (due, replaces) in enumerate(told, start=1)
    )
    zero = lambda params: jnp.zeros([], jnp.int32)  # noqa: E731
    return js.ParameterTransform(js.Algorithm(events, local=zero, owner="notes"), "replica")


def notes(tx, t, **options):
    """What update `t` notes."""

    def one(x):
        state = tx.init(x)._replace(count=jnp.int32(t - 1))
        return tx.update(x, state, x, **options)[1].local

    return str(jax.vmap(one, axis_name="replica")(jnp.ones(REPLICAS))[0])


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=4), st.data())
def test_phases_and_programs_follow_from_the_events(told, data):
    """Events run in order, and one that replaces leaves out all before it."""
    tx = noting([(js.every(k), replaces) for k, replaces in told])
    t = data.draw(st.integers(1, 12))
    phase, due = [], [t % k == 0 for k, _ in told]
    for i, (is_due, (_, replaces)) in enumerate(zip(due, told, strict=True), start=1):
        if is_due:
            phase = [str(i)] if replaces else [*phase, str(i)]
    wanted = "".join(phase) or "0"
    assert (tx.phase(t), bool(tx.due(t))) == (tuple(phase), bool(phase))
    assert notes(tx, t) == notes(tx, t, phase=tuple(phase)) == wanted
    for never in (False, jnp.bool_(False)):
        assert notes(tx, t, communicate=never) == ("9" * sum(due) or "0")
    assert set(tx.phases()) == {tx.phase(t) for t in range(1, 13)}


def test_a_local_update_passes_a_conditional_per_alternative():
    """What is replaced is one of them, however many events it is; no event of all updates is."""
    conds = []
    for told in ([(3, False), (4, False), (5, True)], [(1, True)]):
        tx = noting([(js.every(k), r) for k, r in told])
        jaxpr = jax.make_jaxpr(
            jax.vmap(lambda x, tx=tx: tx.update(x, tx.init(x), x), axis_name="replica")
        )
        conds.append(sum(eqn.primitive.name == "cond" for eqn in jaxpr(jnp.ones(2)).eqns))
    assert conds == [2, 0]


def test_phases_are_found_from_the_schedules_and_have_names():
    # Of several the longest is not needed in full: of these it would be 10^18 updates.
    rare = [(js.every(10**9 - 1), False), (js.every(10**9), True)]
    both = noting(rare)
    assert set(both.phases()) >= {(), ("1",), ("2",)}
    assert [js.spec.phase_name(phase) for phase in (("average", "slow"), ())] == [
        "average+slow",
        "local",
    ]
