"""What jax has under private names does what this package takes it for."""

import ast
import importlib
import subprocess
import sys
from functools import reduce
from itertools import chain, permutations
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo._support import private_jax

ROOT = Path(__file__).parents[2]
# What each name is for, and where jax may have put it.
USES = {
    "core.get_axis_env": "it lists the mapped axes and those of vmap(spmd_axis_name=...): look at "
    "what lax.axis_size and vmap use. mesh/_axes.py needs it for errors and layouts",
    "core.NamedAxisEffect": "the effect of collectives: look at the effects of a psum's equation. "
    "Without it pipelines and islands take collectives for side effects",
    "distributed.global_state": "its client is the key-value store of jax.distributed: look at "
    "what orbax and jax.experimental.multihost_utils use. _support/coordinator.py needs it",
    "xla_bridge.backends_are_initialized": "look at what jax.distributed.initialize refuses to "
    "follow. torch_compat.runtime.is_started needs it",
    "xla_bridge._backend_factories": "what jax.extend.backend.register_backend_factory fills. "
    "Without it a libtpu without TPU prints long warnings in torch_compat",
    "cloud_tpu_init.running_in_cloud_tpu_vm": "whether there is a TPU: look at what `import jax` "
    "does on a TPU machine. torch_compat needs it",
    "xla_client.pjrt_plugin_loaded": "look at what starts plugins in jax. Without it "
    "js.reports.measured ends the process where libtpu is loaded without a TPU",
}


@pytest.mark.parametrize("name", USES)
def test_jax_has_the_name(name):
    module, attribute = name.split(".")
    package = "jaxlib" if module == "xla_client" else "jax._src"
    assert hasattr(importlib.import_module(f"{package}.{module}"), attribute), (
        f"jax {jax.__version__} has no {package}.{name}, which jaxslowmo/_support/private_jax.py "
        f"uses: {USES[name]}."
    )


def _private(path: Path) -> set[str]:
    """Return the private modules of jax that a file imports."""
    nodes = [*ast.walk(ast.parse(path.read_text("utf-8")))]
    names = [alias.name for x in nodes if isinstance(x, ast.Import) for alias in x.names]
    names += [
        f"{x.module}.{a.name}" for x in nodes if isinstance(x, ast.ImportFrom) for a in x.names
    ]
    return {name for name in names if name.startswith(("jax._src", "jaxlib."))}


def test_no_other_file_imports_a_private_module_and_all_uses_are_listed():
    own = Path(private_jax.__file__)
    for tree in ("jaxslowmo", "torch_compat"):
        for path in (ROOT / tree).rglob("*.py"):
            assert path == own or not _private(path), path
    modules = {name.rpartition(".")[2] for name in _private(own)}
    used = {
        f"{x.value.id}.{x.attr}"
        for x in ast.walk(ast.parse(own.read_text("utf-8")))
        if isinstance(x, ast.Attribute) and isinstance(x.value, ast.Name) and x.value.id in modules
    }
    assert used == USES.keys()


def along_last(**named):
    return lambda f: jax.vmap(f, in_axes=-1, out_axes=-1, **named)


def over_devices(f):
    mesh, over = js.make_mesh({"replica": 2, "device": 2}), P("device")
    how = {"in_specs": over, "out_specs": over, "axis_names": {"device"}, "check_vma": False}
    return jax.shard_map(f, mesh=mesh, **how)


# A way to map, the axes that it binds with their sizes, and those of `spmd_axis_name`.
MAPS = {
    "plain": (along_last(), {}, set()),
    "vmap": (along_last(axis_name="run"), {"run": 2}, set()),
    "spmd": (along_last(spmd_axis_name="replica"), {}, {"replica"}),
    "devices": (over_devices, {"device": 2}, set()),
}


@pytest.mark.parametrize("maps", [*chain.from_iterable(permutations(MAPS, n) for n in range(4))])
def test_the_axes_of_maps_in_each_other(maps):
    seen = []

    def noted(x):
        seen.append((private_jax.mapped_axis_sizes(), private_jax.spmd_axes()))
        return x

    mapped = reduce(lambda f, name: MAPS[name][0](f), maps, noted)
    jax.eval_shape(mapped, jnp.zeros((2, 2, 2, 2)))
    bound = {axis: size for name in maps for axis, size in MAPS[name][1].items()}
    assert seen == [(bound, set().union(*(MAPS[name][2] for name in maps)))]
    assert (private_jax.mapped_axis_sizes(), private_jax.spmd_axes()) == ({}, set())


def test_effects_of_collectives_and_of_prints():
    def program(x):
        jax.debug.print("{}", x)
        return jax.lax.psum(x, "run")

    traced = jax.make_jaxpr(program, axis_env=[("run", 2)])(1.0)
    effects = [[*map(private_jax.is_axis_effect, eqn.effects)] for eqn in traced.eqns]
    assert effects == [[False], [True]]


def test_processes_that_were_not_joined_have_no_client():
    assert private_jax.coordinator_client() is None


def test_devices_start_when_they_are_asked_for():
    code = (
        "import jax; from jaxslowmo._support import private_jax as p; "
        "assert not p.has_devices(); p.leave_out_missing_tpu(); "
        "assert jax.devices('cpu') and p.has_devices() and not p.has_libtpu_without_tpu()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
