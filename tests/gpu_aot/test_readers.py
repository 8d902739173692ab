"""The reader of the schedules that XLA makes for described GPUs."""

import jax
import jax.numpy as jnp
import pytest

import jaxslowmo as js
from support.described import lowered_step
from support.gpu_hosts import SPECIFICATIONS, gpu_mesh
from support.gpu_schedule import read_gpu_schedule
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
