"""What a report predicts, beside what the compiled program says and what is worked by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxslowmo as js

D, B, M = 32, 4, 4  # width, examples of a microbatch, microbatches
FLOPS = 2 * B * D * D  # of one matrix product
SIZE = 4 * B * D  # bytes of one activation


def linear(params, x):
    return x @ params


def loss(y, batch):
    del batch
    return jnp.mean(y)


MODEL = js.LayeredModel([linear] * 4, loss)
PARAMS = [np.eye(D, dtype=np.float32)] * 4
BATCH = np.ones((B * M, D), np.float32)


def pipelined(mesh_of, schedule, **options):
    mesh = mesh_of({"stage": schedule.num_stages})
    return js.pipelined(MODEL, PARAMS, schedule, mesh=mesh, **options)


@pytest.fixture(scope="module")
def report(mesh_of):
    """Two linear layers on each of two stages, in one program."""
    return js.schedule_report(pipelined(mesh_of, js.schedules.zero_bubble(2, M)), BATCH)


def test_costs_are_those_of_the_matrix_products(report):
    first, last = report.stages
    assert (first.stage, first.layers, last.stage, last.layers) == (0, (0, 2), 1, (2, 4))
    assert first.forward == pytest.approx(2 * FLOPS, rel=0.01)
    # The first layer has no input whose gradient anybody wants.
    assert first.backward_input == 0
    assert first.backward_weight == pytest.approx(3 * FLOPS, rel=0.01)
    assert last.backward_input == pytest.approx(2 * FLOPS, rel=0.05)
    assert last.backward_weight == pytest.approx(2 * FLOPS, rel=0.05)
    assert report.unit == "FLOP"


def test_layers_that_are_one_loop_cost_all_and_their_state_stays(mesh_of):
    def counted(params, x, *, state):
        return x @ params, state + 1

    model, states = js.LayeredModel([counted] * 10, loss), [np.zeros((), np.float32)] * 10
    mesh, schedule = mesh_of({"stage": 2}), js.schedules.gpipe(2, M)
    pipe = js.pipelined(model, PARAMS[:1] * 10, schedule, mesh=mesh, model_state=states)
    assert [run.count for run in pipe.layout.all_runs[0]] == [5]
    report = js.schedule_report(pipe, BATCH, compiled=False)
    first, last = report.stages
    assert first.forward == pytest.approx(5 * FLOPS, rel=0.01)
    assert last.backward_input + last.backward_weight == pytest.approx(10 * FLOPS, rel=0.05)
    assert report.sent_bytes == (M * SIZE, M * SIZE)


def test_the_bubble_is_that_of_the_table_with_these_costs(report):
    costs = {
        name: [getattr(stage, name) for stage in report.stages]
        for name in ("forward", "backward_input", "backward_weight")
    }
    assert report.lockstep
    assert report.simulation == report.schedule.simulate(**costs, lockstep=True)
    assert report.bubble == report.simulation.bubble > 0
    assert report.other == report.schedule.simulate(**costs)


def test_bytes_by_hand(report):
    first, last = report.stages
    # W of a layer needs its input; the microbatch itself waits elsewhere.
    assert first.stash_bytes == SIZE
    assert last.stash_bytes == 2 * SIZE
    assert report.schedule.stash == (2, 2)
    assert report.held_bytes == (
        2 * first.stash_bytes + first.kept_bytes,
        2 * last.stash_bytes + 2 * last.kept_bytes,
    )
    assert report.sent_bytes == (M * SIZE, M * SIZE)


def test_the_compiled_program_agrees(report):
    ticks = len(report.schedule.ticks())
    assert report.compiled.trip_counts == (ticks,)
    assert report.compiled.permutes == 2 * ticks
    assert report.compiled.permuted_bytes == report.permuted_bytes == 2 * ticks * SIZE
    assert report.compiled.temp_bytes >= max(report.held_bytes)


def test_text_and_picture(report, tmp_path):
    text = str(report)
    assert text.startswith("zero_bubble: 2 stages, 4 microbatches\n")
    assert text.endswith(js.reports.schedule_grid(report.schedule))
    lines = [line.split() for line in text.splitlines()]
    ticks = str(len(report.schedule.ticks()))
    compiled, last = report.compiled, report.stages[1]
    costs = [f"{c:.4g}" for c in (last.forward, last.backward_input, last.backward_weight)]
    sizes = [f"{n:,}" for n in (last.temp_bytes, last.stash_bytes, last.kept_bytes)]
    for line in (
        ["ticks", ticks, ticks],
        ["bubble,", "in", "lockstep", f"{100 * report.bubble:.1f}", "%"],
        ["bubble,", "if", "stages", "ran", "free", f"{100 * report.other.bubble:.1f}", "%"],
        ["temporary", "bytes,", "a", "device", f"{compiled.temp_bytes:,}"],
        ["1", "1", "2", "to", "3", *costs, *sizes],
        ["1", "2", f"{report.held_bytes[1]:,}", str(M), f"{M * SIZE:,}"],
    ):
        assert line in lines
    held = [line for line in lines if line[:2] == ["held", "bytes,"]]
    assert held[0][-1] == f"{max(report.held_bytes):,}"
    report.picture(tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def test_stages_that_the_host_dispatches(mesh_of):
    """Each runs free; a backward pass that is not split counts as B."""
    mesh, schedule = mesh_of({"replica": 2, "stage": 2}), js.schedules.one_f_one_b(2, M)
    pipe = js.pipelined(MODEL, PARAMS, schedule, mesh=mesh, executor="host")
    report = js.schedule_report(pipe, BATCH, flops_per_second=FLOPS, bytes_per_second=SIZE / 4)
    facts = (report.lockstep, report.compiled, report.permuted_bytes, report.unit)
    assert facts == (False, None, 0, "s")
    first, last = report.stages
    assert first.forward == pytest.approx(2, rel=0.01)
    assert (last.backward_input, last.backward_weight) == (pytest.approx(4, rel=0.05), 0)
    assert last.kept_bytes == 0 < last.temp_bytes
    costs = {x: [getattr(s, x) for s in report.stages] for x in ("forward", "backward_input")}
    assert report.simulation == schedule.simulate(**costs, backward_weight=0, send=4.0)
    assert "compiled" not in str(report)
    assert "each stage as soon as it can" in str(report)


def test_forward_passes_alone_whose_loop_bodies_count_once(mesh_of):
    def looped(params, x):
        return jax.lax.scan(lambda y, _: (y @ params, None), x, None, length=8)[0]

    model = js.LayeredModel([looped, linear], loss)
    schedule = js.schedules.gpipe(2, M, forward_only=True)
    pipe = js.pipelined(model, PARAMS[:2], schedule, mesh=mesh_of({"stage": 2}))
    report = js.schedule_report(pipe, BATCH)
    assert report.held_bytes == (0, 0)
    assert report.sent_bytes == (M * SIZE, 0)
    assert report.compiled.permuted_bytes == report.permuted_bytes == (M + 1) * SIZE
    assert all(stage.backward_input == 0 for stage in report.stages)
    assert report.stages[0].forward == pytest.approx(FLOPS, rel=0.01)


def test_shards_of_a_microbatch_compute_and_send_their_part(mesh_of):
    specs = [jax.sharding.PartitionSpec("fsdp")] * 4
    mesh = mesh_of({"replica": 2, "stage": 2, "fsdp": 2})
    schedule = js.schedules.one_f_one_b(2, M)
    pipe = js.pipelined(MODEL, PARAMS, schedule, mesh=mesh, data_axes=("fsdp",), param_specs=specs)
    report = js.schedule_report(pipe, BATCH, compiled=False)
    assert report.stages[0].forward == pytest.approx(FLOPS, rel=0.01)
    assert report.permuted_bytes == len(schedule.ticks()) * SIZE


@pytest.mark.parametrize(
    ("schedule", "distances"),
    [
        (js.schedules.zbv(2, M), 1),
        (js.schedules.zbv(3, M), 2),
        (js.schedules.interleaved(2, M, 2), 1),
    ],
    ids=["zbv of 2", "zbv of 3", "interleaved"],
)
def test_schedules_permute_over_every_distance_in_every_tick(mesh_of, schedule, distances):
    layers = schedule.num_stages * schedule.num_chunks
    model, mesh = js.LayeredModel([linear] * layers, loss), mesh_of({"stage": schedule.num_stages})
    pipe = js.pipelined(model, PARAMS[:1] * layers, schedule, mesh=mesh)
    report = js.schedule_report(pipe, BATCH, compiled=distances == 2)
    ticks = len(schedule.ticks())
    assert report.permuted_bytes == ticks * distances * 2 * SIZE
    if report.compiled:
        assert report.compiled.permuted_bytes == report.permuted_bytes
        assert report.compiled.trip_counts == (ticks,)
