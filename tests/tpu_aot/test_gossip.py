"""Gossip as TPU compilers schedule it: whether the exchange runs beside forward and backward pass.

Read off the schedule of a whole training step; nothing runs, so it tells structure, not speed.
`test_proofs.py` has gossip on two levels, between slices, as the base of slowmo and without
overlap.
"""

import jax
import jax.numpy as jnp

import jaxslowmo as js
from support.described import lowered_step
from support.outer_programs import BYTES, PARAMS, PRODUCTS, WIDTH, loss
from support.tpu_schedule import Schedule, read_schedule
from support.tpu_slices import tpu_mesh


def eight(topology="v5e:2x4"):
    return tpu_mesh(topology, {"replica": 8})


def programs(mesh, *, mode="host", dtype=jnp.float32, options=None, overlap=1, **sgp):
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), PARAMS)
    batch = jax.ShapeDtypeStruct((32 * mesh.size, WIDTH), dtype)
    sync = js.sgp("replica", overlap=overlap, **sgp)
    return lowered_step(loss, sync, params, batch, mesh, mode=mode, compiler_options=options)


def schedule_of(lowered) -> Schedule:
    schedule = read_schedule(lowered.compile().as_text())
    # The reader sees every product that the program asks for, and no more.
    assert lowered.as_text().count("stablehlo.dot_general") == PRODUCTS
    assert schedule.num_products == PRODUCTS
    return schedule


def check_beside(lowered, mesh, *, permutes=1, num_bytes=BYTES) -> None:
    """The exchange runs beside all of forward and backward pass, and nothing else is sent."""
    compiled = lowered.compile()
    schedule = read_schedule(compiled.as_text())
    assert schedule.num_products == PRODUCTS
    assert len(schedule.starts) == permutes, schedule
    assert schedule.blocking == schedule.in_branches == 0
    assert schedule.runs_beside, schedule
    rows = js.comm_report_of(compiled, mesh=mesh).select(level="compiled")
    found = [(row.axis, row.collective, row.count, row.bytes) for row in rows]
    assert found == [("replica", "collective-permute", permutes, num_bytes)]


def test_a_round_with_two_peers_and_one_in_16_bits_run_beside_all_products():
    mesh = eight()
    two_peers = js.topology.npeer_directed_exponential(8, peers_per_step=2)
    found = programs(mesh, graph=two_peers)
    assert list(found) == ["round 0", "round 1"]
    check_beside(found["round 1"], mesh, permutes=2, num_bytes=2 * BYTES)
    in_16_bits = programs(mesh, dtype=jnp.bfloat16)
    assert list(in_16_bits) == ["round 0", "round 1", "round 2"]
    check_beside(in_16_bits["round 1"], mesh, num_bytes=BYTES // 2)


def test_dynamic_graph_traced_does_not_overlap():
    """Each round stands in a branch of a conditional, and nothing runs beside a conditional."""
    lowered = programs(eight(), mode="traced")["all"]
    schedule = schedule_of(lowered)
    assert (schedule.starts, schedule.blocking, schedule.in_branches) == ((), 0, 3)
    report = js.comm_report_of(lowered)
    assert report.kinds == ("local", "round 0", "round 1", "round 2")
    assert report.count(kind="local", level="compiled") == 0
    for kind in report.kinds[1:]:
        (row,) = report.select(kind=kind, level="compiled")
        assert (row.collective, row.count, row.conditional) == ("collective-permute", 1, True)
        assert row.bytes == BYTES


def test_five_permutes_are_under_way_without_the_recommended_option():
    """The others come before the products."""
    mesh = eight()
    schedule = schedule_of(programs(mesh, graph=js.topology.complete)["round 0"])
    assert len(schedule.starts) == 7
    assert sum(done > schedule.products[-1] for done in schedule.dones) == 5
    assert sum(done < schedule.products[0] for done in schedule.dones) == 2
    options = js.recommended_compiler_options(mesh)
    lowered = programs(mesh, graph=js.topology.complete, options=options)["round 0"]
    check_beside(lowered, mesh, permutes=7, num_bytes=7 * BYTES)


def test_gossip_overlaps_with_the_recommended_options():
    """Without them the exchange ends before the products (v6e) or amid them (v5p)."""
    mesh = eight("v5p:2x2x2")
    assert not schedule_of(programs(mesh)["round 0"]).runs_beside
    options = js.recommended_compiler_options(mesh)
    check_beside(programs(mesh, options=options)["round 0"], mesh)


def test_they_depend_on_the_kind_of_chip():
    permutes = {"xla_max_concurrent_async_collective_permutes": 16}
    scheduler = {"xla_tpu_enable_all_experimental_scheduler_features": True}
    for topology, options in {
        "v4:2x2x1": {},
        "v5e:2x4": permutes,
        "v5p:2x2x2": permutes | scheduler,
        "v6e:2x4": permutes | scheduler,
    }.items():
        assert js.recommended_compiler_options(eight(topology)) == options, topology
