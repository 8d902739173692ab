"""Tests of `js.sgp`: two rounds worked by hand, a single node, phases, what is refused."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxslowmo as js
from support.bad_input import PARAMS, one_update, trace, warning_messages
from support.executions import EXECUTIONS, lift

ring = js.topology.ring
IRREGULAR = js.topology.from_phone_book([[1, 3], [0, 2], [0, 3], [1, 0]])


def test_push_sum_weighs_out_uneven_arrivals_in_two_rounds():
    """Node 0 sends to node 1, then to node 2; both always send to node 0."""
    graph = js.topology.from_phone_book([[1, 2], [0], [0]], 1)
    tx = js.sgp("replica", graph=graph)

    def one(w):
        state, seen = tx.init(w), []
        for _ in range(2):
            update, state = tx.update(jnp.zeros(()), state, w)
            w = w + update
            seen.append((w, state.weight))
        return seen

    (first, w1), (second, w2) = jax.vmap(one, axis_name="replica")(jnp.asarray([4.0, 8.0, 0.0]))
    # x = (2 + 4 + 0, 2 + 4, 0), w = (0.5 + 0.5 + 0.5, 0.5 + 0.5, 0.5)
    np.testing.assert_allclose(w1, [1.5, 1.0, 0.5])
    np.testing.assert_allclose(first, [4, 6, 0], atol=1e-6)
    # x = (3 + 3 + 0, 3, 3 + 0), w = (0.75 + 0.5 + 0.25, 0.5, 0.75 + 0.25)
    np.testing.assert_allclose(w2, [1.5, 0.5, 1.0])
    np.testing.assert_allclose(second, [4, 6, 3], atol=1e-6)


# Arguments


@pytest.mark.parametrize("graph", ["ring", 4, [[1], [0]], IRREGULAR.phone_book])
def test_a_graph_of_another_type_is_refused(graph):
    message = r"sgp: `graph` must be a js\.topology\.Graph, a function .* or None, got "
    with pytest.raises(ValueError, match=message + re.escape(repr(graph))):
        js.sgp("replica", graph=graph)


@pytest.mark.parametrize(
    ("graph", "shown"),
    [
        (js.topology.uniform_mixing(), "mixing, which takes (graph, step); did you mean `mixing`?"),
        (js.topology.uniform_mixing, "uniform_mixing, which takes ()."),
        (lambda: ring(4), "<lambda>, which takes ()."),
    ],
)
def test_a_function_that_takes_no_number_of_nodes_is_refused(graph, shown):
    with pytest.raises(ValueError, match=r"sgp: `graph` must be .* got " + re.escape(shown)):
        js.sgp("replica", graph=graph)


@pytest.mark.parametrize("graph", [None, ring, ring(4)])
@pytest.mark.parametrize(
    ("mixing", "shown"),
    [
        ("uniform", "'uniform'."),
        (0.5, "0.5."),
        (js.topology.uniform_mixing, "did you mean uniform_mixing()?"),
        (ring, "ring, which takes (num_nodes, "),
    ],
)
def test_a_mixing_that_is_no_mixing_is_refused(graph, mixing, shown):
    """The error comes at construction, also where the graph has no size yet."""
    with pytest.raises(ValueError, match="`mixing` must be a callable .*" + re.escape(shown)):
        js.sgp("replica", graph=graph, mixing=mixing)


def test_a_function_that_returns_no_graph_is_refused():
    tx = js.sgp("replica", graph=lambda n: [[1], [0]] * n)
    message = r"sgp: `graph` must be .* and the function returned a list"
    with pytest.raises(ValueError, match=message):
        trace(one_update(tx), PARAMS)


@pytest.mark.parametrize("overlap", [-1, 0.5, 1.0, True, "1", None])
def test_an_overlap_that_is_no_count_is_refused(overlap):
    message = rf"sgp: `overlap` counts exchanges and must be an int >= 0, got {overlap!r}"
    with pytest.raises(ValueError, match=message):
        js.sgp("replica", overlap=overlap)


def test_overlap_may_be_an_integer_of_numpy():
    state = js.sgp("replica", overlap=np.int64(3)).init({"w": jnp.ones(2)})
    assert len(state.in_flight) == 2


@pytest.mark.parametrize("push_sum", [None, 1, "no"])
def test_a_push_sum_that_is_no_bool_is_refused(push_sum):
    with pytest.raises(ValueError, match=rf"`push_sum` must be True or False, got {push_sum!r}"):
        js.sgp("replica", push_sum=push_sum)


UNEVEN = js.topology.self_weighted([0.3, 0.5, 0.65, 0.4])


@pytest.mark.parametrize(
    ("graph", "mixing", "where"),
    [
        (IRREGULAR, None, r"step 0 of custom\(4\)"),
        (ring(4), UNEVEN, r"step 0 of ring\(4\)"),
        (js.topology.directed_exponential(4), UNEVEN, r"step 0 of directed_exponential\(4\)"),
    ],
)
def test_push_pull_needs_doubly_stochastic_mixing(graph, mixing, where):
    message = rf"sgp: `push_sum`=False needs a doubly stochastic mixing.* at {where} .*`push_sum`"
    with pytest.raises(ValueError, match=message):
        js.sgp("replica", graph=graph, mixing=mixing, push_sum=False)
    js.sgp("replica", graph=graph, mixing=mixing)


def ring_mixing_with_changes(*changes: tuple[int, int, float]):
    """Return a mixing for ring(4): uniform, except for `changes` in its second exchange."""

    def mixing(graph, step):
        p = js.topology.mixing_matrix(graph, None, step)
        for row, column, value in changes if step == 1 else ():
            p[row, column] = value
        return p

    return mixing


TWO_ROUNDS = js.topology.from_phone_book([[1, 3], [2, 0], [3, 1], [0, 2]])
BAD_MIXINGS = [
    (lambda graph, step: np.eye(3), r"P must have shape \(4, 4\), got \(3, 3\)"),
    (
        ring_mixing_with_changes((0, 0, -0.5), (3, 0, 1.5)),
        r"step 1 .*weights must be finite and >= 0, got P\[0, 0\]",
    ),
    (
        ring_mixing_with_changes((0, 0, 0.6)),
        r"step 1 .*column of P must sum to 1.*column 0 sums to 1\.1",
    ),
    (
        ring_mixing_with_changes((3, 0, 0.25), (2, 0, 0.25)),
        r"step 1 .*P\[2, 0\].*node 0 does not send to node 2",
    ),
    (
        lambda graph, step: js.topology.self_weighted(0.5 + 0.1 * (step > 2))(graph, step),
        r"`mixing` must repeat with .* of 2 rounds.* step 3 differs from step 1: P\[0, 0\] = 0\.6",
    ),
]


@pytest.mark.parametrize(("mixing", "message"), BAD_MIXINGS)
def test_a_mixing_that_breaks_a_rule_is_refused(mixing, message):
    """The error comes at construction for a graph of fixed size, else once the size is set."""
    with pytest.raises(ValueError, match=message):
        js.sgp("replica", graph=TWO_ROUNDS, mixing=mixing)
    later = js.sgp("replica", graph=lambda n: TWO_ROUNDS, mixing=mixing)
    with pytest.raises(ValueError, match=message):
        trace(one_update(later), PARAMS)
    with pytest.raises(ValueError, match=message):
        later.sized({"replica": 4})


def mixing_that_keeps_nothing(graph, step):
    """Return a mixing matrix in which every node passes on all of its values."""
    p = js.topology.mixing_matrix(graph, None, step)
    np.fill_diagonal(p, 0)
    return p / p.sum(0)


def test_late_arrivals_need_a_share_that_stays():
    for overlap in (0, 1):
        js.sgp("replica", graph=ring(4), mixing=mixing_that_keeps_nothing, overlap=overlap)
    message = r"sgp: `overlap`=2 needs a mixing in which every node keeps a share > 0.*diagonal"
    with pytest.raises(ValueError, match=message):
        js.sgp("replica", graph=ring(4), mixing=mixing_that_keeps_nothing, overlap=2)


# Sizes


@pytest.mark.parametrize("graph", [ring(8), lambda n: ring(2 * n)])
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_a_graph_of_another_size_than_the_axis_is_refused(graph, execution):
    tx = js.sgp("replica", graph=graph)
    message = (
        r"sgp: `graph` must have as many nodes as axis 'replica', which has size 4, got ring\(8\)"
    )
    with pytest.raises(ValueError, match=message):
        trace(one_update(tx), PARAMS, execution=execution)
    with pytest.raises(ValueError, match=message):
        tx.sized({"replica": 4})
    with pytest.raises(ValueError, match=message):
        trace(one_update(js.slowmo("replica", base=tx)), PARAMS, execution=execution)


def test_a_transform_that_was_sized_refuses_another_size():
    """The original transform may be given other sizes later."""
    tx = js.sgp("replica")
    sized = tx.sized({"replica": 2})
    tx.sized({"replica": 4})
    message = r"axis 'replica', which has size 4, got npeer_directed_exponential\(2\)"
    with pytest.raises(ValueError, match=message):
        sized.sized({"replica": 4})
    with pytest.raises(ValueError, match=message):
        trace(one_update(sized), PARAMS)


def test_nodes_of_several_axes_count_together():
    tx = js.sgp(("node", "replica"), graph=ring(4))
    tx.sized({"node": 2, "replica": 2})
    with pytest.raises(ValueError, match=r"axis \('node', 'replica'\), which has size 8, got ring"):
        tx.sized({"node": 2, "replica": 4})


@pytest.mark.parametrize("make_mesh", [js.make_mesh, js.virtual_mesh])
@pytest.mark.parametrize("slow", [False, True])
def test_training_step_refuses_a_graph_of_another_size(make_mesh, slow):
    sync = js.sgp("replica", graph=ring(8))
    if slow:
        sync = js.slowmo("replica", base=sync)
    with pytest.raises(ValueError, match=r"'replica', which has size 4, got ring\(8\)"):
        js.make_train_step(
            lambda params, batch: jnp.sum(params["w"]),
            optax.sgd(0.1),
            sync=sync,
            mesh=make_mesh({"replica": 4}),
        )


# Phases


@pytest.mark.parametrize(
    "phase",
    [
        ("average",),
        ("slow",),
        ("round",),
        ("round x",),
        ("round -1",),
        ("round 0", "round 1"),
        ("round 0", "slow"),
        ("exchange 0",),
        (0,),
        "round 0",
        ["round 0"],
    ],
)
def test_a_phase_of_another_transform_is_refused(phase):
    message = r"sgp: `phase` must come from `transform\.phase\(t\)`.*got " + re.escape(repr(phase))
    with pytest.raises(ValueError, match=message):
        trace(one_update(js.sgp("replica", graph=IRREGULAR), phase=phase), PARAMS)


def test_a_phase_of_another_base_is_refused_under_slow_momentum():
    tx = js.slowmo("replica", base=js.sgp("replica"), exact_average=False)
    with pytest.raises(ValueError, match=r"sgp: `phase` must come from .*got \('average',\)"):
        trace(one_update(tx, phase=("average", "slow")), PARAMS)


# Warnings


def test_phases_of_an_unknown_number_of_replicas_warn_once():
    tx = js.sgp("replica")
    messages = warning_messages(lambda: tx.phase(1), lambda: tx.phase(2))
    assert len(messages) == 1
    assert re.search(r"sgp: .*do not repeat.*`transform\.sized\(\{axis: size\}\)`", messages[0])
    sized = tx.sized({"replica": 4})
    assert warning_messages(lambda: sized.phase(1), sized.phases) == []
    assert [sized.phase(t) for t in (1, 2, 3)] == [("round 0",), ("round 1",), ("round 0",)]
    assert warning_messages(lambda: js.sgp("replica", graph=IRREGULAR).phase(1)) == []


def test_unsized_phases_are_right_all_the_same():
    tx = js.sgp("replica")
    warning_messages(lambda: tx.phase(1))
    sized = tx.sized({"replica": 4})

    def program(sync, t):
        step = lift(one_update(sync, phase=sync.phase(t)), {"replica": 4}, "shard_map", (False,))
        return str(jax.make_jaxpr(step)(PARAMS))

    for t in (1, 2, 7):
        assert program(tx, t).count("perm=") == program(sized, t).count("perm=") > 0
        assert re.findall(r"perm=\(.*?\)\)", program(tx, t)) == re.findall(
            r"perm=\(.*?\)\)", program(sized, t)
        )


@pytest.mark.parametrize("graph", [None, ring, ring(1)])
@pytest.mark.parametrize("overlap", [0, 1, 3])
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_a_single_node_has_nobody_to_talk_to(graph, overlap, execution):
    tx = js.sgp("replica", graph=graph, overlap=overlap).sized({"replica": 1})
    one = jax.tree.map(lambda x: x[:1], PARAMS)
    step = lift(one_update(tx), {"replica": 1}, execution, (False,))
    programs: list[str] = []
    messages = warning_messages(*[lambda: programs.append(str(jax.make_jaxpr(step)(one)))] * 2)
    assert [m for m in messages if "axis 'replica' has size 1" in m] == messages
    assert len(messages) == 1
    assert "ppermute" not in programs[0]
    assert "cond[" not in programs[0]
    assert tx.phases() == [()]
    assert not tx.due(1)


def test_a_single_node_under_slow_momentum_warns_once():
    one = jax.tree.map(lambda x: x[:1], PARAMS)
    tx = js.slowmo("replica", base=js.sgp("replica"), sync_every=1)
    messages = warning_messages(*[lambda: trace(one_update(tx), one, axes={"replica": 1})] * 2)
    assert len(messages) == 1
    assert messages[0].startswith("slowmo: axis 'replica' has size 1")
    messages_of_sgp = warning_messages(
        lambda: trace(one_update(js.sgp("replica")), one, axes={"replica": 1})
    )
    assert [m.partition(":")[0] for m in messages_of_sgp] == ["sgp"]


@pytest.mark.filterwarnings("ignore:.*has size 1")
def test_a_single_node_trains_alone():
    tx = js.sgp("replica", graph=None, overlap=2)
    one = jax.tree.map(lambda x: x[:1], PARAMS)
    updates = jax.vmap(one_update(tx), axis_name="replica")(one)
    assert jax.tree.all(jax.tree.map(np.array_equal, updates, one))
