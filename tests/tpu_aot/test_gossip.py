"""Gossip as TPU compilers schedule it: whether the exchange runs beside forward and backward pass.

Read off the schedule of a whole training step; nothing runs, so it tells structure, not speed.
"""

import jax
import jax.numpy as jnp
import pytest

import jaxslowmo as js
from support.described import lowered_step
from support.exhaustive import sweep
from support.tpu_schedule import Schedule, read_schedule
from support.tpu_slices import tpu_mesh

LAYERS, WIDTH = 4, 512
# Forward, and backward to the weights and (but for the first layer) to the input.
PRODUCTS = 3 * LAYERS - 1
NUM_PARAMETERS = LAYERS * WIDTH * WIDTH


def mlp_loss(params, batch):
    x = batch
    for name in sorted(params):
        x = jnp.tanh(x @ params[name])
    return jnp.mean(jnp.square(x))


def eight():
    return tpu_mesh("v5e:2x4", {"replica": 8})


def two_levels():
    return tpu_mesh("v5e:2x4", {"replica": 4, "device": 2})


def programs(sync, mesh, *, mode="host", dtype=jnp.float32):
    params = {f"w{i}": jax.ShapeDtypeStruct((WIDTH, WIDTH), dtype) for i in range(LAYERS)}
    batch = jax.ShapeDtypeStruct((32 * mesh.size, WIDTH), dtype)
    return lowered_step(mlp_loss, sync, params, batch, mesh, mode=mode)


def schedule_of(lowered, **compiler_options) -> Schedule:
    text = lowered.compile(compiler_options=compiler_options or None).as_text()
    schedule = read_schedule(text)
    # The reader sees every product that the program asks for, and no more.
    assert lowered.as_text().count("stablehlo.dot_general") == PRODUCTS
    assert schedule.num_products == PRODUCTS
    return schedule


def check_beside(lowered, *, permutes: int = 1, **compiler_options) -> None:
    """All of the exchange runs beside all of forward and backward pass."""
    schedule = schedule_of(lowered, **compiler_options)
    assert len(schedule.starts) == permutes, schedule
    assert schedule.blocking == schedule.in_branches == 0
    assert schedule.runs_beside, schedule


def sent(lowered, mesh, level="compiled") -> dict[tuple[str, str], tuple[int, int]]:
    """(count, bytes) of all that a program sends, by axis and collective."""
    report = js.comm_report_of({"step": lowered}, mesh=mesh)
    rows = report.select(level=level)
    assert len({(row.axis, row.collective) for row in rows}) == len(rows)
    return {(row.axis, row.collective): (row.count, row.bytes) for row in rows}


@pytest.mark.parametrize("overlap", sweep([0, 1], lambda overlap: overlap == 1))
def test_default_graph_host_scheduled(overlap):
    """In every round: with overlap=1 beside all products, with overlap=0 after the last."""
    mesh = eight()
    found = programs(js.sgp("replica", overlap=overlap), mesh)
    assert list(found) == ["round 0", "round 1", "round 2"]
    for lowered in found.values():
        schedule = schedule_of(lowered)
        assert len(schedule.starts) == 1
        assert schedule.runs_beside == (overlap == 1), schedule
        assert schedule.runs_behind == (overlap == 0), schedule
        assert sent(lowered, mesh) == {("replica", "collective-permute"): (1, 4 * NUM_PARAMETERS)}


@pytest.mark.parametrize("overlap", sweep([0, 1, 2], lambda overlap: overlap < 2))
def test_static_graph_traced(overlap):
    mesh = eight()
    sync = js.sgp("replica", graph=js.topology.ring, overlap=overlap)
    lowered = programs(sync, mesh, mode="traced")["all"]
    schedule = schedule_of(lowered)
    assert len(schedule.starts) == 1
    assert schedule.in_branches == 0
    assert schedule.runs_beside == (overlap > 0), schedule
    assert schedule.runs_behind == (overlap == 0), schedule
    assert sent(lowered, mesh) == {("replica", "collective-permute"): (1, 4 * NUM_PARAMETERS)}


