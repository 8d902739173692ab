"""The reader of the schedules that XLA makes for described GPUs."""

import jax
import jax.numpy as jnp
import pytest

import jaxslowmo as js
from support.described import lowered_step
from support.gpu_hosts import SPECIFICATIONS, gpu_mesh
from support.gpu_schedule import read_gpu_schedule, read_loops
from support.outer_programs import BYTES, LAYERS, PARAMS, PRODUCTS, WIDTH, loss


@pytest.mark.parametrize("gpu", SPECIFICATIONS)
def test_the_reader_sees_every_product_and_the_exchange_of_a_step(gpu):
    mesh = gpu_mesh({"replica": 4, "device": 8}, num_hosts=4, gpu=gpu)
    assert [[d.process_index for d in row] for row in mesh.devices] == [[i] * 8 for i in range(4)]
    assert gpu in mesh.devices.flat[0].device_kind
    mesh = gpu_mesh({"replica": 8}, gpu=gpu)
    batch = jax.ShapeDtypeStruct((512 * 8, WIDTH), jnp.float32)
    gradients = js.all_reduce_gradients("replica")
    lowered = lowered_step(loss, None, PARAMS, batch, mesh, gradients=gradients)["every"]
    assert lowered.as_text().count("stablehlo.dot_general") == PRODUCTS
    schedule = read_gpu_schedule(lowered.compile().as_text())
    assert schedule.num_products == PRODUCTS
    assert sum(p.is_backward for p in schedule.products) == 2 * LAYERS - 1
    (all_reduce,) = schedule.transfers
    # For A100s the compiler puts nothing beside it, for H100s a few scalars.
    assert (all_reduce.collective, all_reduce.is_blocking) == ("all-reduce", gpu == "A100")
    assert all_reduce.bytes == BYTES


HLO = """HloModule example, is_scheduled=true, num_partitions=8

%multiplies (a: f32[8,8], b: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8]{1,0} parameter(0)
  %b = f32[8,8]{1,0} parameter(1)
  ROOT %dot = f32[8,8]{1,0} dot(%a, %b), metadata={op_name="f/transpose(jvp())/dot_general"}
}

%adds (d: f32[8,8]) -> f32[8,8] {
  %d = f32[8,8]{1,0} parameter(0)
  ROOT %sum = f32[8,8]{1,0} add(%d, %d)
}

%wrapped (w: f32[8,8]) -> f32[8,8] {
  %w = f32[8,8]{1,0} parameter(0)
  ROOT %exchange = f32[8,8]{1,0} all-to-all(%w), replica_groups={{0,1}}
}

%taken (t: f32[8,8]) -> f32[8,8] {
  %t = f32[8,8]{1,0} parameter(0)
  ROOT %inner = f32[8,8]{1,0} all-reduce(%t), to_apply=%adds
}

%body (s: f32[8,8]) -> f32[8,8] {
  %s = f32[8,8]{1,0} parameter(0)
  %hop = (f32[8,8]{1,0}, f32[8,8]{1,0}) collective-permute-start(%s)
  %tick = f32[8,8]{1,0} conditional(%s, %s, %s), branch_computations={%adds, %taken}
  ROOT %landed = f32[8,8]{1,0} collective-permute-done(%hop)
}

%goes_on (c: f32[8,8]) -> pred[] {
  %c = f32[8,8]{1,0} parameter(0)
  ROOT %always = pred[] constant(true)
}

ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
  %start = ((f32[8,8]{1,0}), f32[1,8]{1,0}) reduce-scatter-start(%x), dimensions={0}, \
to_apply=%adds, metadata={op_name="f/bucket_0/psum_scatter"}
  %library = f32[8,8]{1,0} custom-call(%x, %x), custom_call_target="__cublas$gemm", \
metadata={op_name="f/jvp()/dot_general"}
  %fused = f32[8,8]{1,0} fusion(%library, %x), kind=kCustom, calls=%multiplies
  %named_alike = f32[8,8]{1,0} fusion(%fused), kind=kLoop, calls=%adds
  %done = f32[1,8]{1,0} reduce-scatter-done(%start)
  %wrapper = ((f32[8,8]{1,0}), f32[8,8]{1,0}) async-start(%named_alike), calls=%wrapped
  %copied = f32[8,8]{1,0} copy(%named_alike)
  %arrived = f32[8,8]{1,0} async-done(%wrapper)
  %blocks = f32[8,8]{1,0} all-gather(%done), dimensions={0}
  %waits = (f32[1,8]{1,0}, f32[8,8]{1,0}) all-gather-start(%done), dimensions={0}, \
backend_config={"collective_backend_config":{"is_sync":true}}
  %waited = f32[8,8]{1,0} all-gather-done(%waits)
  ROOT %looped = f32[8,8]{1,0} while(%blocks), condition=%goes_on, body=%body, \
backend_config={"known_trip_count":{"n":"5"}}
}
"""


def test_reading_the_order():
    schedule = read_gpu_schedule(HLO)
    assert [(t.collective, t.bytes, t.is_blocking) for t in schedule.transfers] == [
        ("reduce-scatter", 32, False),
        ("all-to-all", 256, False),
        ("all-gather", 256, True),
        ("all-gather", 256, True),
    ]
    scatter = schedule.transfers[0]
    names = ["f/jvp()/dot_general", "f/transpose(jvp())/dot_general"]
    assert [p.op_name for p in scatter.products] == names
    assert scatter.beside == ("custom-call", "fusion", "fusion")
    assert schedule.select("reduce-scatter", name="bucket_0") == (scatter,)
    assert schedule.select("all-gather", name="bucket_0") == ()
    (loop,) = read_loops(HLO)
    assert loop.transfers[0].beside == ("conditional",)
    assert loop.in_branches == 1
