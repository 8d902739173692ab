"""What gossip sends, counted in the program: permutes and bytes per exchange."""

import itertools
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from support.exhaustive import sweep
from support.reports import FLOAT32_BYTES, HALF_BYTES, PARAMS, report, rows

BYTES = FLOAT32_BYTES + HALF_BYTES
BUFFERS = 2  # one per dtype
NODES = 4
IRREGULAR = js.topology.from_phone_book([[1, 3], [0, 2], [0, 3], [1, 0]])
UNEVEN = js.topology.self_weighted([0.3, 0.5, 0.65, 0.4])


def permutes(num_permutations: int, *, weights: bool, num_bytes: int = BYTES) -> set:
    """Rows of one exchange: all buffers, and 4 bytes of w, in every permutation."""
    count = num_permutations * (BUFFERS + weights)
    return {("collective-permute", count, num_permutations * (num_bytes + 4 * weights))}


# name: (arguments, permutations per exchange, whether weights are sent)
CASES = {
    "default": ({}, 1, False),
    "late": ({"overlap": 1}, 1, False),
    # All nodes keep the same share, so all weights move alike.
    "later": ({"overlap": 3}, 1, False),
    "ring of two peers": (
        {"graph": js.topology.ring(NODES, peers_per_step=2), "push_sum": False},
        2,
        False,
    ),
    "complete": ({"graph": js.topology.complete}, 3, False),
    "irregular": ({"graph": IRREGULAR}, 2, True),
    "star": ({"graph": js.topology.star}, 3, True),
    "uneven": ({"mixing": UNEVEN}, 1, True),
    "uneven later": ({"mixing": UNEVEN, "overlap": 2}, 1, True),
}


@pytest.fixture(params=["traced", "host"])
def mode(request) -> str:
    return request.param


@pytest.fixture
def mesh(mesh_of):
    return mesh_of({"replica": NODES})


@pytest.fixture(params=["devices", "explicit", "virtual"])
def any_mesh(request, mesh_of):
    if request.param == "virtual":
        return js.virtual_mesh({"replica": NODES})
    return mesh_of({"replica": NODES}, explicit=request.param == "explicit")


def exchanges(found: js.CommReport) -> list[str]:
    kinds = [kind for kind in found.kinds if kind.startswith("round ")]
    assert kinds
    return kinds


@pytest.mark.parametrize("name", CASES)
def test_each_permutation_sends_every_buffer_once(name, mesh, mode):
    arguments, count, weights = CASES[name]
    found = report(mesh, mode, sync=js.sgp("replica", **arguments))
    for kind in exchanges(found):
        assert rows(found, kind) == permutes(count, weights=weights)
    if mode == "host":
        assert list(found.kinds) == exchanges(found)
    elif "local" in found.kinds:  # what happens beside the branches of exchanges
        assert rows(found, "local") == set()


def test_on_every_kind_of_mesh(any_mesh, mode):
    found = report(any_mesh, mode, sync=js.sgp("replica", graph=IRREGULAR))
    assert exchanges(found) == ["round 0", "round 1"]
    for kind in exchanges(found):
        assert rows(found, kind) == permutes(2, weights=True)


def test_several_buckets(mesh, mode):
    found = report(mesh, mode, sync=js.sgp("replica", bucket_bytes=8192))
    for kind in exchanges(found):
        assert rows(found, kind) == {("collective-permute", 4, BYTES)}


@pytest.mark.parametrize("graph", [None, IRREGULAR])
def test_two_levels_move_one_part_per_device(mesh_of, mode, graph):
    mesh = mesh_of({"replica": NODES, "device": 2})
    found = report(mesh, mode, sync=js.sgp("replica", graph=graph, local_axis_name="device"))
    weights = graph is not None
    times = 2 if weights else 1
    for kind in exchanges(found):
        ((collective, count, num_bytes),) = rows(found, kind)
        assert (collective, count) == ("collective-permute", times * (BUFFERS + weights))
        # Padding apart, see `shard_layout`.
        sent = num_bytes // times - 4 * weights
        assert BYTES / 2 <= sent <= BYTES / 2 + 8192
        gathered = [r for r in rows(found, kind, "device") if r[0] == "all-gather"]
        assert gathered == [("all-gather", BUFFERS, 2 * sent)]


def slow_over(base: js.ParameterTransform, **options) -> js.ParameterTransform:
    return js.slowmo("replica", base=base, sync_every=4, **options)


@pytest.mark.parametrize(
    ("name", "shard_state"),
    sweep(
        itertools.product(["default", "later", "irregular", "uneven later"], [True, False]),
        lambda name, shard_state: shard_state == (name in ("default", "irregular")),
    ),
)
def test_slow_step_sends_what_it_sends_without_gossip(name, mesh, mode, shard_state):
    arguments, count, weights = CASES[name]
    local = js.local_sgd("replica", sync_every=2)
    without = report(mesh, mode, sync=slow_over(local, shard_state=shard_state))
    base = js.sgp("replica", **arguments)
    found = report(mesh, mode, sync=slow_over(base, shard_state=shard_state))
    sent = rows(found, "slow")
    if weights:  # sum of w, 4 bytes
        if shard_state:
            sent = sent - {("all-reduce", 1, 4)}
            assert len(sent) < len(rows(found, "slow"))
        else:
            ((collective, n, num_bytes),) = sent
            sent = {(collective, n - 1, num_bytes - 4)}
    assert sent == rows(without, "slow")
    for kind in exchanges(found):
        assert rows(found, kind) == permutes(count, weights=weights)


