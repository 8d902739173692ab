"""Programs for GPUs besides the steps of `support.gpu_steps`, each compiled once.

Updates of gradients by hooks and of parameters by codecs, pipelines, steps with tables, and steps
of replicas that are sharded inside.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxslowmo as js
from jaxslowmo.models import GPTConfig
from support.described import lowered_update
from support.embedding_steps import Ahead, Workload, lowered_with_tables
from support.gpu_hosts import gpu_mesh
from support.gpu_schedule import Schedule, read_gpu_schedule
from support.pipeline_programs import lowered_pipeline
from support.sharded_steps import Sharded
from support.steps_of_algorithms import Facts, read_facts

REPLICAS = 8

# What hooks and codecs exchange: a matrix, and a vector, which PowerSGD does not compress.
GRADIENTS = {
    "matrix": jax.ShapeDtypeStruct((512, 768), jnp.float32),
    "vector": jax.ShapeDtypeStruct((3000,), jnp.float32),
}
NUM_GRADIENTS = sum(x.size for x in GRADIENTS.values())
RANK = 2
HOOKS = {
    "int8": js.hooks.int8(),
    "fp8": js.hooks.fp8(),
    "bf16_compress": js.hooks.bf16_compress(),
    "fp16_compress": js.hooks.fp16_compress(),
    "powersgd": js.hooks.powersgd(RANK, start_step=2),
}
# With the phase that is compiled.
CODECS = {
    "average": (js.local_sgd("replica", sync_every=2, codec=js.codecs.bfloat16()), "average"),
    "round 0": (
        js.sgp("replica", graph=js.topology.ring(REPLICAS), codec=js.codecs.float16(), overlap=1),
        "round 0",
    ),
    "int4": (js.local_sgd("replica", sync_every=2, codec=js.codecs.int4()), "average"),
    "int8, sharded": (js.diloco("replica", sync_every=2, codec=js.codecs.int8()), "slow"),
}

MICROBATCH = 4096, 512  # examples, width
STAGES = 4
SCHEDULES = {"1F1B": js.schedules.one_f_one_b, "GPipe": js.schedules.gpipe}

WORKLOAD = Workload(tables=2, rows=4096, batch=256, widths=(512, 512, 512))
AHEAD: dict[str, tuple[Ahead, int]] = {
    f"{ahead} ahead, {hosts} x 8": (ahead, hosts)
    for ahead in ("ids", "vectors")
    for hosts in (1, 4)
}


@dataclass(frozen=True)
class HostSharded(Sharded):
    """A model on hosts of GPUs."""

    @functools.cached_property
    def mesh(self) -> jax.sharding.Mesh:
        return gpu_mesh(dict(self.axes), num_hosts=self.num_groups, gpu=self.hardware)


_GPT = GPTConfig(
    num_layers=1,
    num_heads=2,
    embed_dim=256,
    context_length=64,
    dtype="bfloat16",
    remat=True,
    qkv_by_head=True,
)
SHARDED = {
    "fsdp": HostSharded(_GPT, "H100", (("replica", 2), ("fsdp", 4))),
    "fsdp x tensor": HostSharded(_GPT, "H100", (("replica", 2), ("fsdp", 2), ("tensor", 2))),
}


def _of_hook(name: str) -> tuple[jax.stages.Lowered, jax.sharding.Mesh]:
    mesh = gpu_mesh({"replica": REPLICAS})
    one = {"bucket_bytes": 10**9, "first_bucket_bytes": 10**9}
    transform = js.all_reduce_gradients("replica", hook=HOOKS[name], **one)
    return lowered_update(transform, GRADIENTS, mesh), mesh


def _of_codec(name: str) -> tuple[jax.stages.Lowered, jax.sharding.Mesh]:
    mesh, (sync, phase) = gpu_mesh({"replica": REPLICAS}), CODECS[name]
    return lowered_update(sync, GRADIENTS, mesh, phase=(phase,)), mesh


def _of_pipeline(name: str) -> tuple[jax.stages.Lowered, jax.sharding.Mesh]:
    mesh = gpu_mesh({"replica": 8 // STAGES, "stage": STAGES})
    return lowered_pipeline(mesh, SCHEDULES[name], STAGES, MICROBATCH)[0], mesh


def _with_tables(name: str) -> tuple[jax.stages.Lowered, jax.sharding.Mesh]:
    ahead, hosts = AHEAD[name]
    mesh = gpu_mesh({"shard": 8 * hosts}, num_hosts=hosts)
    return lowered_with_tables(mesh, WORKLOAD, ahead), mesh


def _of_sharded(name: str, kind: str) -> tuple[jax.stages.Lowered, jax.sharding.Mesh]:
    case = SHARDED[name]
    return case.lowered(kind), case.mesh


Make = Callable[[], tuple[jax.stages.Lowered, jax.sharding.Mesh]]
# By what they are, and by name. Those of one kind are compiled by one worker.
KINDS: dict[str, dict[str, Make]] = {
    "updates": {
        **{f"hook {name}": functools.partial(_of_hook, name) for name in HOOKS},
        **{f"codec, {name}": functools.partial(_of_codec, name) for name in CODECS},
    },
    "pipelines": {f"pipeline {name}": functools.partial(_of_pipeline, name) for name in SCHEDULES},
    "tables": {name: functools.partial(_with_tables, name) for name in AHEAD},
    "sharded": {
        f"{name}, {kind}": functools.partial(_of_sharded, name, kind)
        for name in SHARDED
        for kind in ("local", "slow")
    },
}
# Those that the usual run leaves out.
SELDOM = {
    "hook fp8",
    "hook fp16_compress",
    *(name for name in KINDS["tables"] if name != "ids ahead, 1 x 8"),
    *(name for name in KINDS["sharded"] if name != "fsdp, slow"),
}


def group_of(name: str) -> pytest.MarkDecorator:
    """Return the mark of tests that share the programs of one kind."""
    (kind,) = (kind for kind, programs in KINDS.items() if name in programs)
    return pytest.mark.xdist_group(f"programs: {kind}")


def each_of(*names: str) -> pytest.MarkDecorator:
    """Return the mark of a test that takes these programs, by their names."""
    cases = []
    for name in names:
        marks = [group_of(name), *([pytest.mark.exhaustive] if name in SELDOM else [])]
        cases.append(pytest.param(name, marks=marks))
    return pytest.mark.parametrize("name", cases)


@dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
      mesh: its mesh of described GPUs.
      compiled: the program.
      facts: what it does on each GPU.
    """

    mesh: jax.sharding.Mesh
    compiled: jax.stages.Compiled
    facts: Facts[Schedule]


@functools.cache
def program(name: str) -> Program:
    """Compile the program of a name in `KINDS`, once."""
    (make,) = (programs[name] for programs in KINDS.values() if name in programs)
    lowered, mesh = make()
    compiled = lowered.compile()
    return Program(mesh, compiled, read_facts(name, lowered, compiled, mesh, read_gpu_schedule))


def report(name: str, **selected: Any) -> tuple[js.reports.CommRow, ...]:
    """Return the rows of the `comm_report` of a program as compiled, by kind of step."""
    one = program(name)
    return js.comm_report_of(one.compiled, mesh=one.mesh).select(level="compiled", **selected)