def test_dynamic_graph_traced_does_not_overlap():
    """Each round stands in a branch of a conditional, and nothing runs beside a conditional."""
    lowered = programs(js.sgp("replica", overlap=1), eight(), mode="traced")["all"]
    schedule = schedule_of(lowered)
    assert schedule.starts == ()
    assert schedule.blocking == 0
    assert schedule.in_branches == 3
    report = js.comm_report_of(lowered)
    assert report.kinds == ("local", "round 0", "round 1", "round 2")
    assert report.count(kind="local", level="compiled") == 0
    for kind in report.kinds[1:]:
        (row,) = report.select(kind=kind, level="compiled")
        assert (row.collective, row.count, row.conditional) == ("collective-permute", 1, True)
        assert row.bytes == 4 * NUM_PARAMETERS


def test_two_peers():
    mesh = eight()
    graph = js.topology.npeer_directed_exponential(8, peers_per_step=2)
    found = programs(js.sgp("replica", graph=graph, overlap=1), mesh)
    assert list(found) == ["round 0", "round 1"]
    for lowered in found.values():
        check_beside(lowered, permutes=2)
        assert sent(lowered, mesh) == {("replica", "collective-permute"): (2, 8 * NUM_PARAMETERS)}


def test_push_sum_weights():
    """An irregular graph sends 4 bytes of weight with every permute.

    The compiler makes the update part of the products that give the weights' gradients, and so
    these come after the exchange; the others run beside it.
    """
    mesh = eight()
    book = [[(i + 1) % 8] for i in range(8)]
    book[0].append(4)
    graph = js.topology.from_phone_book(book, None)
    lowered = programs(js.sgp("replica", graph=graph, overlap=1), mesh)["round 0"]
    schedule = schedule_of(lowered)
    assert len(schedule.starts) == 4
    assert max(schedule.starts) < schedule.products[0]
    assert 2 * schedule.num_beside >= len(schedule.products), schedule
    expected = 2 * (4 * NUM_PARAMETERS + 4)
    assert sent(lowered, mesh) == {("replica", "collective-permute"): (4, expected)}


def test_bfloat16():
    mesh = eight()
    found = programs(js.sgp("replica", overlap=1), mesh, dtype=jnp.bfloat16)
    lowered = found["round 1"]
    check_beside(lowered)
    assert sent(lowered, mesh) == {("replica", "collective-permute"): (1, 2 * NUM_PARAMETERS)}