def test_slow_step_on_what_gossip_left_adds_nothing(mesh, mode):
    sync = slow_over(js.sgp("replica", graph=IRREGULAR), exact_average=False)
    found = report(mesh, mode, sync=sync)
    for kind in exchanges(found):
        assert rows(found, kind) == permutes(2, weights=True)
    if mode == "host":
        assert set(found.kinds) == {"round 0", "round 1", "round 1+slow"}
    else:
        assert rows(found, "slow") == set()


def test_traced_and_host_scheduled_reports_agree(mesh_of):
    mesh = mesh_of({"replica": NODES, "device": 2})
    sync = slow_over(
        js.sgp("replica", graph=IRREGULAR, overlap=2, local_axis_name="device"),
        local_axis_name="device",
    )
    traced, host = (report(mesh, mode, sync=sync) for mode in ("traced", "host"))
    assert set(host.kinds) == {"round 0", "round 1", "slow"} <= set(traced.kinds)
    for kind in host.kinds:
        for axis in ("replica", "device"):
            assert rows(traced, kind, axis) == rows(host, kind, axis)


# The program of one update


def update(sync, mesh, **keywords) -> str:
    """Its StableHLO, over devices."""

    def per_device(params):
        params = jax.tree.map(lambda x: x[0], params)
        updates, state = sync.update(params, sync.init(params), params, **keywords)
        out = optax.apply_updates(params, updates), state
        return jax.tree.map(lambda x: x[None], out)

    stacked = jax.tree.map(lambda s: jnp.zeros((NODES, *s.shape), s.dtype), PARAMS)
    spec = P("replica")
    program = jax.shard_map(per_device, mesh=mesh, in_specs=spec, out_specs=spec)
    return jax.jit(program).lower(stacked).as_text()


def conditionals(text: str) -> int:
    return text.count("stablehlo.case") + text.count("stablehlo.if")


def pairs(text: str) -> list[list[tuple[int, int]]]:
    """Source and destination of every permute, in order of appearance."""
    found = re.findall(r"collective_permute.*?source_target_pairs = dense<(\[\[.*?\]\])>", text)
    return [sorted(map(tuple, eval(numbers))) for numbers in found]


def test_rounds_are_the_branches_of_one_conditional(mesh):
    for graph, rounds in ((None, 2), (IRREGULAR, 2), (js.topology.directed_linear, 4)):
        text = update(js.sgp("replica", graph=graph), mesh)
        assert conditionals(text) == 1
        assert len(re.findall(r"(?m)^ *\}, \{$", text)) == rounds - 1
    assert conditionals(update(js.sgp("replica", graph=js.topology.ring), mesh)) == 0
    communicate = jnp.ones([], bool)
    assert conditionals(update(js.sgp("replica"), mesh, communicate=communicate)) == 2


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_given_phase_leaves_one_round(mesh, overlap):
    sync = js.sgp("replica", graph=IRREGULAR, overlap=overlap)
    for t in (1, 2):
        text = update(sync, mesh, phase=sync.phase(t))
        assert conditionals(text) == 0
        # Two dtypes and w, in each permutation of that exchange, and no pair that is not in it.
        expected = sorted(sorted(p) for p in IRREGULAR.permutations(t - 1)) * (BUFFERS + 1)
        assert sorted(pairs(text)) == sorted(expected)


def test_these_permutations_are_partial():
    assert {len(p) for step in (0, 1) for p in IRREGULAR.permutations(step)} == {1, 2, 3}


@pytest.mark.parametrize("keywords", [{"phase": ()}, {"communicate": False}])
@pytest.mark.parametrize("graph", [None, IRREGULAR])
def test_paused_update_holds_no_collective(mesh, keywords, graph):
    text = update(js.sgp("replica", graph=graph, overlap=2), mesh, **keywords)
    assert "collective" not in text
    assert "all_" not in text
    assert conditionals(text) == 0


@pytest.mark.parametrize("graph", [js.topology.star(NODES), js.topology.ring(NODES)])
def test_late_exchange_does_not_wait_for_updates(graph):
    """With overlap what is sent depends on the parameters alone."""

    def sent(overlap: int) -> set[str]:
        sync = js.sgp("replica", graph=graph, overlap=overlap)

        def step(params, updates):
            return sync.update(updates, sync.init(params), params, phase=sync.phase(1))

        flat = jax.ShapeDtypeStruct((5,), jnp.float32)
        traced = jax.make_jaxpr(step, axis_env=[("replica", NODES)])(flat, flat)
        return depends(traced.jaxpr)

    assert sent(0) == {"params", "updates"}
    assert sent(1) == sent(3) == {"params"}


def depends(jaxpr) -> set[str]:
    """Which of the two arguments reach an operand of a permute."""
    reach = dict(zip(jaxpr.invars, ({"params"}, {"updates"}), strict=True))
    found: set[str] = set()
    for eqn in jaxpr.eqns:
        into = set().union(*(reach.get(v, set()) for v in eqn.invars if not hasattr(v, "val")))
        if eqn.primitive.name == "ppermute":
            found |= into
        reach |= dict.fromkeys(eqn.outvars, into)
    return found


def test_leaves_without_elements_are_not_sent(mesh):
    params = {"a": jnp.ones((4, 3)), "nothing": jnp.ones((4, 0, 2), jnp.bfloat16)}
    tx = js.sgp("replica")

    def update(p):
        p = jax.tree.map(lambda x: x[0], p)
        updates, _ = tx.update(p, tx.init(p), p, phase=("round 0",))
        return jax.tree.map(lambda x: x[None], updates)

    mapped = jax.jit(
        jax.shard_map(update, mesh=mesh, in_specs=P("replica"), out_specs=P("replica"))
    )
    found = js.comm_report_of(mapped.lower(params), mesh=mesh, compile=False)
    assert rows(found, "round 0") == {("collective-permute", 1, 12)}
