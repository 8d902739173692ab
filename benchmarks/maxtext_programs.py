"""Collectives in programs of MaxText's own DiLoCo and of examples/maxtext, for described devices.

    .venv-maxtext/bin/python benchmarks/maxtext_programs.py tpu    # a slice of 2 x 4 TPU v5e
    .venv-maxtext/bin/python benchmarks/maxtext_programs.py gpu    # two hosts of 8 H100

The model of examples/maxtext/tiny.yml, two replicas of 4 or 8 devices, sharded inside (FSDP). No
such device is needed, but the compilers, best in a folder of PYTHONPATH: `pip install --no-deps
--target FOLDER libtpu==0.0.52 jax-cuda13-pjrt==0.11.2 jax-cuda13-plugin==0.11.2`.
"""

import functools
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={16 if 'gpu' in sys.argv else 8}"
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests/maxtext"))

import runs  # noqa: I001  it sets the platform before jax is imported

import jax
import numpy as np
from flax.core.spmd import logical_axis_rules
from jax.sharding import AxisType, Mesh, NamedSharding
from maxtext.configs import pyconfig
from maxtext.trainers.diloco import diloco
from maxtext.trainers.pre_train import train as its_own
from maxtext.trainers.pre_train import train_compile
from maxtext.utils import sharding

import jaxslowmo as js
import train
from support.gpu_hosts import gpu_mesh
from support.tpu_slices import tpu_mesh

DEVICES = jax.device_count()
OPTIONS = {"ici_fsdp_parallelism": DEVICES // 2, "diloco_sync_period": 4, "steps": 1}


def described() -> np.ndarray:
    """Return the devices, which exist as descriptions only."""
    if "gpu" not in sys.argv:
        return tpu_mesh("v5e:2x4", {"chip": DEVICES}).devices
    return gpu_mesh({"gpu": DEVICES}, num_hosts=2).devices


def config_of(**options: Any) -> Any:
    """Return MaxText's configuration."""
    arguments = [f"{name}={value}" for name, value in {**OPTIONS, **options}.items()]
    return pyconfig.initialize(["", str(runs.CONFIG), *arguments])


def first_state() -> tuple[Any, Any]:
    """Return the step of examples/maxtext on CPU devices and its first state."""
    kept: list[Any] = []
    make = js.with_exchange

    def keep(local: Any, sync: Any, **options: Any) -> Any:
        step = make(local, sync, **options)
        start = step.init

        def init(state: Any) -> Any:
            kept.extend([options, start(state)])
            return kept[-1]

        return mock.Mock(wraps=step, init=init, side_effect=step)

    with mock.patch.object(js, "with_exchange", keep):
        runs.run(train.main, **OPTIONS)
    return kept[0], kept[1]


def main() -> None:
    """Compile both, and print what they send."""
    options, state = first_state()
    config = config_of()
    sizes = [options["mesh"].shape[name] for name in config.mesh_axes]
    devices = described().reshape(sizes)
    mesh = Mesh(devices, config.mesh_axes, axis_types=(AxisType.Auto,) * len(sizes))
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
        (one, batch), _, places, _, graph = train_compile.get_shaped_inputs(mesh, config)
        of_params, places = sharding.maybe_update_params_sharding_with_opt(config, places)

        def shape(x: Any) -> Any:
            spec = x.sharding.spec
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

        step = js.with_exchange(
            functools.partial(its_own.train_step, graph, config, places, of_params),
            train.exchange(config),
            **options | {"mesh": mesh},
        )
        rows = jax.P(("diloco", "fsdp"))
        ours = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, rows)),
            batch,
        )
        programs = {"jaxslowmo": step.lower(jax.tree.map(shape, state), ours)}
    config = config_of(enable_diloco=True)
    with jax.set_mesh(mesh), mesh, logical_axis_rules(config.logical_axis_rules):
        (one, batch), _, places, _, graph = train_compile.get_shaped_inputs(mesh, config)
        of_params, places = sharding.maybe_update_params_sharding_with_opt(config, places)
        state, places, inner = diloco.build_abstract_diloco_state(config, one, places, mesh)
        local = functools.partial(its_own.train_step, graph, config, inner, of_params)
        program = jax.jit(
            diloco.build_diloco_train_step(config, local),
            in_shardings=(places, sharding.get_input_data_sharding(config, mesh), None),
            out_shardings=(places, None),
            donate_argnums=0,
        )
        programs["MaxText's own"] = program.lower(state, batch, None)
    for name, lowered in programs.items():
        compiled = lowered.compile()
        print(name, compiled.memory_analysis().temp_size_in_bytes, "bytes of temporary memory")
        print(js.comm_report_of(compiled, mesh=mesh))


if __name__ == "__main__":
    main()
