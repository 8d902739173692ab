"""Buckets of gradients, as XLA schedules their exchange on described H100s.

XLA computes the weights' gradients last, and exchanges each bucket beside those of the next ones.
The last bucket it exchanges stands beside what is left of the update, whatever the order.
`benchmarks/gpu_buckets.py` has the table.
"""

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxslowmo as js
from support.described import lowered_update
from support.gpu_buckets import lowered_average, what_runs_beside
from support.gpu_hosts import gpu_mesh
from support.gpu_schedule import read_gpu_schedule

KIB, MIB = 2**10, 2**20
# Between neighbours up to this size together, XLA's default.
THRESHOLD = 30 * MIB
WIDTH = 2048
# Names sort as block0, ..., head, stem, and the stem's gradient is the last of all.
USE = ["stem", *(f"block{i}" for i in range(8)), "head"]
PARAMS = {name: jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32) for name in USE}


def mlp_loss(params, x):
    for name in USE:
        x = jnp.tanh(x @ params[name])
    return jnp.mean(jnp.square(x))


def schedule_of_mlp(num_hosts=1, **options):
    """The schedule of a step of ten layers of 16 MiB, each in a bucket."""
    lowered = lowered_average(
        mlp_loss,
        PARAMS,
        jax.ShapeDtypeStruct((2048, WIDTH), jnp.float32),
        gpu_mesh({"replica": 8 * num_hosts}, num_hosts=num_hosts),
        gradients=js.all_reduce_gradients("replica", bucket_bytes=16 * MIB),
        **{"optimizer": optax.sgd(0.1), **options},
    )
    assert lowered.as_text().count("stablehlo.all_reduce") == len(USE)
    return read_gpu_schedule(lowered.compile().as_text() or "")


def test_all_but_the_last_bucket_travel_beside_the_backward_pass():
    transfers = schedule_of_mlp(num_hosts=4).transfers
    assert [t.bytes for t in transfers] == [16 * MIB] * len(USE)
    beside = what_runs_beside(transfers)
    assert (beside.share, beside.nothing) == (0.9, 0)


def test_an_optimizer_that_need_not_wait_for_all_hides_the_last_buckets():
    """Every bucket travels beside something, and fewer beside products."""
    beside = what_runs_beside(schedule_of_mlp(optimizer=optax.adamw(1e-3)).transfers)
    assert beside.nothing == 0
    assert 0.7 <= beside.share < 0.9


def test_a_loop_over_microbatches_ends_before_the_exchange():
    """What `accumulate` adds up is exchanged after the loop, and beside no product."""
    assert what_runs_beside(schedule_of_mlp(accumulate=2).transfers).share == 0
    # The last batch of a window has a backward pass of its own.
    assert what_runs_beside(schedule_of_mlp(windowed=True).transfers).share == 0.9


SEPARATE = {"xla_gpu_all_reduce_combine_threshold_bytes": 0}


@pytest.mark.parametrize(
    ("emitted", "compiler_options", "compiled"),
    [
        ([15 * MIB, 15 * MIB], {}, [THRESHOLD]),
        ([15 * MIB, 15 * MIB + KIB], {}, [15 * MIB, 15 * MIB + KIB]),
        ([1 * MIB, 1 * MIB], SEPARATE, [1 * MIB, 1 * MIB]),
    ],
)
def test_neighbours_of_up_to_30_mib_together_are_merged(emitted, compiler_options, compiled):
    mesh = gpu_mesh({"replica": 8})
    each_alone = js.all_reduce_gradients(
        "replica", bucket_bytes=0, first_bucket_bytes=0, order="forward"
    )
    gradients = [jax.ShapeDtypeStruct((size // 4,), jnp.float32) for size in emitted]
    lowered = lowered_update(each_alone, gradients, mesh)
    assert lowered.as_text().count("stablehlo.all_reduce") == len(emitted)
    text = lowered.compile(compiler_options=compiler_options).as_text() or ""
    assert [t.bytes for t in read_gpu_schedule(text).transfers] == compiled
