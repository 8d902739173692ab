"""What the recommended compiler options do to steps for described GPUs; nothing runs here."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxslowmo as js
from support.described import lowered_step
from support.gpu_hosts import gpu_mesh
from support.gpu_schedule import read_gpu_schedule, share_beside_backward


def mlp_loss(params, batch):
    x = batch
    for name in sorted(params):
        x = jnp.tanh(x @ params[name])
    return jnp.mean(jnp.square(x))


def compiled_text(mesh, options, *, layers, width, rows, **transforms):
    """Return the first program of a step of an MLP, host-scheduled, with `rows` per GPU."""
    params = {f"w{i}": jax.ShapeDtypeStruct((width, width), jnp.float32) for i in range(layers)}
    batch = jax.ShapeDtypeStruct((rows * mesh.size, width), jnp.float32)
    transforms = {"sync": None, **transforms}
    programs = lowered_step(
        mlp_loss, params=params, batch=batch, mesh=mesh, compiler_options=options, **transforms
    )
    return next(iter(programs.values())).compile().as_text() or ""


def exchange(schedule):
    """Return the permute of a schedule, and whether it runs beside all products."""
    (permute,) = schedule.select("collective-permute")
    return permute, permute.products == schedule.products


def test_two_levels_of_gossip_overlap_with_the_recommended_options():
    """By default one collective is in flight: the permute waits for the gradients' all-reduce."""
    mesh = gpu_mesh({"replica": 4, "device": 8}, num_hosts=4)
    case = {"layers": 4, "width": 1024, "rows": 4096, "sync": js.sgp("replica", overlap=1)}
    schedule = read_gpu_schedule(compiled_text(mesh, None, **case))
    permute, _ = exchange(schedule)
    (all_reduce,) = schedule.select("all-reduce")
    assert permute.start > all_reduce.done > schedule.products[-1].place
    assert permute.products == ()
    schedule = read_gpu_schedule(compiled_text(mesh, js.recommended_compiler_options(mesh), **case))
    permute, is_beside_all = exchange(schedule)
    (all_reduce,) = schedule.select("all-reduce")
    assert is_beside_all, (permute, schedule.products)
    assert permute.start < all_reduce.start < all_reduce.done < permute.done


def test_a_part_per_device_travels_beside_some_products_with_them():
    """How many is the compiler's choice: it starts no transfer earlier than its estimate asks."""
    mesh = gpu_mesh({"replica": 4, "device": 8}, num_hosts=4)
    sync = js.sgp("replica", overlap=1, local_axis_name="device")
    case = {"layers": 8, "width": 2048, "rows": 2048, "sync": sync}
    permute, _ = exchange(read_gpu_schedule(compiled_text(mesh, None, **case)))
    assert permute.products == ()
    options = js.recommended_compiler_options(mesh)
    permute, _ = exchange(read_gpu_schedule(compiled_text(mesh, options, **case)))
    assert len(permute.products) >= 2


SMALL = {"layers": 4, "width": 512, "rows": 512}
LARGE = {"layers": 8, "width": 2048, "rows": 2048}


def test_on_a100_gossip_overlaps_with_them_alone():
    mesh = gpu_mesh({"replica": 8}, gpu="A100")
    options = js.recommended_compiler_options(mesh)
    texts = [
        compiled_text(mesh, o, **SMALL, sync=js.sgp("replica", overlap=1)) for o in (None, options)
    ]
    (default, _), (_, is_beside_all) = map(exchange, map(read_gpu_schedule, texts))
    assert default.products == ()
    assert is_beside_all


def test_on_a100_buckets_travel_beside_the_backward_pass_with_them_alone():
    mesh = gpu_mesh({"replica": 8}, gpu="A100")
    options = js.recommended_compiler_options(mesh)
    shares = [
        share_beside_backward(
            read_gpu_schedule(
                compiled_text(mesh, o, **LARGE, gradients=js.all_reduce_gradients("replica"))
            ).transfers
        )
        for o in (None, options)
    ]
    assert shares[0] == 0
    assert shares[1] > 0.6


def test_on_h100_the_latency_hiding_scheduler_is_the_default():
    mesh = gpu_mesh({"replica": 8})
    sync = js.sgp("replica", overlap=1)
    explicit = {"xla_gpu_enable_latency_hiding_scheduler": True}
    texts = [compiled_text(mesh, options, **SMALL, sync=sync) for options in (None, explicit)]
    assert texts[0] == texts[1]


SCHEDULER = {"xla_gpu_enable_latency_hiding_scheduler": True}
LEVELS = SCHEDULER | {"xla_gpu_experimental_parallel_collective_overlap_limit": 2}


@pytest.mark.parametrize("gpu", ["H100", "A100"])
@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"replica": 8}, SCHEDULER),
        ({"replica": 8, "device": 1}, SCHEDULER),
        ({"replica": 4, "device": 2}, LEVELS),
    ],
)
def test_two_collectives_at_a_time_are_recommended_for_two_levels(gpu, axes, options):
    assert js.recommended_compiler_options(gpu_mesh(axes, gpu=gpu)) == options


def test_what_is_refused():
    mesh = gpu_mesh({"replica": 8})
    for name, of in (("xla_tpu_detect_nan", "TPUs"), ("xla_cpu_enable_fast_math", "CPUs")):
        with pytest.raises(ValueError, match=f"{name}' is an option for {of}, .* has GPUs"):
            js.make_train_step(
                mlp_loss, optax.sgd(0.1), sync="none", mesh=mesh, compiler_options={name: True}
            )
    with pytest.raises(RuntimeError, match="No such compile option: 'xla_gpu_no_such'"):
        compiled_text(mesh, {"xla_gpu_no_such": 1}, **SMALL, sync="none")
