"""The reader of XLA's estimated times, and what the compiler of a described H100 gives it."""

import jax
import jax.numpy as jnp
import pytest

import jaxslowmo as js
from support.described import lowered_step
from support.gpu_estimates import Estimate, read_estimate, text_with_estimates
from support.gpu_hosts import gpu_mesh, memory_bandwidth

BYTES_PER_MICROSECOND = 64


def sol(microseconds: float) -> str:
    """Return the attribute of an instruction with an estimate, beside one of another model."""
    return (
        'backend_config={"reification_cost":[{"exec_time_us":9999,"name":""},'
        f'{{"exec_time_us":{microseconds},"name":"sol"}}]}}'
    )


HLO = f"""HloModule example, is_scheduled=true, num_partitions=8

%adds (d: f32[8,8]) -> f32[8,8] {{
  %d = f32[8,8]{{1,0}} parameter(0)
  ROOT %sum = f32[8,8]{{1,0}} add(%d, %d)
}}

%wrapped (w: f32[8,8]) -> f32[1,8] {{
  %w = f32[8,8]{{1,0}} parameter(0)
  ROOT %scatter = f32[1,8]{{1,0}} reduce-scatter(%w), dimensions={{0}}, to_apply=%adds, {sol(30)}
}}

%long (l: f32[8,8]) -> f32[8,8] {{
  %l = f32[8,8]{{1,0}} parameter(0)
  ROOT %long_kernel = f32[8,8]{{1,0}} fusion(%l), kind=kLoop, calls=%adds, {sol(6)}
}}

%short (s: f32[8,8]) -> f32[8,8] {{
  %s = f32[8,8]{{1,0}} parameter(0)
  ROOT %short_kernel = f32[8,8]{{1,0}} fusion(%s), kind=kLoop, calls=%adds, {sol(2)}
}}

%body (b: f32[8,8]) -> f32[8,8] {{
  %b = f32[8,8]{{1,0}} parameter(0)
  %hop = (f32[8,8]{{1,0}}, f32[8,8]{{1,0}}) collective-permute-start(%b), {sol(4)}
  %branch = f32[8,8]{{1,0}} conditional(%b, %b, %b), branch_computations={{%short, %long}}
  ROOT %arrived = f32[8,8]{{1,0}} collective-permute-done(%hop)
}}

%goes_on (c: f32[8,8]) -> pred[] {{
  %c = f32[8,8]{{1,0}} parameter(0)
  ROOT %always = pred[] constant(true)
}}

ENTRY %main (x: f32[8,8]) -> f32[8,8] {{
  %x = f32[8,8]{{1,0}} parameter(0)
  %first = f32[8,8]{{1,0}} fusion(%x), kind=kLoop, calls=%adds, {sol(5)}
  %start = ((f32[8,8]{{1,0}}), f32[1,8]{{1,0}}) async-start(%first), calls=%wrapped
  %beside = f32[8,8]{{1,0}} fusion(%first), kind=kLoop, calls=%adds, {sol(20)}
  %softmax = f32[8,8]{{1,0}} fusion(%beside), kind=kCustom, calls=%adds, {sol(0.01)}
  %copied = f32[8,8]{{1,0}} copy(%softmax)
  %done = f32[1,8]{{1,0}} async-done(%start)
  %whole = f32[8,8]{{1,0}} all-gather(%done), dimensions={{0}}, {sol(7)}
  ROOT %loop = f32[8,8]{{1,0}} while(%whole), condition=%goes_on, body=%body, \
backend_config={{"known_trip_count":{{"n":"3"}}}}
}}
"""


def test_times_add_up_in_the_order_of_the_schedule():
    # The softmax and the copy read and write 256 bytes each.
    by_bytes = 2 * (2 * 256) / BYTES_PER_MICROSECOND
    beside = 20 + by_bytes
    assert beside == 36  # longer than the reduce-scatter
    assert read_estimate(HLO, 1e6 * BYTES_PER_MICROSECOND) == Estimate(
        kernels=5 + beside + 3 * 6,
        collectives=30 + 7 + 3 * 4,
        exposed=7,
        by_bytes=by_bytes,
    )


def test_kernels_wait_for_a_collective_that_takes_longer():
    text = HLO.replace(sol(20), sol(3)).replace(sol(4), sol(10))
    estimate = read_estimate(text, 1e6 * BYTES_PER_MICROSECOND)
    assert estimate.exposed == (30 - 3 - 16) + 7 + 3 * (10 - 6)
    assert estimate.step == estimate.kernels + estimate.exposed


@pytest.mark.parametrize("placeholder", [1, 5000])
def test_a_collective_without_an_estimate_is_an_error(placeholder):
    with pytest.raises(AssertionError, match="no time for whole"):
        read_estimate(HLO.replace(sol(7), sol(placeholder)), 1e12)


def loss(params, batch):
    return jnp.mean(jnp.square(jnp.tanh(batch @ params["first"]) @ params["second"]))


def estimate(sync, num_hosts, kind):
    mesh = gpu_mesh({"replica": 8 * num_hosts}, num_hosts=num_hosts)
    weights = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    params = {"first": weights, "second": weights}
    batch = jax.ShapeDtypeStruct((1024 * mesh.size, 1024), jnp.float32)
    program = lowered_step(loss, sync, params, batch, mesh)[kind]
    return read_estimate(text_with_estimates(program), memory_bandwidth("H100"))


def test_every_kernel_of_a_local_step_is_estimated():
    times = estimate(js.local_sgd("replica"), 1, "local")
    assert times.collectives == times.exposed == 0
    # Five products of 2 GFLOP; an H100 computes 495 TFLOP/s of TF32 at most.
    assert 5 * 2 * 1024**3 / 495e6 < times.kernels < 1000
    assert times.by_bytes < 0.1 * times.kernels


def test_a_slow_step_is_estimated_to_take_longer_between_hosts():
    slow = js.slowmo("replica", base=js.local_sgd("replica"))
    if jax.__version_info__ >= (0, 12):  # its compiler estimates kernels alone
        with pytest.raises(AssertionError, match="XLA estimates no time for reduce_scatter"):
            estimate(slow, 1, "slow")
        return
    one, four = (estimate(slow, hosts, "slow") for hosts in (1, 4))
    assert 0 < one.exposed <= one.collectives
    assert four.collectives > 2 * one.collectives
