"""Training steps over replicas of a pipeline: 20 steps equal those of the model on one device."""

import itertools

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from support.layered import assert_close, language_model, tokens

STEPS = 20
# Small steps and a large epsilon: Adam turns the rounding of a gradient near zero into a whole
# step. In float64 the largest difference after 20 steps is 3e-14 on the deepest of these models.
OPTIMIZER = optax.adamw(0.005, eps=1e-2, weight_decay=0.1)
KINDS = {
    "one_f_one_b": {},
    "gpipe": {},
    "zero_bubble": {},
    "interleaved": {"num_chunks": 2},
    "zbv": {},
    "lockstep": {},
}


def specs(num_blocks, axes):
    """Of the language model, over those of "fsdp" and "tensor" that the mesh has."""
    f, t = ("fsdp" if "fsdp" in axes else None), ("tensor" if "tensor" in axes else None)
    of_block = {"up": P(f, t), "bias": P(t), "down": P(t, f)}
    return [{"table": P(None, f)}, *[of_block] * num_blocks, {"table": P(None, f)}]


def slow(**options):
    return js.slowmo("replica", base=js.local_sgd("replica", sync_every=2), sync_every=4, **options)


def trajectories(mesh, schedule, *, tied, accumulate, mode, weight=None, num_blocks):
    """Parameters and metrics after 20 steps: of the pipeline and of the model alone."""
    model, params = language_model(num_blocks, tied=tied)
    data_axes = ("fsdp",) if "fsdp" in mesh.shape else ()
    pipe = js.pipelined(
        model,
        params,
        schedule,
        mesh=mesh,
        data_axes=data_axes,
        param_specs=specs(num_blocks, mesh.shape),
    )
    replicas = mesh.shape["replica"]
    step = js.make_train_step(
        pipe.loss_fn,
        OPTIMIZER,
        sync=slow(param_specs=pipe.layout.specs),
        mesh=mesh,
        mode=mode,
        accumulate=accumulate,
    )
    alone = js.make_train_step(
        model,
        OPTIMIZER,
        sync=slow(),
        mesh=js.virtual_mesh({"replica": replicas}),
        mode="traced",
        accumulate=accumulate,
    )
    state, known = step.init(pipe.layout.stack(params)), alone.init(params)
    shares = mesh.shape.get("fsdp", 1)
    examples = replicas * accumulate * schedule.num_microbatches * 2 * shares
    for i in range(STEPS):
        batch = tokens(examples, seed=i)
        state, metrics = step(state, batch, weight)
        known, expected = alone(known, batch, weight)
    return pipe, state, (pipe.layout.unstack_like(state.params), metrics), (known.params, expected)


def check(mesh, schedule, **options):
    pipe, state, found, known = trajectories(mesh, schedule, **options)
    assert_close(found, known)
    own = jax.tree.map(lambda x: np.asarray(x[0]), state.params)
    held = pipe.layout.stack(pipe.layout.unstack(own))
    for name, x in own.items():
        np.testing.assert_array_equal(x, held[name], err_msg="padding stays zero")


@pytest.mark.parametrize(
    ("sizes", "kind", "tied", "accumulate", "mode", "weight"),
    [
        ({"replica": 2, "stage": 2, "fsdp": 2}, "one_f_one_b", True, 2, "traced", None),
        ({"replica": 2, "stage": 2, "tensor": 2}, "zero_bubble", False, 1, "host", [3.0, 1.0]),
    ],
)
def test_a_sample_of_meshes(mesh_of, sizes, kind, tied, accumulate, mode, weight):
    schedule = js.schedules.by_name(kind, sizes["stage"], 4, **KINDS[kind])
    weight = None if weight is None else np.array(weight, np.float32)
    check(
        mesh_of(sizes),
        schedule,
        tied=tied,
        accumulate=accumulate,
        mode=mode,
        weight=weight,
        num_blocks=2,
    )


def meshes_of_eight():
    names = ("replica", "stage", "fsdp", "tensor")
    for sizes in itertools.product((1, 2, 4, 8), repeat=4):
        found = dict(zip(names, sizes, strict=True))
        if np.prod(sizes) == 8 and found["stage"] > 1 and found["tensor"] <= 2:
            yield {n: size for n, size in found.items() if size > 1 or n in ("replica", "stage")}


MESHES = list(meshes_of_eight())


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:slowmo. axis 'replica' has size 1")
@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "sizes", MESHES, ids=lambda s: "x".join(f"{n[0]}{k}" for n, k in s.items())
)
def test_every_mesh_of_eight_devices(mesh_of, sizes, kind, accumulate):
    stages = sizes["stage"]
    # Tied weights and the mode take turns: each stands beside every mesh, kind and accumulation.
    turn = MESHES.index(sizes) + list(KINDS).index(kind)
    check(
        mesh_of(sizes),
        js.schedules.by_name(kind, stages, max(4, stages), **KINDS[kind]),
        tied=(turn + accumulate) % 2 == 0,
        accumulate=accumulate,
        mode="host" if (turn // 2 + accumulate) % 2 else "traced",
        num_blocks=2 * stages - 2,
    )