def test_two_levels():
    """Each device sends its half; the gather restores the whole after the backward pass."""
    mesh = two_levels()
    sync = js.sgp("replica", overlap=1, local_axis_name="device")
    for lowered in programs(sync, mesh).values():
        check_beside(lowered)
        found = sent(lowered, mesh)
        assert found.pop(("replica", "collective-permute")) == (1, 4 * NUM_PARAMETERS // 2)
        assert found.pop(("device", "all-gather")) == (1, 4 * NUM_PARAMETERS)
        # Gradients, and the loss in the same all-reduce or in one of its own.
        assert found.pop(("device", "all-reduce"))[1] == 4 * NUM_PARAMETERS + 4
        assert not found


@pytest.mark.parametrize("levels", sweep([1, 2], lambda levels: levels == 2))
def test_base_of_slowmo(levels):
    """Between slow steps the base overlaps; a slow step holds none of its permutes."""
    mesh = eight() if levels == 1 else two_levels()
    local = {"local_axis_name": "device"} if levels == 2 else {}
    base = js.sgp("replica", overlap=1, **local)
    sync = js.slowmo("replica", base=base, sync_every=6, **local)
    found = programs(sync, mesh)
    slow = schedule_of(found.pop("slow"))
    assert slow.starts == ()
    assert len(found) == (3 if levels == 1 else 2)
    for lowered in found.values():
        check_beside(lowered)
        amounts = {key: value for key, value in sent(lowered, mesh).items() if "replica" in key}
        expected = {("replica", "collective-permute"): (1, 4 * NUM_PARAMETERS // levels)}
        assert amounts == expected


def test_base_of_traced_slowmo_does_not_overlap():
    """A slow step skips the base's exchange, so a traced program has it in a conditional."""
    base = js.sgp("replica", graph=js.topology.ring, overlap=1)
    sync = js.slowmo("replica", base=base, sync_every=6)
    schedule = schedule_of(programs(sync, eight(), mode="traced")["all"])
    assert schedule.starts == ()
    assert schedule.in_branches == 1


def test_five_permutes_at_a_time():
    """By default the compiler keeps 5 permutes under way; the others come before the products."""
    sync = js.sgp("replica", graph=js.topology.complete, overlap=1)
    lowered = programs(sync, eight())["round 0"]
    schedule = schedule_of(lowered)
    assert len(schedule.starts) == 7
    assert sum(done > schedule.products[-1] for done in schedule.dones) == 5
    assert sum(done < schedule.products[0] for done in schedule.dones) == 2
    assert schedule_of(lowered, xla_max_concurrent_async_collective_permutes="7").runs_beside


def test_large_v5e_overlaps_some_graphs_only():
    """v5e beyond 16 chips: a permute overlaps if every pair is 2^k chips apart in a row or column.

    Elsewhere it blocks. So the default graph does there, and a hypercube does not.
    """
    mesh = tpu_mesh("v5e:8x8", {"replica": 64})
    found = programs(js.sgp("replica", overlap=1), mesh)
    schedule = schedule_of(found["round 0"])
    assert schedule.starts == ()
    assert schedule.blocking == 1
    found = programs(js.sgp("replica", graph=js.topology.hypercube, overlap=1), mesh)
    assert len(found) == 6
    for name in ("round 0", "round 5"):
        check_beside(found[name])


@pytest.mark.parametrize("topology", sweep(["v6e:8x8", "v5p:4x4x4"], lambda name: "v5p" in name))
def test_other_chips_overlap_with_an_option(topology):
    """Without it the exchange ends before the products (v6e) or amid them (v5p)."""
    mesh = tpu_mesh(topology, {"replica": 64})
    lowered = programs(js.sgp("replica", overlap=1), mesh)["round 0"]
    check_beside(lowered, xla_tpu_enable_all_experimental_scheduler_features="true")


def test_between_slices():
    """Across slices a permute becomes a send and a recv, which run beside the products as well."""
    mesh = tpu_mesh("v5e:4x4", {"replica": 4, "device": 16}, num_slices=4)
    sync = js.sgp("replica", graph=js.topology.ring, overlap=1, local_axis_name="device")
    lowered = programs(sync, mesh)["round 0"]
    check_beside(lowered)
    found = sent(lowered, mesh)
    for name in ("send", "recv"):
        assert found["replica", name] == (1, 4 * NUM_PARAMETERS // 16)
    assert ("replica", "collective-permute") not in found


HLO = """HloModule example, is_scheduled=true, num_partitions=8

%multiplies (a: f32[8,8], b: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8]{1,0} parameter(0)
  %b = f32[8,8]{1,0} parameter(1)
  ROOT %convolution = f32[8,8]{1,0} convolution(%a, %b), dim_labels=bf_io->bf
}

%calls (c: f32[8,8]) -> f32[8,8] {
  %c = f32[8,8]{1,0} parameter(0)
  ROOT %inner = f32[8,8]{1,0} fusion(%c, %c), kind=kLoop, calls=%multiplies
}

%adds (d: f32[8,8]) -> f32[8,8] {
  %d = f32[8,8]{1,0} parameter(0)
  ROOT %sum = f32[8,8]{1,0} add(%d, %d)
}

ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
  %start = (f32[8,8]{1,0}, f32[8,8]{1,0}) collective-permute-start(%x), source_target_pairs={{0,1}}
  %convolution_by_name_only = f32[8,8]{1,0} fusion(%x), kind=kOutput, calls=%adds
  %plain = f32[8,8]{1,0} fusion(%x), kind=kLoop, calls=%calls
  %done = f32[8,8]{1,0} collective-permute-done(%start)
  %last = f32[8,8]{1,0} dot(%plain, %done), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %waits = f32[8,8]{1,0} collective-permute(%last), source_target_pairs={{0,1}}
}
"""


def test_schedule_reader():
    """A product is known by what a fusion computes, not by its name or kind."""
    schedule = read_schedule(HLO)
    assert schedule == Schedule((1,), (4,), 1, (3, 5), 2, 0)
    assert not schedule.runs_beside
    assert not schedule.runs_behind
