"""What the recommended compiler options do to steps for described GPUs; nothing runs here."""

import jax
import jax.numpy as jnp

import jaxslowmo as js
from support.described import lowered_step
from support.gpu_hosts import gpu_mesh
from support.gpu_schedule import read_gpu_schedule
from support.outer_programs import loss

SCHEDULER = {"xla_gpu_enable_latency_hiding_scheduler": True}
LEVELS = SCHEDULER | {"xla_gpu_experimental_parallel_collective_overlap_limit": 2}


def test_two_levels_of_gossip_overlap_with_the_recommended_options():
    """By default one collective is in flight: the permute waits for the gradients' all-reduce."""
    mesh = gpu_mesh({"replica": 4, "device": 8}, num_hosts=4)
    params = {f"w{i}": jax.ShapeDtypeStruct((1024, 1024), jnp.float32) for i in range(4)}
    batch = jax.ShapeDtypeStruct((4096 * mesh.size, 1024), jnp.float32)
    sync = js.sgp("replica", overlap=1)
    default, recommended = (
        read_gpu_schedule(
            lowered_step(loss, sync, params, batch, mesh, compiler_options=options)["round 0"]
            .compile()
            .as_text()
        )
        for options in (None, js.recommended_compiler_options(mesh))
    )
    (permute,), (gradients,) = map(default.select, ("collective-permute", "all-reduce"))
    assert permute.start > gradients.done > default.products[-1].place
    assert permute.products == ()
    (permute,), (gradients,) = map(recommended.select, ("collective-permute", "all-reduce"))
    assert permute.products == recommended.products
    assert permute.start < gradients.start < gradients.done < permute.done


def test_two_collectives_at_a_time_are_recommended_for_two_levels():
    for axes, options in (
        ({"replica": 8, "device": 1}, SCHEDULER),
        ({"replica": 4, "device": 2}, LEVELS),
    ):
        assert js.recommended_compiler_options(gpu_mesh(axes)) == options
