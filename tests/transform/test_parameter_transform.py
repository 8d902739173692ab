"""Parameter transforms: optax's pair of an algorithm, and what follows from its list of events."""

import copy
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import jaxslowmo as js
from support.transforms import TRANSFORMS

REPLICAS = 2
ONE = {"w": jnp.ones(1)}


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


@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=3),
)
@example(period=1, forms=2, later=[(2, True), (4, True)])
def test_forms_take_turns_by_the_exchanges_that_nothing_replaces(period, forms, later):
    """Counted here update by update; several events may replace the same exchange."""

    def event(name, k, **options):
        return js.spec.Event(name, js.every(k), lambda carry, *_: carry, **options)

    others = [event(str(i), k, replaces=replaces) for i, (k, replaces) in enumerate(later)]
    events = (event("round", period, forms=forms), *others)
    algorithm = js.Algorithm(events, count=lambda local: local)
    exchanges = 0
    for t in range(1, 20):
        rounds = [name for name in algorithm.phase(t) if name.startswith("round")]
        is_replaced = any(replaces and t % k == 0 for k, replaces in later)
        is_due = t % period == 0 and not is_replaced
        assert rounds == [f"round {exchanges % forms}"] * is_due
        exchanges += is_due
        assert algorithm.skip_count(exchanges - 1, t) == 1


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


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy])
def test_copies_are_whole(make):
    tx = TRANSFORMS["slowmo over sgp"]()
    twin = make(tx)
    assert (*twin,) == (*tx,) == (tx.init, tx.update)
    assert (twin.algorithm, twin.phases()) == (tx.algorithm, tx.phases())


def test_another_update_is_another_transform():
    """A step would go past it otherwise, by `exchange`."""
    tx = js.local_sgd("replica")
    other = tx._replace(update=optax.identity().update)
    assert not isinstance(other, js.ParameterTransform)
    assert isinstance(other, optax.GradientTransformationExtraArgs)


def test_what_the_algorithm_does_not_say_has_a_default():
    tx = js.ParameterTransform(js.Algorithm(), "replica")
    state = tx.init(ONE)
    assert (state.local, state.shared, tx.shares(state)) == ((), (), [(1.0, None)])
    assert (tx.phases(), tx.due(1), tx.algorithm.inner_state) == ([()], False, "keep")
    assert tx.bound({"replica": 2}, ONE).algorithm is tx.algorithm
    assert tx.with_specs(None) is tx


def test_phases_are_found_from_the_schedules_and_have_names():
    # Of several the longest is not needed in full: of these it would be 10^18 updates.
    rare = [(js.every(10**9 - 1), False), (js.every(10**9), True)]
    both = noting(rare)
    assert set(both.phases()) >= {(), ("1",), ("2",)}
    assert [js.spec.phase_name(phase) for phase in (("average", "slow"), ())] == [
        "average+slow",
        "local",
    ]


def ends_of(tx, mesh, steps=8, **options):
    loss = lambda p, b: jnp.mean((b @ p["w"] - 1) ** 2)  # noqa: E731
    step = js.make_train_step(loss, optax.sgd(0.1), sync=tx, mesh=mesh, **options)
    state = step.init({"w": np.float32([1, -2, 3])})
    for batch in np.random.default_rng(0).normal(size=(steps, 4, 3)):
        state, _ = step(state, np.float32(batch))
    anchor = tx.algorithm.has_anchor and js.read_anchor(
        step.sync, state.exchange, state.params, mesh=mesh
    )
    return step.consensus(state), step.shares(state), anchor


@pytest.mark.parametrize(
    "name", ["local_sgd", "sgp", "slowmo", "slowmo over sgp", "slowmo inexact", "diloco"]
)
@pytest.mark.parametrize("mode", ["traced", "host"])
def test_a_wrapper_is_as_what_it_wraps(name, mode):
    mesh = js.virtual_mesh({"replica": 4})
    tx = TRANSFORMS[name]()
    wrapped = js.only_finite(tx)
    assert wrapped.algorithm.axes == tx.algorithm.axes
    pairs = zip(*(jax.tree.leaves(ends_of(x, mesh, mode=mode)) for x in (tx, wrapped)), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def test_a_skipped_exchange_does_not_rotate_the_graph_and_fragments_share_one_period():
    sgp, x = TRANSFORMS["sgp"](), jnp.ones(4)
    skip = lambda x: sgp.update(x, sgp.init(x), x, communicate=False)[1]  # noqa: E731
    state = jax.tree.map(lambda x: x[0], jax.vmap(skip, axis_name="replica")(x))
    algorithm = sgp.algorithm
    assert algorithm.phase(2, algorithm.skip_count(state.local, 1)) == ("round 0",)
    many = js.diloco("replica", sync_every=96, fragments=8)
    assert js.only_finite(many).phases() == many.phases()
    assert js.only_finite(many).algorithm.schedules == many.algorithm.schedules


class Sums(NamedTuple):
    """Two parameters, of two models."""

    a: jax.Array
    b: jax.Array


MODELS = [
    {"w": np.float32([[1, 2, 3, 4]] * 4), "v": np.float32([[[5, 6]] * 3] * 4)},
    Sums(np.float32([[[1, -1]] * 8] * 4), np.float32([2, 3, 4, 5])),
]


def trained(tx, params, scheduled):
    """Return parameters and state after four updates; the host schedules it or the program."""

    def program(phase):
        def one(params, state):
            grads = jax.tree.map(
                lambda x: x * (1.0 + jax.lax.axis_index("replica").astype("f4")), params
            )
            updates, state = tx.update(grads, state, params, phase=phase)
            return optax.apply_updates(params, updates), state

        return jax.jit(jax.vmap(one, axis_name="replica"))

    state = jax.vmap(tx.init, axis_name="replica")(params)
    yield
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), params)
    sized = tx.bound({"replica": 4}, types)
    for t in range(1, 5):
        params, state = program(sized.phase(t) if scheduled == "host" else None)(params, state)
        yield
    yield params, state


@pytest.mark.filterwarnings("ignore:slowmo without a `base`")
@pytest.mark.parametrize("scheduled", ["host", "traced"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: js.local_sgd("replica", sync_every=2),
        lambda: js.hierarchical_local_sgd({"replica": 2}),
        lambda: js.sgp("replica", overlap=2),
        lambda: js.slowmo("replica", base=js.sgp("replica"), sync_every=2),
        lambda: js.diloco("replica", sync_every=2, fragments=lambda name: int(name in "vb")),
        lambda: js.only_finite(js.slowmo("replica", sync_every=2, fragments=2, delay=1)),
    ],
    ids=["local_sgd", "hierarchical", "sgp", "slowmo", "diloco", "only_finite"],
)
def test_one_object_trains_two_models_in_turn(make, scheduled):
    """Nothing of one model is remembered for the other."""
    tx = make()
    turns = list(zip(*(trained(tx, model, scheduled) for model in MODELS), strict=True))
    for model, found in zip(MODELS, turns[-1], strict=True):
        *_, wanted = trained(make(), model, scheduled)
        jax.tree.map(np.testing.assert_array_equal, found, wanted)
