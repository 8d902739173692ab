"""The readers of what XLA compiles for described GPUs: of schedules, bytes and estimated times.

And `js.comm_report` agrees with them on every program of this folder.
"""

from collections import Counter
from math import prod

import jax
import jax.numpy as jnp
import pytest

import jaxslowmo as js
from support import gpu_programs, gpu_steps
from support.described import lowered_step
from support.gpu_estimates import Estimate, read_estimate, text_with_estimates
from support.gpu_hosts import SPECIFICATIONS, gpu_mesh, memory_bandwidth
from support.gpu_schedule import (
    Schedule,
    collectives_run,
    read_gpu_schedule,
    read_loops,
    share_beside_backward,
)
from support.outer_programs import BYTES, LAYERS, PARAMS, PRODUCTS, WIDTH, loss
from support.steps_of_algorithms import Facts, kinds


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


BYTES_PER_MICROSECOND = 64


def sol(microseconds: float, more: str = "") -> str:
    """Return the attribute of an instruction with an estimate, beside one of another model."""
    return (
        f'backend_config={{{more}"reification_cost":[{{"exec_time_us":9999,"name":""}},'
        f'{{"exec_time_us":{microseconds},"name":"sol"}}]}}'
    )


HLO = f"""HloModule example, is_scheduled=true, num_partitions=8

%multiplies (a: f32[8,8], b: f32[8,8]) -> f32[8,8] {{
  %a = f32[8,8]{{1,0}} parameter(0)
  %b = f32[8,8]{{1,0}} parameter(1)
  ROOT %dot = f32[8,8]{{1,0}} dot(%a, %b), metadata={{op_name="f/transpose(jvp())/dot_general"}}
}}

%adds (d: f32[8,8]) -> f32[8,8] {{
  %d = f32[8,8]{{1,0}} parameter(0)
  ROOT %sum = f32[8,8]{{1,0}} add(%d, %d), {sol(2)}
}}

%wrapped (w: f32[8,8]) -> f32[8,8] {{
  %w = f32[8,8]{{1,0}} parameter(0)
  ROOT %exchange = f32[8,8]{{1,0}} all-to-all(%w), replica_groups={{{{0,1}}}}, {sol(30)}
}}

%taken (t: f32[8,8]) -> f32[8,8] {{
  %t = f32[8,8]{{1,0}} parameter(0)
  %long_kernel = f32[8,8]{{1,0}} fusion(%t), kind=kLoop, calls=%adds, {sol(6)}
  ROOT %inner = f32[8,8]{{1,0}} all-reduce(%long_kernel), to_apply=%adds, {sol(8)}
}}

%body (s: f32[8,8]) -> f32[8,8] {{
  %s = f32[8,8]{{1,0}} parameter(0)
  %hop = (f32[8,8]{{1,0}}, f32[8,8]{{1,0}}) collective-permute-start(%s), {sol(4)}
  %tick = f32[8,8]{{1,0}} conditional(%s, %s, %s), branch_computations={{%adds, %taken}}
  ROOT %landed = f32[8,8]{{1,0}} collective-permute-done(%hop)
}}

%goes_on (c: f32[8,8]) -> pred[] {{
  %c = f32[8,8]{{1,0}} parameter(0)
  ROOT %always = pred[] constant(true)
}}

ENTRY %main (x: f32[8,8]) -> f32[8,8] {{
  %x = f32[8,8]{{1,0}} parameter(0)
  %start = ((f32[8,8]{{1,0}}), f32[1,8]{{1,0}}) reduce-scatter-start(%x), dimensions={{0}}, \
to_apply=%adds, metadata={{op_name="f/bucket_0/psum_scatter"}}, {sol(40)}
  %library = f32[8,8]{{1,0}} custom-call(%x, %x), custom_call_target="__cublas$gemm", \
metadata={{op_name="f/jvp()/dot_general"}}, {sol(5)}
  %fused = f32[8,8]{{1,0}} fusion(%library, %x), kind=kCustom, calls=%multiplies, {sol(20)}
  %named_alike = f32[8,8]{{1,0}} fusion(%fused), kind=kLoop, calls=%adds, {sol(0.01)}
  %done = f32[1,8]{{1,0}} reduce-scatter-done(%start)
  %wrapper = ((f32[8,8]{{1,0}}), f32[8,8]{{1,0}}) async-start(%named_alike), calls=%wrapped
  %copied = f32[8,8]{{1,0}} copy(%named_alike)
  %arrived = f32[8,8]{{1,0}} async-done(%wrapper)
  %blocks = f32[8,8]{{1,0}} all-gather(%done), dimensions={{0}}, {sol(7)}
  %waits = (f32[1,8]{{1,0}}, f32[8,8]{{1,0}}) all-gather-start(%done), dimensions={{0}}, \
{sol(9, '"collective_backend_config":{"is_sync":true},')}
  %waited = f32[8,8]{{1,0}} all-gather-done(%waits)
  ROOT %looped = f32[8,8]{{1,0}} while(%blocks), condition=%goes_on, body=%body, \
backend_config={{"known_trip_count":{{"n":"5"}}}}
}}
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
    assert share_beside_backward(schedule.transfers) == 32 / (32 + 3 * 256)
    (loop,) = read_loops(HLO)
    assert loop.transfers[0].beside == ("conditional",)
    assert loop.in_branches == 1


def test_counting_what_is_sent():
    """In the loop five turns, each with a permute and the larger of two branches."""
    sent = {"all-to-all": (1, 256), "all-gather": (2, 512), "reduce-scatter": (1, 32)}
    sent |= {"collective-permute": (5, 5 * 256), "all-reduce": (5, 5 * 256)}
    assert collectives_run(HLO) == {
        (kind, what): amount
        for kind, amounts in sent.items()
        for what, amount in zip(("count", "bytes"), amounts, strict=True)
    }


def test_estimated_times_add_up_in_the_order_of_the_schedule():
    """Kernels wait for what takes longer than those beside it."""
    # The softmax and the copy read and write 256 bytes each.
    softmax = copy = 2 * 256 / BYTES_PER_MICROSECOND
    beside_scatter = 5 + 20 + softmax
    assert read_estimate(HLO, 1e6 * BYTES_PER_MICROSECOND) == Estimate(
        kernels=beside_scatter + copy + 5 * 6,
        collectives=40 + 30 + 7 + 9 + 5 * (4 + 8),
        exposed=(40 - beside_scatter) + (30 - copy) + 7 + 9 + 5 * 8,
        by_bytes=softmax + copy,
    )
    hidden = HLO.replace(sol(40), sol(20)).replace(sol(4), sol(16))
    found = read_estimate(hidden, 1e6 * BYTES_PER_MICROSECOND)
    assert found.exposed == (30 - copy) + 7 + 9 + 5 * (8 + 16 - 14)
    assert found.step == found.kernels + found.exposed


@pytest.mark.parametrize("placeholder", [1, 5000])
def test_a_collective_without_an_estimate_is_an_error(placeholder):
    with pytest.raises(AssertionError, match="blocks"):
        read_estimate(HLO.replace(sol(7), sol(placeholder)), 1e12)


def estimate(sync, num_hosts, kind):
    mesh = gpu_mesh({"replica": 8 * num_hosts}, num_hosts=num_hosts)
    weights = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    batch = jax.ShapeDtypeStruct((1024 * mesh.size, 1024), jnp.float32)
    program = lowered_step(loss, sync, {"a": weights, "b": weights}, batch, mesh)[kind]
    return read_estimate(text_with_estimates(program), memory_bandwidth("H100"))


def test_estimates_of_a_described_h100():
    """Of every kernel; a slow step is estimated to take longer between hosts."""
    times = estimate(js.local_sgd("replica"), 1, "local")
    assert times.collectives == times.exposed == 0
    # Five products of 2 GFLOP; an H100 computes 495 TFLOP/s of TF32 at most.
    assert 5 * 2 * 1024**3 / 495e6 < times.kernels < 1000
    assert times.by_bytes < 0.1 * times.kernels
    slow = js.slowmo("replica", base=js.local_sgd("replica"))
    if jax.__version_info__ >= (0, 12):  # its compiler estimates kernels alone
        with pytest.raises(AssertionError, match="reduce_scatter"):
            estimate(slow, 1, "slow")
        return
    one, four = (estimate(slow, hosts, "slow") for hosts in (1, 4))
    assert 0 < one.exposed <= one.collectives
    assert four.collectives > 2 * one.collectives


def check_agreement(facts: Facts[Schedule], mesh: jax.sharding.Mesh) -> None:
    """The same number of collectives of each kind, with the same bytes; loops included.

    The reader counts what comes out of a collective, and the report what all devices together put
    into a reduce-scatter. So the sizes of the axes that the report names are checked, too.
    """
    reported: Counter[tuple[str, str]] = Counter()
    for row in facts.rows:
        group = prod(mesh.shape[name] for name in row.axis.split(","))
        parts = group if row.collective == "reduce-scatter" else 1
        reported[row.collective, "count"] += row.count
        reported[row.collective, "bytes"] += row.bytes // parts
    assert reported == collectives_run(facts.text)


@gpu_steps.each_of(gpu_steps.CASES)
def test_comm_report_agrees_on_steps_of_algorithms(algorithm, place):
    for kind in kinds(algorithm, place):
        check_agreement(gpu_steps.facts(algorithm, place, kind), place.mesh)


@gpu_programs.each_of(*(name for programs in gpu_programs.KINDS.values() for name in programs))
def test_comm_report_agrees_on_all_other_programs(name):
    one = gpu_programs.program(name)
    check_agreement(one.facts, one.mesh)
