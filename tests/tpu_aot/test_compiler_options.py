"""What the recommended compiler options do to gossip on TPU slices; nothing runs here."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxslowmo as js
from support.described import lowered_step
from support.tpu_schedule import read_schedule
from support.tpu_slices import tpu_mesh

LAYERS, WIDTH = 4, 512
PARAMS = {f"w{i}": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32) for i in range(LAYERS)}


def mlp_loss(params, batch):
    x = batch
    for name in sorted(params):
        x = jnp.tanh(x @ params[name])
    return jnp.mean(jnp.square(x))


def schedule_of(topology, sync, *, is_recommended):
    """Return the schedule of the first round of a host-scheduled step on eight chips."""
    mesh = tpu_mesh(topology, {"replica": 8})
    options = js.recommended_compiler_options(mesh) if is_recommended else None
    batch = jax.ShapeDtypeStruct((32 * mesh.size, WIDTH), jnp.float32)
    programs = lowered_step(mlp_loss, sync, PARAMS, batch, mesh, compiler_options=options)
    return read_schedule(programs["round 0"].compile().as_text() or "")


@pytest.mark.parametrize("topology", ["v6e:2x4", "v5p:2x2x2"])
def test_gossip_overlaps_with_the_recommended_options(topology):
    """Without them the exchange ends before the products (v6e) or amid them (v5p)."""
    sync = js.sgp("replica", overlap=1)
    assert not schedule_of(topology, sync, is_recommended=False).runs_beside
    assert schedule_of(topology, sync, is_recommended=True).runs_beside


@pytest.mark.parametrize("topology", ["v5e:2x4", "v6e:2x4", "v5p:2x2x2"])
def test_seven_peers_are_sent_to_at_a_time_with_them(topology):
    sync = js.sgp("replica", graph=js.topology.complete, overlap=1)
    assert not schedule_of(topology, sync, is_recommended=False).runs_beside
    schedule = schedule_of(topology, sync, is_recommended=True)
    assert len(schedule.starts) == 7
    assert schedule.runs_beside


PERMUTES = {"xla_max_concurrent_async_collective_permutes": 16}
SCHEDULER = {"xla_tpu_enable_all_experimental_scheduler_features": True}


@pytest.mark.parametrize(
    ("topology", "options"),
    [
        ("v4:2x2x1", {}),
        ("v5e:2x4", PERMUTES),
        ("v5p:2x2x2", PERMUTES | SCHEDULER),
        ("v6e:2x4", PERMUTES | SCHEDULER),
    ],
)
def test_they_depend_on_the_kind_of_chip(topology, options):
    assert js.recommended_compiler_options(tpu_mesh(topology, {"replica": 8})) == options


def test_options_of_gpus_are_refused():
    options = {"xla_gpu_experimental_parallel_collective_overlap_limit": 2}
    with pytest.raises(ValueError, match=r"is an option for GPUs, and `mesh` has TPUs"):
        js.make_train_step(
            mlp_loss,
            optax.sgd(0.1),
            sync="none",
            mesh=tpu_mesh("v5e:2x4", {"replica": 8}),
            compiler_options=options,
        )
