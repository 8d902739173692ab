"""What the program of a pipeline computes, sends and holds, and where its batch waits."""

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.pipeline import _one_program
from support.layered import assert_close, language_model, tokens

SCHEDULE = js.schedules.one_f_one_b(2, 4)
MODEL, PARAMS = language_model(2)
BLOCK = {"up": P("fsdp"), "bias": P(), "down": P(None, "fsdp")}
SPECS = [P(None, "fsdp"), BLOCK, BLOCK, P(None, "fsdp")]


def test_each_collective_sends_the_bytes_of_the_table(mesh_of):
    mesh = mesh_of({"stage": 2, "fsdp": 2})
    pipe = js.pipelined(MODEL, PARAMS, SCHEDULE, mesh=mesh, data_axes=("fsdp",), param_specs=SPECS)
    stacked = pipe.layout.types
    report = js.comm_report(jax.jit(jax.grad(pipe, has_aux=True)), stacked, tokens(16))
    emitted = {(row.axis, row.collective): row for row in report.rows if row.level == "emitted"}
    ticks, activation = len(SCHEDULE.ticks()), 2 * 4 * 4  # two examples of width 4, in float32
    permutes = emitted.pop(("stage", "collective-permute"))
    assert (permutes.count, permutes.bytes) == (2 * ticks, 2 * ticks * activation)
    assert not any(row.conditional for row in report.rows if row.axis == "stage")
    sharded = 4 * (8 * 4 + 2 * 4 * 6)  # bytes of a stage's table and block, but for its bias
    assert {key: (row.count, row.bytes) for key, row in emitted.items()} == {
        ("fsdp", "all-gather"): (1, sharded),
        ("fsdp", "reduce-scatter"): (1, sharded),
        ("fsdp", "all-reduce"): (1, 4 * 6),
        ("stage", "all-reduce"): (1, 4 * 8 * 4 // 2),  # the tied table, of which each has half
        ("stage,fsdp", "all-reduce"): (1, 4),  # the metric; nobody reads the loss
    }
    assert all(not row.in_loop for row in emitted.values())


def test_without_gradients_forward_passes_run_alone(mesh_of):
    pipe = js.pipelined(MODEL, PARAMS, SCHEDULE, mesh=mesh_of({"stage": 2}))
    program = jax.jit(pipe).lower(pipe.layout.types, tokens(8)).as_text()
    assert program.count("stablehlo.collective_permute") == 1  # no cotangent travels
    only = js.schedules.one_f_one_b(2, 4, forward_only=True)
    pipe = js.pipelined(MODEL, PARAMS, only, mesh=mesh_of({"stage": 2}))
    assert_close(jax.jit(pipe)(PARAMS, tokens(8)), MODEL(PARAMS, tokens(8)))


def test_microbatches_may_wait_in_host_memory(mesh_of):
    mesh, batch = mesh_of({"stage": 2}), tokens(8)
    pipe = js.pipelined(MODEL, PARAMS, SCHEDULE, mesh=mesh, batch_memory="host")
    placed = jax.device_put(batch, NamedSharding(mesh, P(), memory_kind="pinned_host"))
    stacked = pipe.layout.stack(PARAMS)
    program = jax.jit(pipe).trace(stacked, placed)
    # Microbatches are read from the host's memory alone; what is compiled for CPU, whose devices
    # have no other, does not tell.
    text = str(program.jaxpr)
    assert "i32<host>[1,2]" in text
    assert "i32[1,2]" not in text
    assert_close(program.lower().compile()(stacked, placed), MODEL(PARAMS, batch))


def test_branches_may_write_into_the_buffers_too(mesh_of, monkeypatch):
    """As the package does for the compiler of a TPU."""
    monkeypatch.setattr(_one_program, "writes_in_branches", lambda mesh: True)
    schedule, batch = js.schedules.zero_bubble(2, 4), tokens(8)
    pipe = js.pipelined(MODEL, PARAMS, schedule, mesh=mesh_of({"stage": 2}))
    values, grads = jax.jit(jax.value_and_grad(pipe, has_aux=True))(PARAMS, batch)
    assert_close((values, grads), jax.value_and_grad(MODEL, has_aux=True)(PARAMS, batch))


def test_programs_grow_neither_with_equal_layers_nor_with_microbatches(mesh_of):
    def length(blocks, microbatches):
        model, params = language_model(blocks)
        schedule = js.schedules.one_f_one_b(2, microbatches)
        pipe = js.pipelined(model, params, schedule, mesh=mesh_of({"stage": 2}))
        step = jax.jit(jax.value_and_grad(pipe, has_aux=True))
        text = step.lower(pipe.layout.types, tokens(2 * microbatches)).as_text()
        return len(text.splitlines())

    assert length(30, 4) == length(10, 64) == length(10, 4)
    assert length(4, 4) != length(10, 4)  # two layers are no loop
